"""What is sent to machines is compressed where that makes it arrive sooner."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator

import pytest

from distributed.machine import compression
from distributed.machine.compression import AdaptiveGzip

TEXT = b"the same words again " * 16
STRETCH = 1 << 16
NOISE = random.Random(1).randbytes(STRETCH // 4)
COMPRESSES = 50e6
"""Bytes a second of the processor that compresses."""


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "STRETCH", STRETCH)


class Link:
    """Time of a sender that compresses at a fixed rate, and whose link takes ``rate`` bytes a second."""

    def __init__(self, rate: float) -> None:
        self.seconds, self._rate = 0.0, rate
        self._passing: Iterator[float] = iter(())

    def clock(self) -> float:
        self.seconds += next(self._passing, 0.0)
        return self.seconds

    def sent(self, files: list[bytes], is_compressed: bool = False) -> bytes:
        stream, received = AdaptiveGzip(is_compressed, self.clock), list[bytes]()

        def take(data: bytes) -> None:
            self.seconds += len(data) / self._rate
            received.append(data)

        for content in files:
            for piece in stream.next_file():
                take(piece)
            for start in range(0, len(content), len(NOISE)):
                self._passing = iter((0.0, len(NOISE) / COMPRESSES))  # before a piece is compressed, and after it
                for data in stream.write(content[start : start + len(NOISE)]):
                    take(data)
        for data in stream.end():
            take(data)
        return b"".join(received)


@pytest.mark.parametrize("rate", [1e5, 1e6, 1e9])
@pytest.mark.parametrize("content", [TEXT * 1000, NOISE * 40])
def test_any_link_receives_the_files(rate: float, content: bytes) -> None:
    files = [content, NOISE, content]
    assert gzip.decompress(Link(rate).sent(files)) == b"".join(files)


def test_a_slow_link_gets_what_is_small_and_a_fast_one_what_is_quick() -> None:
    content = (NOISE + TEXT * 50) * 10
    slow, fast = (len(Link(rate).sent([content])) for rate in (1e6, 1e9))
    assert slow < 0.6 * len(content)
    assert fast > 0.8 * len(content) > STRETCH


def test_what_gets_no_smaller_is_only_stored() -> None:
    stored = Link(1e5).sent([NOISE * 40], is_compressed=True)
    assert len(NOISE * 40) < len(stored) < 1.001 * len(NOISE * 40)


def test_a_large_file_after_another_is_tried_anew() -> None:
    """Noise is stored at once; the texts after it are compressed again, as the link is slow."""
    content = TEXT * 1000
    assert len(Link(1e6).sent([NOISE * 40, content])) < 1.02 * len(NOISE * 40)
