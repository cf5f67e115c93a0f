"""Sound files to mono samples at the model's rate (WAV, FLAC, OGG, Opus, MP3 through libsndfile)."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

Samples = npt.NDArray[np.float32]

_MOST_CHANNELS = 64
_HIGHEST_RATE = 768_000  # Hz; a few bytes of a compressed file can claim more than fits into memory


class AudioError(Exception):
    """One recording cannot be used; the message says why."""


@dataclass(frozen=True)
class Audio:
    """A decoded recording."""

    samples: Samples
    """Mono, between -1 and 1, at the rate asked for; at most ``limit`` seconds of it, from ``start`` on."""
    seconds: float
    """Length of the whole recording."""


def decode(source: Path | bytes, rate: int, limit: float | None = None, start: float = 0.0) -> Audio:
    """Decode a file, or the bytes of one, to mono ``float32`` samples at ``rate`` Hz.

    Channels are averaged; the resampler is soxr's high quality one. Only ``limit`` seconds from ``start`` on are
    decoded.

    Raises:
        AudioError: not a sound file, damaged, cut short, or without a single sample.
    """
    handle = io.BytesIO(source) if isinstance(source, bytes) else _open(source)
    with handle:
        try:
            frames, file_rate, total = _read(handle, limit, start)
        except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
            # soundfile raises TypeError for a headerless file whose name ends in .raw
            raise AudioError(f"not a readable sound file: {reason_of(error)}") from error
    if not len(frames):
        raise AudioError("holds no sound")
    mono = frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise AudioError("holds samples that are not numbers")
    if file_rate != rate:
        mono = np.asarray(soxr.resample(mono, file_rate, rate), dtype=np.float32)
    return Audio(mono, total / file_rate)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise AudioError(error.strerror or str(error)) from error


def _read(handle: BinaryIO, limit: float | None, start: float) -> tuple[Samples, int, int]:
    """Return samples [frames, channels], the file's rate, and the frames of the whole file."""
    with soundfile.SoundFile(handle) as file:
        if file.channels > _MOST_CHANNELS or file.samplerate > _HIGHEST_RATE:
            raise ValueError(f"{file.channels} channels at {file.samplerate} Hz")
        first = min(file.frames, round(start * file.samplerate))
        wanted = file.frames - first if limit is None else min(file.frames - first, round(limit * file.samplerate))
        if first:
            file.seek(first)
        frames: Samples = file.read(wanted, dtype="float32", always_2d=True)
        if len(frames) < wanted // 2:
            raise ValueError(f"ends after {len(frames)} of {wanted} samples")
        return frames, file.samplerate, file.frames


def reason_of(error: Exception) -> str:
    """Return why a sound file cannot be read, in one line."""
    text = getattr(error, "error_string", "") or str(error)
    return " ".join(str(text).split()).rstrip(".")
