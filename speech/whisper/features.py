"""Whisper's input features: log-mel spectrograms, windows and augmentation.

Features are ``(log10(power) + 4) / 4``, so a step of 0.25 is 10 dB. Augmentation functions (voice, room, tempo and
position) do not modify their input and return ``float32 [mels, frames]``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]

_VERSION = 2  # changes when decoding or transform yield different values
MARGIN = 0.5
"""Minimum seconds of silence after a clip: the model learns that the text ends with the audio."""
GRID = 0.5
"""Granularity of window lengths in seconds."""
DECIBEL = 0.025
LOG_SCALE = 4.0 * np.log(10.0)
"""Factor from features to natural logarithms of power."""
_ONE_THREAD = 1 << 18
"""Multiplications of a product that OpenBLAS computes in the calling thread. Clips are computed by as many threads as
there are cores; with those of BLAS beside them each clip takes two to three times the processor time."""
MAX_STRETCH = 1.13
"""Maximum factor by which a clip is stretched: exp(0.12)."""
NOISE = 0.3
"""Strength of the augmentation (:func:`augment`) when a model transcribes the same audio again."""


@dataclass(frozen=True)
class LogMel:
    """Log-mel spectrogram with the settings of a ``WhisperFeatureExtractor`` (Radford et al. 2022, section 2.2).

    Equal to the extractor's own result within 1e-4, without torch and without computing the silent end of the window.
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

    def __call__(self, samples: npt.NDArray[np.float32]) -> tuple[Features, float]:
        """Return the features [mels, frames that hold sound] and the value of the silent frames after them."""
        samples = samples[: self.n_samples]
        half = self.n_fft // 2
        used = min(self.frames, -(-(len(samples) + half) // self.hop))
        needed = min(self.n_samples, used * self.hop + self.n_fft)
        padded = np.pad(np.pad(samples, (0, needed - len(samples))), half, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop][:used]
        spectrum = np.fft.rfft(windows * np.hanning(self.n_fft + 1)[:-1].astype(np.float32))
        power = spectrum.real**2 + spectrum.imag**2
        mel, block = np.empty((used, self.mels), np.float32), max(1, _ONE_THREAD // self.filters.size)
        for start in range(0, used, block):
            mel[start : start + block] = power[start : start + block] @ self.filters
        log = np.log10(np.maximum(mel, 1e-10))
        floor = log.max() - 8.0
        features = (np.maximum(log, floor) + 4.0) / 4.0
        return np.ascontiguousarray(features.T, dtype=np.float32), float((max(-10.0, floor) + 4.0) / 4.0)

    def fill(self, features: npt.NDArray[Any], silence: float, frames: int = 0) -> Features:
        """Return ``features`` [mels, n] as a window [mels, frames], a full one by default."""
        window = np.empty((self.mels, frames or self.frames), dtype=np.float32)
        fill_row(window, features, silence)
        return window


def fill_row(window: Features, features: npt.NDArray[Any], silence: float) -> None:
    """Write ``features`` [mels, n] into a window [mels, frames], and silence behind them."""
    used = features.shape[1]
    window[:, :used] = features
    window[:, used:] = silence


@dataclass(frozen=True)
class Windows:
    """Window lengths of training clips: a short clip costs less than the full window that Whisper normally processes.

    A clip's *window* is its audio and some silence, rounded up to a common grid, so that there are few shapes.

    Args:
        setting: ``full``, ``auto``, or the minimum length of a window in seconds.
        full: frames of the model's own window.
        seconds: length of the model's own window in seconds.
        grid, margin: granularity, and silence, in seconds.
    """

    setting: str
    full: int
    seconds: float
    grid: float = GRID
    margin: float = MARGIN

    @property
    def are_cut(self) -> bool:
        """Whether a short clip costs less than a long one."""
        return self.setting != "full"

    def frames(self, sound: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the window lengths in frames of clips with ``sound`` frames of audio.

        They are even, as the encoder's second convolution halves them.
        """
        held: npt.NDArray[np.int64] = np.asarray(sound, dtype=np.int64)
        if not self.are_cut:
            return np.full_like(held, self.full)
        rate = self.full / self.seconds
        grid = max(2, 2 * round(self.grid * rate / 2))
        minimum = 0.0 if self.setting == "auto" else float(self.setting) * rate
        needed = np.maximum(held + self.margin * rate, minimum)
        rounded = np.ceil(needed / grid).astype(np.int64) * grid
        cut: npt.NDArray[np.int64] = np.minimum(rounded, self.full)
        return cut


def augment(features: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Return augmented features of one clip; ``features`` is not modified.

    Args:
        features: log-mel features of Whisper's feature extractor, ``[mels, frames]``; silence at the end is padding.
        strength: maximum strength, 0 (none) to 1. Each clip draws a fraction of it, so that many stay close to the
            recording: the model learns as fast as with weak augmentation, but also from new voices.
        rng: generator of this sample; equal states give equal results.
    """
    window: np.ndarray = np.array(features, dtype=np.float32)
    if strength <= 0:
        return window
    strength *= rng.random()
    frames, spoken = window.shape[1], window.shape[1] - padding(window)
    # Frames beyond the maximum stretch are and stay silent; skipping them saves most for short clips in full windows.
    head = window[:, : min(frames, int(spoken * MAX_STRETCH) + 2)]
    head = warp_frequency(head, float(np.exp(rng.uniform(-0.12, 0.12) * strength)))
    head = stretch_time(head, float(np.exp(rng.uniform(-0.12, 0.12) * strength)), frames)
    left = frames - head.shape[1] + padding(head)
    delay = min(int(rng.uniform(0.0, 0.25) * strength * frames), left)
    head = tilt(head, float(rng.uniform(-6.0, 6.0) * strength))
    window[:, :delay] = window.min()
    window[:, delay : delay + head.shape[1]] = head[:, : frames - delay]
    if rng.random() < 0.5 * strength:
        window = add_noise(window, float(rng.uniform(15.0, 40.0)), rng)
    return mask(window, strength, rng)


def warp_frequency(features: np.ndarray, factor: float) -> np.ndarray:
    """Scale the mel axis: above 1 the formants rise, as of a shorter vocal tract (VTLP, Jaitly & Hinton 2013)."""
    return _resample(features, 0, factor)


def stretch_time(features: np.ndarray, factor: float, frames: int = 0) -> np.ndarray:
    """Make the clip slower (``factor`` above 1) or faster, but never longer than the window.

    The window has ``frames`` if given, else as many as ``features``.
    """
    spoken = features.shape[1] - padding(features)
    return _resample(features, 1, min(factor, (frames or features.shape[1]) / spoken) if spoken else 1.0)


def tilt(features: np.ndarray, decibels: float) -> np.ndarray:
    """Tilt the spectrum towards the high bands, as a different microphone would."""
    slope = np.linspace(-0.5, 0.5, len(features), dtype=np.float32)[:, None]
    changed: np.ndarray = np.float32(decibels * DECIBEL) * slope * (features > features.min())
    changed += features
    return changed


def add_noise(features: np.ndarray, decibels: float, rng: np.random.Generator) -> np.ndarray:
    """Add noise with a random tilt, ``decibels`` below the loudest point."""
    floor = features.max() - decibels * DECIBEL
    slope = np.linspace(-0.5, 0.5, len(features))[:, None] * rng.uniform(-15, 15) * DECIBEL
    noise = rng.standard_normal(features.shape, dtype=np.float32)
    noise *= np.float32(3 * DECIBEL)
    noise += (floor + slope).astype(np.float32)
    louder: np.ndarray = np.maximum(features, noise)
    # log(exp(a) + exp(b)) = max(a, b) + log(1 + exp(-|a - b|)), which numpy vectorises
    noise -= features
    np.abs(noise, out=noise)
    noise *= np.float32(-LOG_SCALE)
    np.exp(noise, out=noise)
    noise += 1
    np.log(noise, out=noise)
    noise /= np.float32(LOG_SCALE)
    louder += noise
    return louder


def mask(features: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Replace two frequency bands and two time spans by the mean (SpecAugment, Park et al. 2019)."""
    mean = features.mean()
    changed: np.ndarray = features.copy()
    for axis, share in ((0, 0.12), (0, 0.12), (1, 0.05), (1, 0.05)):
        size = changed.shape[axis]
        width = int(rng.integers(0, int(share * strength * size) + 1))
        start = int(rng.integers(0, size - width + 1))
        np.moveaxis(changed, axis, 0)[start : start + width] = mean
    return changed


def padding(features: np.ndarray) -> int:
    """Return the number of trailing frames without a value above the minimum."""
    heard = np.flatnonzero(features.max(axis=0) > features.min())
    return int(features.shape[1] - 1 - heard[-1]) if len(heard) else features.shape[1]


def _resample(features: np.ndarray, axis: int, factor: float) -> np.ndarray:
    """Sample an axis at positions ``0, 1/factor, 2/factor ...`` with linear interpolation."""
    count = features.shape[axis]
    positions = np.minimum(np.arange(count) / factor, count - 1)
    lower = positions.astype(np.intp)
    fraction = np.expand_dims((positions - lower).astype(np.float32), 1 - axis)
    low: np.ndarray = features.take(lower, axis, mode="clip")
    mixed: np.ndarray = features.take(lower + 1, axis, mode="clip")
    mixed -= low
    mixed *= fraction
    mixed += low
    return mixed
