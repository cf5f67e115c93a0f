"""Sound files of many kinds, written by FFmpeg's libraries."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 16_000
KINDS: Mapping[str, tuple[str, str]] = {
    "wav": ("wav", "pcm_s16le"),
    "u8.wav": ("wav", "pcm_u8"),
    "s24.wav": ("wav", "pcm_s24le"),
    "float.wav": ("wav", "pcm_f32le"),
    "mulaw.wav": ("wav", "pcm_mulaw"),
    "alaw.wav": ("wav", "pcm_alaw"),
    "adpcm.wav": ("wav", "adpcm_ima_wav"),
    "w64": ("w64", "pcm_s16le"),
    "aiff": ("aiff", "pcm_s16be"),
    "caf": ("caf", "pcm_s16be"),
    "au": ("au", "pcm_s16be"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "aac.m4a": ("ipod", "aac"),
    "alac.m4a": ("ipod", "alac"),
    "webm": ("webm", "libopus"),
    "wma": ("asf", "wmav2"),
    "aac": ("adts", "aac"),
}
"""Ending, container and codec."""


def voice(seconds: float, rate: int = RATE) -> np.ndarray:
    """A sound of which every place can be told from every other: a tone that rises, 0.4 high."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * (300 + 60 * time) * time)).astype(np.float32)


def write(path: Path, sound: np.ndarray, rate: int = RATE, kind: str = "", options: Mapping[str, str] = {}) -> Path:
    """Write samples [samples] or [channels, samples]; the kind follows from the path's ending, if it is not given."""
    form, codec = KINDS[kind or path.name.split(".", 1)[1]]
    channels = np.atleast_2d(sound)
    with av.open(str(path), "w", format=form, options=dict(options)) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.bit_rate = 64_000
        stream.layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
        _encode(container, stream, channels)
    return path


def _encode(container: Any, stream: Any, channels: np.ndarray) -> None:
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), format="fltp", layout=stream.layout.name)
    frame.sample_rate, frame.pts, frame.time_base = stream.rate, 0, Fraction(1, stream.rate)
    container.mux([*stream.encode(frame), *stream.encode(None)])


def film(path: Path, sound: np.ndarray | None, seconds: float) -> Path:
    """Write an MP4 with grey pictures, and with sound unless that is ``None``."""
    with av.open(str(path), "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=5)
        pictures.width = pictures.height = 32
        stream = container.add_stream("aac", rate=RATE, layout="mono") if sound is not None else None
        grey = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 128, np.uint8))
        for _ in range(round(seconds * 5)):
            container.mux(pictures.encode(grey))
        container.mux(pictures.encode(None))
        if stream is not None:
            _encode(container, stream, np.atleast_2d(sound))
    return path
