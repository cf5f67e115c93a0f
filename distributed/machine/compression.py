"""Gzip that is compressed only while the receiver takes it more slowly than compressing would gain."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator

STRETCH = 4 << 20
"""Bytes after which it is judged anew whether compressing pays."""
_GZIP = 31
"""Window bits of zlib for a gzip member with the largest window."""


class AdaptiveGzip:
    """A stream of gzip members, each compressed at level 1 or only stored.

    Compressing pays where ``sent bytes a second < compressed bytes a second * (1 - size after / size before)``: on a
    slow link, and for what gets smaller. Weights on a wire of 1 Gbit/s are sent twice as fast without.

    Args:
        is_compressed: the content gets no smaller, so that nothing is tried.
        clock: in seconds.
    """

    def __init__(self, is_compressed: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._is_compressed = clock, is_compressed
        self._level = 0 if is_compressed else 1
        self._packer = self._member()
        self._before = self._after = 0
        self._packing = self._sending = 0.0
        self._break_even = 0.0
        """Bytes a second on the wire up to which compressing paid in the latest stretch that was compressed."""

    def write(self, data: bytes) -> Iterator[bytes]:
        """Yield what is to be sent; how long the consumer takes for it is measured."""
        began = self._clock()
        packed = self._packer.compress(data)
        self._packing += self._clock() - began
        self._before += len(data)
        yield from self._sent(packed)
        if self._before >= STRETCH and not self._is_compressed:
            yield from self._judge()

    def next_file(self) -> Iterator[bytes]:
        """Begin a large file: whether it gets smaller is tried."""
        if not self._is_compressed:
            yield from self._turn_to(1)

    def end(self) -> Iterator[bytes]:
        """Yield the end of the stream."""
        yield self._packer.flush()

    def _member(self) -> zlib._Compress:
        return zlib.compressobj(self._level, zlib.DEFLATED, _GZIP)

    def _sent(self, packed: bytes) -> Iterator[bytes]:
        if packed:
            began = self._clock()
            yield packed
            self._sending += self._clock() - began
            self._after += len(packed)

    def _judge(self) -> Iterator[bytes]:
        if self._level:
            self._break_even = max(0, self._before - self._after) / max(self._packing, 1e-9)
        pays = self._after <= self._break_even * self._sending
        self._before = self._after = 0
        self._packing = self._sending = 0.0
        yield from self._turn_to(int(pays))

    def _turn_to(self, level: int) -> Iterator[bytes]:
        if level != self._level:
            yield self._packer.flush()
            self._level = level
            self._packer = self._member()
