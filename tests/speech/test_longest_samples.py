"""What is longest in a data set, from its tables and headers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from sound_kinds import voice, write

from profiles.files.resolve import profile_from_options
from profiles.schema import DataSettings
from speech.inputs.data_findings import Longest, longest_clip
from training.tasks.registry import size_for

SCRATCH = Path(__file__).parents[2] / "examples" / "scratch_whisper"


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    for name, seconds in {"a": 1.0, "b": 3.0}.items():
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(int(seconds * 16_000), np.float32), 16_000)
    (tmp_path / "train.csv").write_text("id,audio_path,text\n1,a.wav,yes\n2,b.wav,twelve bytes\n")
    return tmp_path


def test_headers_tell_where_the_table_does_not(recordings: Path) -> None:
    assert longest_clip(DataSettings(dataset_path=str(recordings))) == Longest(3.0, 10)
    assert longest_clip(DataSettings(dataset_path=str(recordings), max_train_samples=1)) == Longest(1.0, 7)
    (recordings / "train.csv").write_text("id,audio_path,text,duration\n1,a.wav,yes,7.5\n")
    assert longest_clip(DataSettings(dataset_path=str(recordings))) == Longest(7.5, 7)


def test_the_length_of_a_phones_recording_is_known(tmp_path: Path) -> None:
    write(tmp_path / "a.aac.m4a", voice(2.0))
    (tmp_path / "train.csv").write_text("id,audio_path,text\n1,a.aac.m4a,yes\n")
    assert longest_clip(DataSettings(dataset_path=str(tmp_path))) == Longest(pytest.approx(2.0), 7)


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    assert longest_clip(DataSettings(dataset_path="owner/name")) is None
    assert longest_clip(DataSettings(dataset_path=str(tmp_path))) is None


def test_memory_follows_the_longest_window(recordings: Path) -> None:
    sizes = {
        window: size_for(
            profile_from_options("p", {"model_path": str(SCRATCH), "dataset_path": str(recordings), "window": window})
        )
        for window in ("full", "auto", "20")
    }
    kept = {window: size.activations for window, size in sizes.items() if size is not None}
    assert kept["auto"] < kept["20"] / 3 < kept["full"] / 3
