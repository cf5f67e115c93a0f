"""The samples of a split: clips with their tokens, and their features, computed once and kept in a memory-mapped file.

A clip's features end where its sound ends: the silence that fills the model's window is one constant, so a clip of
2 s takes 32 kB instead of the 480 kB of a full window of 30 s (80 mels, float16).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.resources import whole_cores
from training.tasks.audio import AudioError, decode
from training.tasks.base import Progress
from training.tasks.cache import digest, get_or_build
from training.tasks.speech_clips import AudioSource, Clip
from training.tasks.whisper.features import Features, LogMel, Windows

_SLICE = 256  # clips handed to the threads at once: bounds what waits in memory to be written


@dataclass(frozen=True)
class SpeechSample:
    """One clip, ready for :meth:`training.tasks.whisper.task.WhisperTask.collate`."""

    features: npt.NDArray[np.float16]
    """[mels, frames that hold sound]"""
    silence: float
    """Value of the frames after them."""
    frames: int
    """Of the clip's window in training."""
    position: int
    """Of the clip in its feature store."""
    tokens: list[int]
    """Transcript with the end token, without the prompt."""
    text: str
    language: str
    """Code; empty: the task's default."""
    longest: int
    """Tokens of the longest transcript of its split, the end token included."""
    index: int
    """In its split."""


@dataclass(frozen=True)
class SpeechData:
    """Clips of one split that can be used."""

    clips: list[Clip]
    tokens: list[list[int]]
    store: FeatureStore
    positions: list[int]
    """Where in ``store`` each clip is."""
    languages: list[str]
    windows: Windows

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int, /) -> SpeechSample:
        text, language, frames = self.clips[index].text, self.languages[index], int(self.frames[index])
        position = self.positions[index]
        sound = self.store.sound(position)
        return SpeechSample(*sound, frames, position, self.tokens[index], text, language, self.longest, index)

    @cached_property
    def frames(self) -> npt.NDArray[np.int64]:
        """Frames of every clip's window in training."""
        return self.windows.frames(self.store.frames[self.positions])

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest transcript, the end token included."""
        return max(map(len, self.tokens))

    @property
    def hours(self) -> float:
        """Hours of audio."""
        return sum(self.store.seconds[position] for position in self.positions) / 3600


class FeatureStore:
    """Features of many clips in one memory-mapped float16 array."""

    def __init__(self, folder: Path, log_mel: LogMel) -> None:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self._log_mel = log_mel
        self.key = folder.name
        """Hash of the recordings and of the settings of the extractor."""
        self._ends = np.concatenate([[0], np.cumsum(index["frames"])]).astype(np.int64)
        self._silence: list[float] = index["silence"]
        self.seconds: list[float] = index["seconds"]
        """Length of each whole recording; 0 for a broken one."""
        self.errors: dict[int, str] = {int(i): text for i, text in index["errors"].items()}
        """Why a recording is broken, by its position."""
        total = int(self._ends[-1])
        shape = (total, log_mel.mels)
        self._data: npt.NDArray[np.float16] = (
            np.memmap(folder / "features.f16", np.float16, "r", shape=shape) if total else np.empty(shape, np.float16)
        )

    def __len__(self) -> int:
        return len(self._silence)

    @property
    def frames(self) -> npt.NDArray[np.int64]:
        """Frames of every clip that hold sound."""
        return np.diff(self._ends)

    def sound(self, position: int) -> tuple[npt.NDArray[np.float16], float]:
        """Return what is stored of a clip: [mels, frames that hold sound], and the value of the silence after it."""
        return self._data[self._ends[position] : self._ends[position + 1]].T, self._silence[position]

    def __getitem__(self, position: int) -> Features:
        """Return the full window [mels, frames] of a clip."""
        return self._log_mel.fill(*self.sound(position))


def open_features(
    sources: Sequence[AudioSource],
    log_mel: LogMel,
    root: Path,
    workers: int = 0,
    progress: Progress = lambda phase, done, total: None,
    phase: str = "features",
) -> FeatureStore:
    """Return the features of ``sources`` from the cache below ``root``, computing them if they are not there.

    The cache is keyed by what the files hold and the extractor's settings. Hashing all files at every start would
    take long for a big data set, so a second entry leads from the files' sizes and times to that key.

    Args:
        workers: threads; 0 is one for each core. Decoding, resampling and the transform leave Python's lock.

    Raises:
        BadInput: the cache folder cannot be used.
    """
    threads = workers or whole_cores()
    settings = log_mel.fingerprint()
    stamps = digest([settings, *(source.stamp() for source in sources)])

    def waiting() -> None:
        progress(f"{phase}: waiting for another worker", 0, len(sources))

    def find_key(folder: Path) -> None:
        with ThreadPoolExecutor(threads) as pool:
            contents = list(pool.map(_content_hash, sources))
        (folder / "key").write_text(digest([settings, *contents]))

    key = (get_or_build(root / "stamps", stamps, find_key, waiting) / "key").read_text()
    build = partial(_write, sources, log_mel, threads, lambda done: progress(phase, done, len(sources)))
    return FeatureStore(get_or_build(root / "features", key, build, waiting), log_mel)


@dataclass(frozen=True)
class _Computed:
    frames: npt.NDArray[np.float16]
    silence: float = 0.0
    seconds: float = 0.0
    error: str = ""


def _compute(source: AudioSource, log_mel: LogMel) -> _Computed:
    try:
        audio = decode(source.read(), log_mel.rate, log_mel.seconds)
    except (AudioError, OSError) as error:
        return _Computed(np.empty((0, log_mel.mels), np.float16), error=str(error))
    features, silence = log_mel(audio.samples)
    # Rounded like the stored frames, so that silence inside the clip and after it has one value.
    return _Computed(np.ascontiguousarray(features.T, dtype=np.float16), float(np.float16(silence)), audio.seconds)


def _write(
    sources: Sequence[AudioSource], log_mel: LogMel, threads: int, report: Callable[[int], None], folder: Path
) -> None:
    frames, silence, seconds, errors = [], [], [], {}
    report(0)
    with (folder / "features.f16").open("wb") as file, ThreadPoolExecutor(threads) as pool:
        slices = (sources[start : start + _SLICE] for start in range(0, len(sources), _SLICE))
        computed = (clip for some in slices for clip in pool.map(partial(_compute, log_mel=log_mel), some))
        for position, clip in enumerate(computed):
            file.write(clip.frames.tobytes())
            frames.append(len(clip.frames))
            silence.append(clip.silence)
            seconds.append(clip.seconds)
            if clip.error:
                errors[position] = clip.error
            report(position + 1)
    index = {"frames": frames, "silence": silence, "seconds": seconds, "errors": errors}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")


def _content_hash(source: AudioSource) -> str:
    try:
        return hashlib.blake2b(source.read(), digest_size=16).hexdigest()
    except OSError as error:
        return f"unreadable {error}"
