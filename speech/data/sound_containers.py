"""Check whether an audio file is complete by the sizes in its container, which decoders ignore.

WAV (RIFF, RF64, BW64), W64, AIFF, CAF and MP4 are sequences of sized chunks; Ogg is a sequence of pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from profiles.locations import LFS_POINTER

SOUND_ENDINGS = (
    *".wav .flac .mp3 .m4a .ogg .opus .oga .aac .amr .3gp .wma .aif .aiff .caf .w64 .au".split(),
    *".m4b .mka .webm .mp4 .mov .mkv .qta .3ga .weba .mp2 .mpga .spx .wv .ape .aifc .sph".split(),
    *".avi .wmv .m4v .mpg .mpeg".split(),
)
"""Extensions of audio files when searching folders; a file's format is determined by its content."""
_UNKNOWN_LENGTH = range(0x7FFF0000, 1 << 32)
"""Sizes that programs writing to a pipe put into a WAV's header (or 0)."""
_MISCOUNTED = 8192
"""Tolerated error of a size in bytes (a quarter of a second at 16 kHz): some programs count the header, lose the last
block, or pad the audio."""
_OGG_PAGE = 65_307
"""Maximum size of an Ogg page in bytes."""
_RIFF, _AIFF = (b"RIFF", b"RF64", b"BW64"), (b"AIFF", b"AIFC")
_W64 = bytes.fromhex("726966662e91cf11a5d628db04c10000")


class _Chunk(NamedTuple):
    name: bytes
    body: int
    """Offset in the file."""
    size: int
    """Size of the body in bytes; negative: up to the end of the file."""


def find_flaw(handle: BinaryIO) -> str:
    """Return the flaw of an open file's container; empty if it is intact, or of an unknown kind."""
    length = handle.seek(0, os.SEEK_END)
    handle.seek(0)
    head = handle.read(12)
    if head == LFS_POINTER[:12]:
        return "a Git LFS pointer instead of the recording (fetch it: git lfs pull)"
    if head[:4] in _RIFF and head[8:] == b"WAVE":
        return _flaw_of_sound(handle, list(_iter_wav_chunks(handle, length)), length, b"data", may_be_unknown=True)
    if head[:4] == b"FORM" and head[8:] in _AIFF:
        return _flaw_of_sound(handle, list(_iter_chunks(handle, length, 12, 4, "big")), length, b"SSND")
    if head == _W64[:12]:
        return _flaw_of_sound(handle, list(_iter_w64_chunks(handle, length)), length, b"data")
    if head[:4] == b"caff":
        return _flaw_of_sound(handle, list(_iter_chunks(handle, length, 8, 8, "big")), length, b"data")
    if head[4:8] == b"ftyp":
        return _flaw_of_mp4(list(_iter_mp4_boxes(handle, length)), length)
    return _flaw_of_ogg(handle, length) if head[:4] == b"OggS" else ""


def _flaw_of_sound(
    handle: BinaryIO, chunks: list[_Chunk], length: int, name: bytes, may_be_unknown: bool = False
) -> str:
    sound = next((chunk for chunk in chunks if chunk.name == name), None)
    if sound is None or sound.size < 0 or (may_be_unknown and (not sound.size or sound.size in _UNKNOWN_LENGTH)):
        return ""
    if sound.body + sound.size > length + _MISCOUNTED:
        return f"broken off: it holds {length - sound.body} of {sound.size} bytes of sound"
    if any(chunk.name in (*_RIFF, b"FORM") for chunk in chunks):
        return "a second file is joined to it, and only the first can be read"
    end = chunks[-1].body + chunks[-1].size
    handle.seek(end)
    if length - end <= _MISCOUNTED or not handle.read(_MISCOUNTED).strip(b"\0"):
        return ""
    return f"its header counts {sound.size} bytes of sound, and {length - end} bytes follow"


def _iter_wav_chunks(handle: BinaryIO, length: int) -> Iterator[_Chunk]:
    """Yield the chunks of a WAV; the size of data beyond 4 GB is in the chunk ``ds64``."""
    size = -1
    for chunk in _iter_chunks(handle, length, 12, 4, "little"):
        if chunk.name == b"ds64":
            handle.seek(chunk.body + 8)
            size = int.from_bytes(handle.read(8), "little")
        if chunk.name == b"data" and size >= 0:
            yield chunk._replace(size=size)
            return
        yield chunk


def _iter_chunks(handle: BinaryIO, length: int, start: int, width: int, order: str) -> Iterator[_Chunk]:
    """Yield chunks with a four-letter name and a size of ``width`` bytes; some programs pad them to even offsets."""
    while start + 4 + width <= length:
        handle.seek(start)
        head = handle.read(4 + width)
        if not head[:4].isascii() or not head[:4].decode().isprintable():
            return
        size = int.from_bytes(head[4:], "big" if order == "big" else "little", signed=width == 8)
        yield _Chunk(head[:4], start + 4 + width, size)
        if size < 0:
            return
        start += 4 + width + size
        handle.seek(start)
        start += start % 2 if handle.read(1) == b"\0" else 0


def _iter_w64_chunks(handle: BinaryIO, length: int) -> Iterator[_Chunk]:
    start = 40
    while start + 24 <= length:
        handle.seek(start)
        head = handle.read(24)
        size = int.from_bytes(head[16:], "little")
        if size < 24:
            return
        yield _Chunk(head[:4], start + 24, size - 24)
        start += (size + 7) // 8 * 8


def _iter_mp4_boxes(handle: BinaryIO, length: int) -> Iterator[_Chunk]:
    start = 0
    while start + 8 <= length:
        handle.seek(start)
        head = handle.read(16)
        size, before = int.from_bytes(head[:4], "big"), 8
        if size == 1:
            size, before = int.from_bytes(head[8:], "big"), 16
        yield _Chunk(head[4:8], start + before, (size or length - start) - before)
        if size < before:
            return
        start += size


def _flaw_of_mp4(chunks: list[_Chunk], length: int) -> str:
    names = [chunk.name for chunk in chunks if chunk.body + chunk.size <= length]
    if b"moov" not in names:
        return "broken off: its index (moov) is missing, which is written last"
    end = chunks[-1].body + chunks[-1].size
    if b"moof" in names and end > length:  # fragmented; otherwise the index has the length
        return f"broken off: its last fragment lacks {end - length} bytes"
    return "a second file is joined to it, and only the first can be read" if names.count(b"ftyp") > 1 else ""


def _flaw_of_ogg(handle: BinaryIO, length: int) -> str:
    handle.seek(max(0, length - 2 * _OGG_PAGE))
    tail = handle.read()
    page = tail[tail.rfind(b"OggS") :]
    size = 27 + page[26] + sum(page[27 : 27 + page[26]]) if len(page) > 26 and page[:4] == b"OggS" else len(page) + 1
    return "broken off: its last page is not whole" if len(page) < size else ""


def without_tags(data: bytes) -> bytes:
    """Strip the tags (ID3v1, APE) at the end of a file."""
    if data[-128:-125] == b"TAG":
        data = data[:-128]
    footer = data[-32:]
    if footer[:8] == b"APETAGEX":
        size, flags = int.from_bytes(footer[12:16], "little"), int.from_bytes(footer[20:24], "little")
        data = data[: -size - 32 * (flags >> 31)]
    return data


def is_chained(handle: BinaryIO) -> bool:
    """Return whether an Ogg file holds several streams, chained or multiplexed, so that timestamps are unreliable."""
    handle.seek(0)
    first_page = handle.read(18)
    if first_page[:4] != b"OggS":
        return False
    handle.seek(max(0, handle.seek(0, os.SEEK_END) - _OGG_PAGE))
    tail = handle.read()
    last_page = tail[tail.rfind(b"OggS") :]
    return first_page[14:18] != last_page[14:18]


def mp3_frames(handle: BinaryIO) -> int:
    """Return the number of frames in an MP3's Xing or VBRI header; 0 if it has none."""
    handle.seek(0)
    head = handle.read(10)
    tag = 10 + sum(byte << 7 * (3 - i) for i, byte in enumerate(head[6:10])) if head[:3] == b"ID3" else 0
    handle.seek(tag)
    first_frame = handle.read(256)
    for name, offset in ((b"Xing", 8), (b"Info", 8), (b"VBRI", 14)):
        start = first_frame.find(name)
        if start >= 0 and (
            name == b"VBRI" or (first_frame[start + 7 : start + 8] > b"" and first_frame[start + 7] & 1)
        ):
            return int.from_bytes(first_frame[start + offset : start + offset + 4], "big")
    return 0
