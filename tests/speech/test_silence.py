"""Where nobody speaks, nothing is written: Whisper has words for silence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speech.data.audio import RATE, contains_speech
from speech.data.patches import TextBounds, find_recordings
from speech.data.sound_file import Samples
from speech.whisper.cleaning.pseudo_label import LabellingJob, label
from speech.whisper.decoding import is_silence
from speech.whisper.transcription import TranscriptionOptions, load_transcriber

SPOKEN = sorted((Path(__file__).parents[2] / "examples/spoken_commands").glob("audio/test/*/*"))[:1]
SOUNDS: dict[str, Callable[[int], Samples]] = {
    "silence": lambda count: np.zeros(count, np.float32),
    "hum": lambda count: (0.1 * np.sin(np.arange(count) * 2 * np.pi * 50 / RATE)).astype(np.float32),
    "noise": lambda count: np.random.default_rng(1).normal(0.0, 0.05, count).astype(np.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize(("times", "names"), [(False, ["hum"]), (True, [*SOUNDS])])
def test_where_nobody_speaks_nothing_is_written(
    times: bool, names: list[str], whisper_tiny_en: Path, tmp_path: Path
) -> None:
    for name in names:
        soundfile.write(tmp_path / f"{name}.wav", SOUNDS[name](5 * RATE), RATE)
    files = [*(tmp_path / f"{name}.wav" for name in names), *SPOKEN]
    *silent, spoken = load_transcriber(whisper_tiny_en, "cpu", TranscriptionOptions(timestamps=times))(files)
    heard = {one.file.stem: (one.text, one.segments, one.error) for one in silent}
    assert heard == dict.fromkeys(names, ("", (), ""))
    assert spoken.text


@pytest.mark.slow
def test_silence_has_no_text_to_train_on_either(whisper_tiny_en: Path, tmp_path: Path) -> None:
    """Whatever the bounds are: its word is as sure as any, and heard again with noise."""
    soundfile.write(tmp_path / "hum.wav", SOUNDS["hum"](5 * RATE), RATE)
    shutil.copy(SPOKEN[0], tmp_path)
    anything = TextBounds(confidence=-99.0, compression=99.0, no_speech=1.0, agreement=0.0)
    job = LabellingJob(whisper_tiny_en, None, device="cpu", bounds=anything)
    rows = label(job, find_recordings(tmp_path, tmp_path), tmp_path / "pseudo.csv", lambda *_: None)
    kept = [row.id for row in rows if not row.left_out]
    assert kept == [SPOKEN[0].name]
    assert {row.left_out for row in rows if row.id not in kept} == {"nothing was heard"}


@pytest.mark.parametrize(
    ("no_speech", "confidence", "voice", "silent"),
    [
        (0.5, -9.0, False, False),  # the model does not take it for silence
        (0.9, -1.5, True, True),  # silence is likely, and the text is not
        (0.9, -0.5, True, False),  # a likely text, and a voice
        (0.9, -0.5, False, True),
    ],
)
def test_silence_is_what_the_model_and_its_text_or_no_voice_say(
    no_speech: float, confidence: float, voice: bool, silent: bool
) -> None:
    assert is_silence(no_speech, confidence, lambda: voice) is silent


@pytest.mark.slow
def test_a_voice_is_heard_and_noise_is_none() -> None:
    samples, rate = soundfile.read(SPOKEN[0], dtype="float32")
    assert rate == RATE and contains_speech(samples, rate)
    assert not any(contains_speech(sound(2 * RATE), RATE) for sound in SOUNDS.values())
