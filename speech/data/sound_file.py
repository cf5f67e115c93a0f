"""Decode audio files by FFmpeg's libraries (package ``av``) to mono samples at the file's rate.

Any file with an audio track can be read: WAV, FLAC, MP3, Ogg, m4a, AMR, WebM, WMA, also videos. It is read to its end,
and the decoded length is compared with the header.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.error import FFmpegError
from av.packet import Packet

from profiles.quantities import position_text
from speech.data.sound_containers import find_flaw, is_chained, mp3_frames, without_tags

Samples = npt.NDArray[np.float32]

_FORMATS = (
    "aac ac3 aiff amr ape asf au avi caf dts eac3 flac flv gsm loas matroska mov mp3 mpc mpc8 mpeg mpegts nistsphere "
    "ogg oma rm sox tak tta voc w64 wav webm wv"
).split()
"""Audio and video formats. FFmpeg's others are images, or playlists that refer to further files or URLs."""
_OPTIONS = {"format_whitelist": ",".join(_FORMATS), "max_probe_packets": "1"}
"""By default FFmpeg probes 2500 packets of a WAV for DTS, which takes longer than decoding it."""
_RAW = ("aac", "ac3", "amr", "dts", "eac3", "gsm", "loas", "mp3", "mpeg", "mpegts")
"""Formats without a file header: their length is a guess, and data between frames is no damage."""
_FORGIVEN = ("mp3", "pcm")
"""Codecs whose undecodable packets are no damage: pieces of tags, and half a sample at the end."""
_WITH_LENGTH = ("aiff", "ape", "au", "caf", "flac", "mov", "ogg", "tta", "w64", "wav", "wv")
_NO_TIMES = ("aac", "asf", "mpeg", "mpegts")
"""Formats without reliable timestamps after a seek; the same holds for ADPCM, GSM and similar codecs in a WAV."""
_WITH_GAPS = ("matroska", "mov")
"""Formats whose timestamps reveal gaps: silence omitted by Opus, or a track that begins late."""
_MAX_GAP = 3600.0  # seconds
_JITTER = 0.1  # tolerated error of frame timestamps, in seconds
_MAX_CHANNELS, _MAX_RATE = 64, 768_000  # Hz; a few bytes of a compressed file can claim more than fits into memory
_BLOCK = 1 << 16  # samples per yielded block
_SLACK = 0.3  # seconds by which a header may exceed the audio: encoder delay and padding
_CONTEXT = 1.0
"""Seconds that are also decoded before a range, as codecs need preceding frames, and after it, to detect the end, as
the length in headers includes encoder padding."""
_MAX_DAMAGE = 60.0  # maximum seconds of damage that are replaced by silence, so that times stay right
_MAX_LEVEL = 16.0  # 24 dB above full scale
_CANCELLED = 0.01  # minimum share of the channels' power left in their mean; 0.016 if one of 64 channels has sound
_SILENCE = 1e-6  # power, 60 dB below full scale


class AudioError(Exception):
    """A recording cannot be decoded, or not completely; the message says why."""

    def __init__(self, message: str, intact: float = 0.0) -> None:
        super().__init__(message)
        self.intact = intact
        """Seconds from its beginning that are undamaged."""


class SoundFile:
    """An open audio file.

    Raises:
        AudioError: not an audio file, or without an audio track.
    """

    def __init__(self, source: Path | bytes) -> None:
        self._handle: BinaryIO = io.BytesIO(source) if isinstance(source, bytes) else _open(source)
        self.flaw = ""
        """Why the file is incomplete according to its container; empty if no flaw is known."""
        try:
            self.flaw = find_flaw(self._handle)
            self._mp3_frames = mp3_frames(self._handle)
            self._is_chained = is_chained(self._handle)
            self._handle.seek(0)
            self._container = av.open(self._handle, mode="r", options=_OPTIONS, metadata_errors="replace")
        except (FFmpegError, OSError, ValueError) as error:
            self._handle.close()
            raise AudioError(f"not a readable sound file: {self.flaw or _reason_of(error)}") from error
        self._format = self._container.format.name.split(",")[0]
        self._position = _Position()  # up to where it was decoded
        self._is_at_end = False
        self._lost_seconds = 0.0  # undecodable seconds since the last decoded frame
        self._damaged_at: float | None = None  # seconds
        self._levels = _Levels()
        try:
            self._stream = self._choose_stream()
        except AudioError:
            self.close()
            raise
        begin = _seconds(self._stream.start_time, self._stream.time_base)
        self._origin = _seconds(self._container.start_time, _TICK) if self._format in _WITH_GAPS else begin
        self._start_delay = begin - self._origin

    def __enter__(self) -> SoundFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._container.close()
        self._handle.close()

    def _choose_stream(self) -> AudioStream:
        """Return the audio track that a player would choose.

        Raises:
            AudioError: no track can be decoded.
        """
        stream = self._container.streams.best("audio")
        if not isinstance(stream, AudioStream):
            raise AudioError("holds no sound")
        if (codec := stream.codec_context) is None:
            raise AudioError("not a readable sound file: its codec is unknown")
        if not 1 <= codec.channels <= _MAX_CHANNELS or not 1 <= codec.sample_rate <= _MAX_RATE:
            raise AudioError(f"not a readable sound file: {codec.channels} channels at {codec.sample_rate} Hz")
        if codec.name == "flac":  # has checksums, which FFmpeg ignores by default
            codec.options = {"err_detect": "crccheck+explode"}
        return stream

    def blocks(self, start: float = 0.0, limit: float | None = None) -> Iterator[tuple[Samples, int]]:
        """Yield mono samples, the mean of the channels, and their rate, which may change in concatenated files.

        Args:
            start: seconds to skip.
            limit: maximum seconds to read.

        Raises:
            AudioError: damaged, truncated or inaudible, after the readable samples.
        """
        for channels, rate in self._join_frames(self._decode_range(start, limit)):
            yield self._levels.mean(channels), rate
        self._levels.check()
        self._check_whole()

    def _join_frames(self, frames: Iterable[tuple[Samples, int]]) -> Iterator[tuple[Samples, int]]:
        """Yield frames joined to blocks, including those before an error."""
        pending: list[Samples] = []
        rate, count, error = 0, 0, None
        try:
            for channels, frame_rate in frames:
                if pending and (frame_rate != rate or len(channels) != len(pending[0]) or count >= _BLOCK):
                    yield np.concatenate(pending, axis=1), rate
                    pending, count = [], 0
                pending.append(channels)
                rate, count = frame_rate, count + channels.shape[1]
        except AudioError as raised:
            error = raised
        if pending:
            yield np.concatenate(pending, axis=1), rate
        if error is not None:
            raise error

    def _decode_range(self, start: float, limit: float | None) -> Iterator[tuple[Samples, int]]:
        """Yield the frames [channels, samples] of a time range, trimmed to it, and their rate."""
        seek_target = start > _CONTEXT and self._seek(start - _CONTEXT)
        stop = None if limit is None else start + limit
        for channels, rate in self._decode_frames(start - _CONTEXT if seek_target else None):
            begin = self._position.seconds
            self._position.move(channels.shape[1], rate)
            skipped = max(0, round(start * rate) - round(begin * rate))
            end = None if stop is None else max(0, round(stop * rate) - round(begin * rate))
            yield channels[:, skipped:end], rate
            if stop is not None and self._position.seconds > stop + _CONTEXT:
                return
        self._is_at_end = True

    def _seek(self, start: float) -> bool:
        """Seek to a frame before ``start``; ``False`` if its time would be unknown, as in a concatenated file."""
        base, codec = self._stream.time_base, self._stream.codec_context
        has_times = self._format not in (*_NO_TIMES, "wav", "w64") or codec.name.startswith("pcm")
        if self._is_chained or not has_times or base is None or start > (self._header_seconds() or math.inf):
            return False
        try:
            self._container.seek(round((start + self._origin) / base), stream=self._stream)
        except (FFmpegError, OSError):  # beyond the end
            return False
        return True

    def _decode_frames(self, seek_target: float | None) -> Iterator[tuple[Samples, int]]:
        """Yield samples [channels, samples] and their rate, with silence for damage and gaps.

        Args:
            seek_target: target of the preceding seek in seconds, if any.
        """
        codec = self._stream.codec_context
        for packet in self._packets():
            try:
                frames = self._frames_of(packet)
            except FFmpegError:
                seconds = _seconds(packet.duration, packet.time_base)
                if self._format == "amr":  # a silence frame, which FFmpeg does not support
                    if seek_target is not None:
                        self._position = _Position(_seconds(packet.pts, packet.time_base) - self._origin)
                        seek_target = None
                    yield from self._silence(seconds)
                elif self._format not in _RAW and not codec.name.startswith(_FORGIVEN):
                    self._lost_seconds += seconds or 1 / codec.sample_rate
                continue
            for frame in frames:
                time = _seconds(frame.pts, frame.time_base) - self._origin
                if seek_target is not None:
                    self._position = _Position(min(time, seek_target) if self._format in _WITH_GAPS else time)
                    seek_target = None
                if self._lost_seconds and self._position.seconds:
                    self._damaged_at = self._intact_seconds
                    yield from self._silence_up_to(time, _MAX_DAMAGE)
                elif self._format in _WITH_GAPS and time > self._position.seconds + _JITTER:
                    yield from self._silence_up_to(time, _MAX_GAP)
                self._lost_seconds = 0.0
                yield self._without_padding(frame, time), frame.sample_rate
        if self._lost_seconds > (0.0 if self._header_seconds() is None else _SLACK):
            self._damaged_at = self._intact_seconds

    def _frames_of(self, packet: Packet[AudioStream]) -> list[AudioFrame]:
        """Decode a packet; FFmpeg appends tags at the end of a FLAC to its last packet."""
        try:
            return packet.decode()
        except FFmpegError:
            shorter = Packet(without_tags(bytes(packet)))
            if self._stream.codec_context.name != "flac" or shorter.size == packet.size:
                raise
        shorter.pts, shorter.time_base = packet.pts, packet.time_base
        return self._stream.codec_context.decode(shorter)

    def _without_padding(self, frame: AudioFrame, time: float) -> Samples:
        """Return the samples of a frame without the encoder padding that FFmpeg leaves in MP4."""
        samples = _floats(frame)
        if self._format != "mov":
            return samples
        remaining = self._start_delay + _seconds(self._stream.duration, self._stream.time_base) - time
        return samples[:, : round(remaining * frame.sample_rate)] if 0 < remaining < _SLACK else samples

    def _silence_up_to(self, time: float, longest: float) -> Iterator[tuple[Samples, int]]:
        """Yield silence up to a frame that follows damage or a gap, so that times stay right."""
        if 0 < (seconds := time - self._position.seconds) < longest:
            yield from self._silence(seconds)

    def _silence(self, seconds: float) -> Iterator[tuple[Samples, int]]:
        codec = self._stream.codec_context
        remaining = round(seconds * codec.sample_rate)
        while remaining > 0:
            yield np.zeros((codec.channels, min(remaining, _BLOCK)), np.float32), codec.sample_rate
            remaining -= _BLOCK

    def _packets(self) -> Iterator[Packet[AudioStream]]:
        try:
            yield from self._container.demux(self._stream)
        except (FFmpegError, OSError) as error:
            message = f"not readable after {position_text(self._position.seconds)}: {_reason_of(error)}"
            raise AudioError(message, self._intact_seconds) from error

    def _check_whole(self) -> None:
        """If the file was read to its end, compare its length with the header."""
        if self._is_at_end and self.flaw:
            raise AudioError(self.flaw, self._intact_seconds)
        seconds = self._header_seconds() if self._is_at_end else None
        if seconds is not None and self._position.seconds < seconds - _SLACK:
            readable = f"{position_text(self._position.seconds)} of {position_text(seconds)}"
            raise AudioError(f"damaged or broken off: {readable} can be read", self._intact_seconds)
        if self._damaged_at is not None:
            raise AudioError(f"damaged at {position_text(self._damaged_at)}", self._damaged_at)

    @property
    def _intact_seconds(self) -> float:
        return self._position.seconds if self._damaged_at is None else self._damaged_at

    def _header_seconds(self) -> float | None:
        """Return the duration in the header; ``None`` if there is none."""
        stream, container = self._stream, self._container
        if self._format == "matroska":
            with contextlib.suppress(ValueError):
                hours, minutes, seconds_text = stream.metadata.get("DURATION", "").rstrip("\0 ").split(":")
                return int(hours) * 3600 + int(minutes) * 60 + float(seconds_text) - self._origin
            total = _seconds(container.duration, _TICK) if len(container.streams) == 1 else 0.0
            return total - self._origin if total else None  # a browser writes none
        seconds = _seconds(stream.duration, stream.time_base)
        if self._format == "mp3":
            rate = stream.codec_context.sample_rate
            frames = self._mp3_frames * (1152 if rate >= 32_000 else 576) / rate
            # FFmpeg's value excludes encoder delay and padding, but is a guess if other data follows the frames
            return (seconds if abs(seconds - frames) < _SLACK else frames) or None
        is_known = seconds and self._format in _WITH_LENGTH and not self._is_chained
        return seconds + self._start_delay if is_known else None

    @property
    def seconds(self) -> float:
        """Duration: as decoded if read to the end, else from the header, else by counting frames.

        Raises:
            AudioError: it cannot be read to its end.
        """
        if self._is_at_end:
            return self._position.seconds
        seconds = self._header_seconds()
        if seconds is not None and self._format != "mp3":
            return seconds
        count = self._position.seconds + sum(_seconds(packet.duration, packet.time_base) for packet in self._packets())
        # in concatenated MP3 files the header covers only the first
        return seconds if seconds is not None and seconds > count - _SLACK else count


_TICK = Fraction(1, av.time_base)


def _seconds(ticks: int | None, base: Fraction | None) -> float:
    return ticks * base.numerator / base.denominator if ticks and base else 0.0


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise AudioError(error.strerror or str(error)) from error


def _reason_of(error: Exception) -> str:
    """Return why an audio file cannot be read, in one line."""
    if isinstance(error, av.error.InvalidDataError | av.error.ArgumentError):
        return "no known kind of sound is in it"
    return " ".join(str(getattr(error, "strerror", "") or error).split()).rstrip(".")


def _floats(frame: AudioFrame) -> Samples:
    """Return a frame's samples [channels, samples] as floats with full scale 1."""
    values = frame.to_ndarray()
    if frame.format.is_packed:
        values = values.reshape(-1, frame.layout.nb_channels).T
    kind, scale = values.dtype.kind, np.float32(2.0 ** (8 * values.dtype.itemsize - 1))
    samples: Samples = values.astype(np.float32, copy=False)
    if kind == "f":
        return samples
    samples -= scale if kind == "u" else np.float32(0.0)
    samples /= scale
    return samples


class _Position:
    """Position in a stream whose rate may change; exact as long as it does not."""

    def __init__(self, start: float = 0.0) -> None:
        self._start, self._count, self._rate = start, 0, 1

    @property
    def seconds(self) -> float:
        return self._start + self._count / self._rate

    def move(self, count: int, rate: int) -> None:
        if rate != self._rate:
            self._start, self._count, self._rate = self.seconds, 0, rate
        self._count += count


class _Levels:
    """Power of a recording's channels, and of their mean."""

    def __init__(self) -> None:
        self._of_channels, self._of_mean, self._samples = 0.0, 0.0, 0

    def mean(self, channels: Samples) -> Samples:
        """Return the mean of channels [channels, samples].

        Raises:
            AudioError: samples are not finite, or far beyond full scale.
        """
        mono: Samples = channels.mean(axis=0, dtype=np.float32)
        peak = float(np.abs(channels).max(initial=0.0))
        if not np.isfinite(peak):
            raise AudioError("holds samples that are not numbers")
        if peak > _MAX_LEVEL:
            hint = "write them as integers, or scale them"
            raise AudioError(f"its samples reach {peak:.0f} where 1 is full scale: {hint}")
        self._of_channels += float(np.square(channels).mean(axis=0).sum())
        self._of_mean += float(np.square(mono).sum())
        self._samples += len(mono)
        return mono

    def check(self) -> None:
        """Reject a recording whose channels are inaudible when averaged.

        Raises:
            AudioError: the channels cancel each other out.
        """
        if self._of_channels > _SILENCE * self._samples and self._of_mean < _CANCELLED * self._of_channels:
            hint = "keep one: ffmpeg -i OLD -af 'pan=mono|c0=c0' NEW.wav"
            raise AudioError(f"its channels cancel each other out, one is the other turned over; {hint}")
