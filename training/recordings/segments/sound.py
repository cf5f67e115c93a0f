"""A recording of any length as a stream: no more of it is in memory than the piece at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import soxr

from training.tasks.audio import AudioError, Samples, reason_of

RATE = 16_000
"""Hz of everything here: what Whisper and the detector of speech take."""
_BLOCK = 1 << 20  # numbers read at once, over all channels


class Stretch(NamedTuple):
    """A part of a recording, in seconds from its beginning."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def length_of(path: Path) -> float:
    """Return the seconds that a file says it holds.

    Raises:
        AudioError: not a sound file.
    """
    try:
        about = soundfile.info(str(path))
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        raise AudioError(f"not a readable sound file: {reason_of(error)}") from error
    return float(about.frames / about.samplerate)


def stream(path: Path) -> Iterator[Samples]:
    """Decode a file piece by piece to mono ``float32`` samples at :data:`RATE`.

    Raises:
        AudioError: not a sound file, damaged, cut short, or without a single sample.
    """
    try:
        with soundfile.SoundFile(str(path)) as file:
            yield from _resampled(_mono(file), file.samplerate)
    except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
        raise AudioError(f"not a readable sound file: {reason_of(error)}") from error


def _mono(file: soundfile.SoundFile) -> Iterator[Samples]:
    read, wanted = 0, file.frames
    for frames in file.blocks(max(1, _BLOCK // file.channels), dtype="float32", always_2d=True):
        read += len(frames)
        mono = frames.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise AudioError("holds samples that are not numbers")
        yield mono
    if read == 0:
        raise AudioError("holds no sound")
    if read < wanted // 2:
        raise AudioError(f"ends after {read} of {wanted} samples")


def _resampled(blocks: Iterator[Samples], rate: int) -> Iterator[Samples]:
    if rate == RATE:
        yield from blocks
        return
    resampler = soxr.ResampleStream(rate, RATE, 1, dtype="float32")
    for block in blocks:
        yield np.asarray(resampler.resample_chunk(block), dtype=np.float32)
    yield np.asarray(resampler.resample_chunk(np.zeros(0, np.float32), last=True), dtype=np.float32)


def pieces(sound: Iterable[Samples], wanted: Sequence[Stretch]) -> Iterator[Samples]:
    """Yield the samples of stretches that follow one another, from one pass over a stream.

    A stretch that lies beyond the end of the stream gives what there is.
    """
    blocks, held, begin = iter(sound), np.zeros(0, np.float32), 0
    for stretch in wanted:
        first, last = round(stretch.start * RATE), round(stretch.end * RATE)
        parts = [held]
        have = begin + len(held)
        while have < last and (block := next(blocks, None)) is not None:
            have += len(block)
            if have > first:
                parts.append(block)
            else:
                parts = [block[:0]]
        held = np.concatenate(parts)
        begin = have - len(held)
        yield held[max(0, first - begin) : last - begin].copy()
        drop = min(len(held), max(0, first - begin))
        held, begin = held[drop:], begin + drop
