"""Augmentation of log-mel features: another voice, room, pace and position for the same words.

Features are Whisper's, ``(log10(power) + 4) / 4``, so a step of 0.25 is 10 dB. Each function leaves its input as it is
and returns ``float32 [mels, frames]``.
"""

from __future__ import annotations

import numpy as np

DECIBEL = 0.025
LOG_SCALE = 4.0 * np.log(10.0)
"""Features times this are natural logarithms of power."""


def augment(features: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Return changed features of one clip; ``features`` stays as it is.

    Args:
        features: log-mel features of Whisper's feature extractor, ``[mels, frames]``; silence at the end is padding.
        strength: the most a clip is changed, 0 (not at all) to 1. Each clip draws its part of it, so that many stay
            close to what was recorded: the model learns as fast as with weak augmentation, and from new voices too.
        rng: generator of this sample; the same generator state gives the same result.
    """
    changed: np.ndarray = np.asarray(features, dtype=np.float32)
    if strength <= 0:
        copy: np.ndarray = changed.copy()
        return copy
    strength *= rng.random()
    changed = warp_frequency(changed, float(np.exp(rng.uniform(-0.12, 0.12) * strength)))
    changed = stretch_time(changed, float(np.exp(rng.uniform(-0.12, 0.12) * strength)))
    changed = shift(changed, float(rng.uniform(0.0, 0.25) * strength))
    changed = tilt(changed, float(rng.uniform(-6.0, 6.0) * strength))
    if rng.random() < 0.5 * strength:
        changed = add_noise(changed, float(rng.uniform(15.0, 40.0)), rng)
    return mask(changed, strength, rng)


def warp_frequency(features: np.ndarray, factor: float) -> np.ndarray:
    """Scale the mel axis: above 1 the formants rise, as of a shorter vocal tract (VTLP, Jaitly & Hinton 2013)."""
    return _resample(features, len(features), factor)


def stretch_time(features: np.ndarray, factor: float) -> np.ndarray:
    """Make the clip slower (above 1) or faster; it is never made too long for the window."""
    frames = features.shape[1]
    spoken = frames - padding(features)
    factor = min(factor, frames / spoken) if spoken else 1.0
    stretched: np.ndarray = _resample(features.T, frames, factor).T
    return stretched


def shift(features: np.ndarray, share: float) -> np.ndarray:
    """Start the clip later by a share of the window; nothing spoken is pushed out."""
    frames = min(int(share * features.shape[1]), padding(features))
    moved: np.ndarray = np.roll(features, frames, axis=1)
    return moved


def tilt(features: np.ndarray, decibels: float) -> np.ndarray:
    """Raise the high bands against the low ones, as another microphone does."""
    slope = np.linspace(-0.5, 0.5, len(features), dtype=np.float32)[:, None]
    changed = features + np.float32(decibels * DECIBEL) * slope
    heard: np.ndarray = np.where(features > features.min(), changed, features)
    return heard


def add_noise(features: np.ndarray, decibels: float, rng: np.random.Generator) -> np.ndarray:
    """Add noise with a random tilt, ``decibels`` below the loudest point."""
    floor = features.max() - decibels * DECIBEL
    slope = np.linspace(-0.5, 0.5, len(features))[:, None] * rng.uniform(-15, 15) * DECIBEL
    noise = floor + slope + 3 * DECIBEL * rng.standard_normal(features.shape, dtype=np.float32)
    mixed: np.ndarray = (np.logaddexp(features * LOG_SCALE, noise * LOG_SCALE) / LOG_SCALE).astype(np.float32)
    return mixed


def mask(features: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Blank two bands and two stretches of time with the mean (SpecAugment, Park et al. 2019)."""
    changed: np.ndarray = features.copy()
    for axis, share in ((0, 0.12), (0, 0.12), (1, 0.05), (1, 0.05)):
        size = changed.shape[axis]
        width = int(rng.integers(0, int(share * strength * size) + 1))
        start = int(rng.integers(0, size - width + 1))
        np.moveaxis(changed, axis, 0)[start : start + width] = features.mean()
    return changed


def padding(features: np.ndarray) -> int:
    """Number of frames at the end in which nothing is above the lowest value."""
    heard = np.flatnonzero(features.max(axis=0) > features.min())
    return int(features.shape[1] - 1 - heard[-1]) if len(heard) else features.shape[1]


def _resample(rows: np.ndarray, count: int, factor: float) -> np.ndarray:
    """Read ``count`` rows at positions ``0, 1/factor, 2/factor ...``, linearly between rows."""
    positions = np.minimum(np.arange(count) / factor, len(rows) - 1)
    lower = positions.astype(int)
    upper = np.minimum(lower + 1, len(rows) - 1)
    part = (positions - lower).astype(np.float32)[:, None]
    mixed: np.ndarray = rows[lower] * (1 - part) + rows[upper] * part
    return mixed
