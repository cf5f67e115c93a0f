"""Transcribing files of any length, and evaluating a finished model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_speech import RATE, WORDS, tone

from app.cli.main import main
from profiles.errors import BadInput
from speech.data.sound_file import Samples
from speech.data.speech_clips import hold_out
from speech.data.speech_dataset import read_speech
from speech.whisper.evaluation import evaluate_model
from speech.whisper.transcription import TranscriptionOptions, load_transcriber, next_cut, piece_count
from training.hardware.device import select_device


@pytest.mark.slow
def test_files_come_out_in_their_order(trained_whisper: Path) -> None:
    files = [trained_whisper / f"audio/clip{index}.wav" for index in (2, 0, 3, 1)]
    found = list(load_transcriber(trained_whisper / "model", "cpu")(files, 3))
    assert [(one.file, one.text) for one in found] == [(f, WORDS[i]) for f, i in zip(files, (2, 0, 3, 1))]
    assert found[0].seconds == pytest.approx(0.6)


def test_long_recording_is_heard_in_windows(trained_whisper: Path, tmp_path: Path) -> None:
    silence = np.zeros(int(0.3 * RATE), np.float32)
    said = (3, 1, 0, 2)
    parts = [part for word in said for part in (tone(word), silence)]
    soundfile.write(tmp_path / "long.wav", np.concatenate(parts), RATE)
    found = list(load_transcriber(trained_whisper / "model", "cpu")([tmp_path / "long.wav"], 2))
    assert found[0].text == " ".join(WORDS[word] for word in said)
    assert found[0].seconds == pytest.approx(3.6)


def test_broken_file_does_not_stop_the_others(trained_whisper: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.wav").write_text("no sound")
    files = [tmp_path / "broken.wav", trained_whisper / "audio/clip1.wav", tmp_path / "missing.wav"]
    first, second, third = load_transcriber(trained_whisper / "model", "cpu")(files)
    assert "not a readable sound file" in first.error
    assert (second.text, second.error) == ("two", "")
    assert (third.file, third.error) == (files[2], "No such file or directory")


@pytest.mark.parametrize("seconds", [0.9, 2.6])
def test_what_was_heard_before_the_damage_is_there(trained_whisper: Path, tmp_path: Path, seconds: float) -> None:
    silence = np.zeros(int(0.3 * RATE), np.float32)
    sound = np.concatenate([part for word in (3, 1, 0, 2) for part in (tone(word), silence)])
    soundfile.write(tmp_path / "cut.wav", sound, RATE)
    data = (tmp_path / "cut.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(data[: 44 + int(seconds * RATE) * 2])
    (heard,) = load_transcriber(trained_whisper / "model", "cpu")([tmp_path / "cut.wav"])
    assert heard.text == " ".join(WORDS[word] for word in (3, 1, 0, 2)[: round(seconds / 0.9)])
    assert heard.error.startswith("broken off")


def test_what_is_heard_of_a_damaged_recording_is_shown_and_written(
    trained_whisper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (trained_whisper / "audio" / "clip1.wav").read_bytes()
    damaged = tmp_path / "damaged.wav"
    damaged.write_bytes(data[:-9000])
    model = str(trained_whisper / "model")
    assert main(["transcribe", model, str(damaged)]) == 2
    out, err = capsys.readouterr()
    assert out == f"{damaged}: two\n" and f"error: {damaged}: broken off" in err
    assert main(["transcribe", model, str(damaged), "--format", "srt,txt", "--out", str(tmp_path / "out")]) == 2
    assert (tmp_path / "out" / "damaged.txt").read_text().startswith("two\n[cannot be read further: broken off")
    assert "two" in (tmp_path / "out" / "damaged.srt").read_text()


def test_evaluation_of_a_saved_model(trained_whisper: Path, tmp_path: Path) -> None:
    found = evaluate_model(
        trained_whisper / "model",
        str(trained_whisper),
        "validation",
        device="cpu",
        batch_size=3,
        cache_dir=str(tmp_path),
    ).metrics
    assert found["wer"] == found["cer"] == 0.0
    assert found["loss"] < 0.5
    assert found["samples"] == 4
    assert "cut" not in found
    assert found["hours"] == pytest.approx(4 * 0.6 / 3600)


def test_evaluation_on_the_clips_that_training_holds_out(trained_whisper: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(trained_whisper, data, ignore=shutil.ignore_patterns("model"))
    (data / "validation.csv").unlink()
    held = hold_out(read_speech(str(data)))["validation"]
    found = evaluate_model(
        trained_whisper / "model", str(data), "validation", device="cpu", cache_dir=str(tmp_path / "cache")
    ).metrics
    assert found["samples"] == len(held) > 0


@pytest.mark.parametrize(("asked", "computed"), [({}, "float32"), ({"mixed_precision": "bf16"}, "bfloat16")])
def test_an_evaluation_says_what_it_computed_in(
    trained_whisper: Path, tmp_path: Path, asked: dict[str, Any], computed: str
) -> None:
    model, data = trained_whisper / "model", str(trained_whisper)
    found = evaluate_model(model, data, "validation", device="cpu", cache_dir=str(tmp_path), **asked)
    assert (found.precision, found.metrics["samples"]) == (computed, 4)
    assert [one.id for one in found.predictions] == [clip.id for clip in read_speech(data)["validation"]]


def test_split_that_is_not_there(trained_whisper: Path) -> None:
    with pytest.raises(BadInput, match="no split 'test' .*it has: train, validation"):
        evaluate_model(trained_whisper / "model", str(trained_whisper), "test")


def test_bad_model_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config.json in this folder"):
        load_transcriber(tmp_path)


@pytest.mark.slow
def test_adapter_folder(trained_whisper: Path, adapter: Path) -> None:
    found = list(load_transcriber(adapter, "cpu")([trained_whisper / "audio/clip3.wav"]))
    assert found[0].text == "four"


def test_multilingual_model_detects_the_language(multilingual_whisper: Path, trained_whisper: Path) -> None:
    files = [trained_whisper / "audio/clip0.wav"]
    for language in ("", "german"):
        found = list(
            load_transcriber(multilingual_whisper, "cpu", TranscriptionOptions(language, max_new_tokens=3))(files)
        )
        assert not found[0].error
    with pytest.raises(BadInput, match="has no language 'it'"):
        load_transcriber(multilingual_whisper, "cpu", TranscriptionOptions("italian"))


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="device 'cuda' is not available here"):
        select_device("cuda")
    with pytest.raises(BadInput, match="this machine has|device 'abacus'"):
        select_device("abacus")


def windows(samples: Samples, rate: int, longest: int) -> list[Samples]:
    """Cut samples one after another, as a model without times hears them."""
    pieces, left = [], piece_count(len(samples), longest)
    while len(samples):
        cut = next_cut(samples[:longest], len(samples), rate, longest, left)
        pieces.append(samples[:cut])
        samples, left = samples[cut:], left - 1
    return pieces


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(100, 700))
def test_windows_hold_every_sample_once(count: int, longest: int) -> None:
    samples = np.random.default_rng(count).normal(size=count).astype(np.float32)
    pieces = windows(samples, 1000, longest)
    assert all(0 < len(piece) <= longest for piece in pieces)
    np.testing.assert_array_equal(np.concatenate([*pieces, np.empty(0, np.float32)]), samples)


def test_cut_is_where_it_is_quiet() -> None:
    samples = np.ones(2 * RATE, np.float32)
    quiet = slice(int(0.7 * RATE), int(0.8 * RATE))
    samples[quiet] = 0
    assert len(windows(samples, RATE, RATE)[0]) == pytest.approx(0.75 * RATE, abs=RATE // 100)
