"""Log-mel features of Whisper, computed once and kept in a memory-mapped file.

A clip's features end where its sound ends: the silence that fills the model's window is one constant, so a clip of
2 s takes 32 kB instead of the 480 kB of a full window of 30 s (80 mels, float16).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training.cores import whole_cores
from training.tasks.audio import AudioError, Samples, decode
from training.tasks.base import Progress
from training.tasks.cache import digest, get_or_build

_VERSION = 1
_SLICE = 256  # clips handed to the threads at once: bounds what waits in memory to be written

Features = npt.NDArray[np.float32]


class AudioSource(Protocol):
    """Where the bytes of one recording are."""

    def stamp(self) -> str:
        """Something cheap that changes when the content does (size and time of a file)."""
        ...

    def read(self) -> bytes:
        """The bytes of the sound file.

        Raises:
            OSError: they cannot be read.
        """
        ...


@dataclass(frozen=True)
class LogMel:
    """Log-mel spectrogram with the settings of a ``WhisperFeatureExtractor`` (Radford et al. 2022, section 2.2).

    Equal to the extractor's own result within 1e-4, without torch and without computing the window's silent rest.
    """

    filters: npt.NDArray[np.float32]
    """Mel filter bank [n_fft / 2 + 1, mels]."""
    rate: int
    n_fft: int
    hop: int
    n_samples: int
    """Samples of the model's window."""

    @classmethod
    def from_extractor(cls, extractor: Any) -> LogMel:
        """Take the settings of a ``transformers.WhisperFeatureExtractor``."""
        filters = np.asarray(extractor.mel_filters, dtype=np.float32)
        return cls(filters, extractor.sampling_rate, extractor.n_fft, extractor.hop_length, extractor.n_samples)

    @property
    def frames(self) -> int:
        """Frames of the model's window."""
        return self.n_samples // self.hop

    @property
    def seconds(self) -> float:
        """Length of the model's window."""
        return self.n_samples / self.rate

    @property
    def mels(self) -> int:
        return int(self.filters.shape[1])

    def fingerprint(self) -> str:
        """Hash of the settings."""
        sizes = f"{_VERSION} {self.rate} {self.n_fft} {self.hop} {self.n_samples}"
        return hashlib.sha256(sizes.encode() + self.filters.tobytes()).hexdigest()

    def __call__(self, samples: Samples) -> tuple[Features, float]:
        """Return the features [mels, frames that hold sound] and the value of the silent frames after them."""
        samples = samples[: self.n_samples]
        half = self.n_fft // 2
        used = min(self.frames, -(-(len(samples) + half) // self.hop))
        needed = min(self.n_samples, used * self.hop + self.n_fft)
        padded = np.pad(np.pad(samples, (0, needed - len(samples))), half, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop][:used]
        spectrum = np.fft.rfft(windows * np.hanning(self.n_fft + 1)[:-1].astype(np.float32))
        power = spectrum.real**2 + spectrum.imag**2
        log = np.log10(np.maximum(power @ self.filters, 1e-10))
        floor = log.max() - 8.0
        features = (np.maximum(log, floor) + 4.0) / 4.0
        return np.ascontiguousarray(features.T, dtype=np.float32), float((max(-10.0, floor) + 4.0) / 4.0)

    def fill(self, features: npt.NDArray[Any], silence: float, frames: int = 0) -> Features:
        """Return ``features`` [mels, n] as a window [mels, frames], a full one by default."""
        window = np.full((self.mels, frames or self.frames), silence, dtype=np.float32)
        window[:, : features.shape[1]] = features
        return window


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


def _compute_all(sources: Sequence[AudioSource], log_mel: LogMel, threads: int) -> Iterator[_Computed]:
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(sources), _SLICE):
            yield from pool.map(partial(_compute, log_mel=log_mel), sources[start : start + _SLICE])


def _write(
    sources: Sequence[AudioSource], log_mel: LogMel, threads: int, report: Callable[[int], None], folder: Path
) -> None:
    frames, silence, seconds, errors = [], [], [], {}
    report(0)
    with (folder / "features.f16").open("wb") as file:
        for position, clip in enumerate(_compute_all(sources, log_mel, threads)):
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
