"""A recording of any length, read in order: no more of it is in memory than one window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import soxr

from training.tasks.audio import AudioError, Samples, reason_of

_BLOCK = 1 << 16
"""Frames of the file that are decoded at once."""


class SoundStream:
    """Mono samples of a file at ``rate`` Hz, from the first to the last.

    Raises:
        AudioError: here or in :meth:`window`: not a sound file, damaged, cut short, or without a single sample.
    """

    def __init__(self, path: Path, rate: int) -> None:
        self._kept = np.empty(0, np.float32)
        self._first = 0  # place of the first kept sample
        self._read = 0
        self._ended = False
        try:
            self._handle = path.open("rb")
            self._file = soundfile.SoundFile(self._handle)
        except OSError as error:
            raise AudioError(error.strerror or str(error)) from error
        except (soundfile.SoundFileError, TypeError, ValueError) as error:
            self._handle.close()
            raise AudioError(f"not a readable sound file: {reason_of(error)}") from error
        own = self._file.samplerate
        self._resampler = None if own == rate else soxr.ResampleStream(own, rate, 1, dtype="float32", quality="HQ")
        self.seconds = self._file.frames / own
        """Length as the file says."""
        if not self._file.frames:
            self.close()
            raise AudioError("holds no sound")

    def window(self, start: int, count: int) -> Samples:
        """Return ``count`` samples from ``start`` on, fewer at the end; ``start`` never goes back."""
        while not self._ended and self._first + len(self._kept) < start + count:
            self._take_block()
            gone = min(max(0, start - self._first), len(self._kept))
            self._kept, self._first = self._kept[gone:], self._first + gone
        gone = start - self._first
        return self._kept[gone : gone + count]

    def ends_within(self, end: int) -> bool:
        """Whether there is nothing after ``end``, the end of the window that was read last."""
        return self._ended and self._first + len(self._kept) <= end

    def _take_block(self) -> None:
        try:
            self._kept = np.concatenate([self._kept, self._block()])
        except (soundfile.SoundFileError, OSError, ValueError) as error:
            self.close()
            raise AudioError(f"not readable after {self._read} samples: {reason_of(error)}") from error
        except AudioError:
            self.close()
            raise
        if self._ended:
            self.close()

    def _block(self) -> Samples:
        frames = self._file.read(_BLOCK, dtype="float32", always_2d=True)
        self._read += len(frames)
        self._ended = len(frames) < _BLOCK
        if self._ended and self._read < self._file.frames // 2:
            raise AudioError(f"ends after {self._read} of {self._file.frames} samples")
        mono: Samples = frames.mean(axis=1, dtype=np.float32) if len(frames) else np.empty(0, np.float32)
        if not np.isfinite(mono).all():
            raise AudioError("holds samples that are not numbers")
        if self._resampler is None:
            return mono
        return np.asarray(self._resampler.resample_chunk(mono, last=self._ended), dtype=np.float32)

    def close(self) -> None:
        """Let the file go. Idempotent."""
        self._file.close()
        self._handle.close()
