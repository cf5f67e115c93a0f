"""Log-mel features and their cache."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE, tone, write_clips
from transformers import WhisperFeatureExtractor

from speech.data.speech_clips import FileSource
from speech.whisper.features import LogMel
from speech.whisper.samples import open_features
from tests.tasks.tiny_tasks import silent

SHAPES = [{"feature_size": 80}, {"feature_size": 128}, {"feature_size": 40, "chunk_length": 2}]


def sound(kind: str, seconds: float) -> np.ndarray:
    if kind == "tone":
        return tone(1, seconds)
    if kind == "zeros":
        return np.zeros(int(seconds * RATE), np.float32)
    return np.random.default_rng(0).normal(0, 0.05, int(seconds * RATE)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["tone", "noise", "zeros"])
@pytest.mark.parametrize("seconds", [0.01, 0.7, 2.0, 31.0])
def test_equal_to_the_extractor(shape: dict[str, int], kind: str, seconds: float) -> None:
    extractor = WhisperFeatureExtractor(**shape)
    log_mel = LogMel.from_extractor(extractor)
    samples = sound(kind, seconds)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    ours = log_mel.fill(*log_mel(samples))
    assert ours.shape == expected.shape == (log_mel.mels, log_mel.frames)
    np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.fixture
def log_mel() -> LogMel:
    return LogMel.from_extractor(WhisperFeatureExtractor(feature_size=16, chunk_length=1))


def sources_of(folder: Path, count: int) -> list[FileSource]:
    return [FileSource(folder / path) for _, path, _ in write_clips(folder, count)]


def test_cached_features_are_the_computed_ones(tmp_path: Path, log_mel: LogMel) -> None:
    store = open_features(sources_of(tmp_path, 3), log_mel, tmp_path / "cache")
    expected = log_mel.fill(*log_mel(soundfile.read(tmp_path / "audio/clip1.wav", dtype="float32")[0]))
    np.testing.assert_allclose(store[1], expected, atol=1e-3)
    assert store.seconds == [pytest.approx(0.6)] * 3
    assert store[1].dtype == np.float32


class Once(LogMel):
    """Computes nothing."""

    def __call__(self, samples: np.ndarray) -> Any:
        raise AssertionError("it is computed again")


class Unread(FileSource):
    def read(self) -> bytes:
        raise AssertionError("it is read again")


def test_second_start_computes_nothing(tmp_path: Path, log_mel: LogMel) -> None:
    sources = sources_of(tmp_path, 3)
    first = open_features(sources, log_mel, tmp_path / "cache")[2]
    unread = [Unread(source.path) for source in sources]
    np.testing.assert_array_equal(open_features(unread, Once(**vars(log_mel)), tmp_path / "cache")[2], first)


@pytest.mark.parametrize("name", ["features/*/features.f16", "features/*/index.json", "stamps/*/key"])
def test_damaged_features_are_computed_anew(
    tmp_path: Path, log_mel: LogMel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sources = sources_of(tmp_path, 3)
    first = open_features(sources, log_mel, tmp_path / "cache")[2]
    (file,) = (tmp_path / "cache").glob(name)
    file.write_bytes(file.read_bytes()[:-7])
    for _ in range(2):
        np.testing.assert_array_equal(open_features(sources, log_mel, tmp_path / "cache")[2], first)
    assert caplog.text.count("computed again") == 1


def test_moved_files_are_known_by_their_content(tmp_path: Path, log_mel: LogMel) -> None:
    open_features(sources_of(tmp_path, 3), log_mel, tmp_path / "cache")
    (tmp_path / "audio").rename(tmp_path / "moved")
    moved = [FileSource(tmp_path / f"moved/clip{index}.wav") for index in range(3)]
    assert len(open_features(moved, Once(**vars(log_mel)), tmp_path / "cache")) == 3


def test_changed_content_is_computed_again(tmp_path: Path, log_mel: LogMel) -> None:
    sources = sources_of(tmp_path, 2)
    before = open_features(sources, log_mel, tmp_path / "cache")[0]
    soundfile.write(sources[0].path, tone(3), RATE)
    os.utime(sources[0].path, ns=(1, 1))
    assert not np.array_equal(open_features(sources, log_mel, tmp_path / "cache")[0], before)


def test_other_settings_are_another_entry(tmp_path: Path, log_mel: LogMel) -> None:
    sources = sources_of(tmp_path, 2)
    wide = LogMel.from_extractor(WhisperFeatureExtractor(feature_size=20, chunk_length=1))
    assert open_features(sources, log_mel, tmp_path / "cache")[0].shape == (16, 100)
    assert open_features(sources, wide, tmp_path / "cache")[0].shape == (20, 100)


def test_broken_files_are_kept_apart(tmp_path: Path, log_mel: LogMel) -> None:
    sources = sources_of(tmp_path, 3)
    sources[1].path.write_text("no sound")
    store = open_features(sources, log_mel, tmp_path / "cache")
    assert list(store.errors) == [1]
    assert store[2].max() > store[2].min()


def test_progress_reaches_the_end(tmp_path: Path, log_mel: LogMel) -> None:
    seen: list[tuple[str, int, int | None]] = []
    open_features(sources_of(tmp_path, 3), log_mel, tmp_path / "cache", 2, lambda *state: seen.append(state), "mels")
    assert seen[0] == ("mels", 0, 3)
    assert seen[-1] == ("mels", 3, 3)


def test_processes_that_ask_at_once_compute_once(tmp_path: Path, log_mel: LogMel) -> None:
    sources = sources_of(tmp_path, 4)
    computed: list[int] = []

    class Counting(LogMel):
        def __call__(self, samples: np.ndarray) -> Any:
            computed.append(len(samples))
            return super().__call__(samples)

    counting = Counting(**vars(log_mel))
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: open_features(sources, counting, tmp_path / "cache", 1), range(4)))
    assert len(computed) == 4
    assert all(np.array_equal(store[3], stores[0][3]) for store in stores)


@pytest.mark.slow
def test_second_start_of_thousands_of_clips_is_quick(tmp_path: Path, log_mel: LogMel) -> None:
    sources = sources_of(tmp_path, 4) * 250
    open_features(sources, log_mel, tmp_path / "cache", progress=silent)
    start = time.process_time()  # other load does not count
    open_features(sources, log_mel, tmp_path / "cache")
    assert time.process_time() - start < 10.0
