"""Sound files of every kind, whole and broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE, tone

from speech.data.audio import decode
from speech.data.sound_file import AudioError


def pitch(samples: np.ndarray) -> float:
    """Strongest frequency in Hz."""
    return float(np.abs(np.fft.rfft(samples)).argmax()) * RATE / len(samples)


@pytest.mark.parametrize(
    ("extension", "format", "subtype"),
    [
        ("wav", "WAV", "PCM_16"),
        ("flac", "FLAC", "PCM_16"),
        ("ogg", "OGG", "VORBIS"),
        ("opus", "OGG", "OPUS"),
        ("mp3", "MP3", "MPEG_LAYER_III"),
    ],
)
def test_formats(tmp_path: Path, extension: str, format: str, subtype: str) -> None:
    path = tmp_path / f"a.{extension}"
    soundfile.write(path, tone(1, 1.0), RATE, format=format, subtype=subtype)
    audio = decode(path, RATE)
    assert audio.seconds == pytest.approx(1.0, abs=0.1)
    assert pitch(audio.samples) == pytest.approx(600, abs=2)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_other_rates_are_resampled(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.wav", tone(0, 1.0, rate), rate)
    audio = decode(tmp_path / "a.wav", RATE)
    assert len(audio.samples) == RATE
    np.testing.assert_allclose(audio.samples[800:-800], tone(0, 1.0)[800:-800], atol=5e-3)


def test_channels_are_averaged(tmp_path: Path) -> None:
    left = tone(0)
    soundfile.write(tmp_path / "a.wav", np.stack([left, -left / 2], axis=1), RATE, subtype="FLOAT")
    np.testing.assert_allclose(decode(tmp_path / "a.wav", RATE).samples, left / 4, atol=1e-6)


@pytest.mark.parametrize(
    ("extension", "form", "coding"), [("flac", "FLAC", "PCM_16"), ("mp3", "MP3", "MPEG_LAYER_III")]
)
def test_a_part_is_cut_out(tmp_path: Path, extension: str, form: str, coding: str) -> None:
    sound = np.concatenate([np.zeros(RATE, np.float32), tone(0, 1.0), np.zeros(RATE, np.float32)])
    soundfile.write(tmp_path / f"a.{extension}", sound, RATE, format=form, subtype=coding)
    part = decode(tmp_path / f"a.{extension}", RATE, limit=0.5, start=1.25)
    assert (len(part.samples), part.seconds) == (RATE // 2, pytest.approx(3.0, abs=0.1))
    assert np.abs(part.samples).max() > 0.2
    with pytest.raises(AudioError, match="holds no sound"):
        decode(tmp_path / f"a.{extension}", RATE, start=9.0)


def test_more_channels_than_anybody_records_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((4, 100), np.float32), RATE)
    with pytest.raises(AudioError, match="100 channels at 16000 Hz"):
        decode(tmp_path / "a.wav", RATE)


def test_limit_cuts_the_sound_but_not_its_length(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(0, 2.0), RATE)
    audio = decode((tmp_path / "a.wav").read_bytes(), RATE, limit=0.5)
    assert len(audio.samples) == RATE // 2
    assert audio.seconds == 2.0


def broken(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.wav"
    if kind == "text":
        path.write_text("this is no sound")
    elif kind == "empty":
        path.touch()
    elif kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    elif kind == "silent":
        soundfile.write(path, np.zeros(0, np.float32), RATE)
    elif kind == "nan":
        soundfile.write(path, np.full(100, np.nan, np.float32), RATE, subtype="FLOAT")
    elif kind == "cut":
        path = path.with_suffix(".flac")
        soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, RATE), RATE)
        path.write_bytes(path.read_bytes()[:4000])
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("text", "not a readable sound file"),
        ("empty", "not a readable sound file"),
        ("pointer", "Git LFS pointer .*git lfs pull"),
        ("silent", "holds no sound"),
        ("nan", "not numbers"),
        ("cut", "broken off"),
        ("missing", "No such file"),
    ],
)
def test_broken_files(tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(AudioError, match=said):
        decode(broken(tmp_path, kind), RATE)
