"""The records of a worker that its supervisor has not written down yet.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEGMENT = 1 << 22
"""Bytes of a file, which goes when all its records are forgotten."""


class _Segment:
    """Successive records in a file; in memory where the disk is full."""

    def __init__(self, path: Path, first: int) -> None:
        self.first = first
        self._path = Path(f"{path}.{first}")
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._starts = array("Q")
        self._in_memory: dict[int, bytes] = {}
        self.size = 0

    @property
    def end(self) -> int:
        """Number of the record after its last one."""
        return self.first + len(self._starts)

    def append(self, line: bytes) -> None:
        self._starts.append(self.size)
        with contextlib.suppress(OSError):
            if os.pwrite(self._descriptor, line, self.size) == len(line):
                self.size += len(line)
                return
        self._in_memory[len(self._starts) - 1] = line

    def read(self, number: int) -> bytes:
        index = number - self.first
        if index in self._in_memory:
            return self._in_memory[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self.size
        return os.pread(self._descriptor, end - self._starts[index], self._starts[index])

    def close(self) -> None:
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._path.unlink()


class Spool:
    """Numbered records, from 1, until they are forgotten; any thread may use it.

    Args:
        path: its files have this path, with a number each.
        segment: bytes of a file.
    """

    def __init__(self, path: Path, segment: int = SEGMENT) -> None:
        self._path, self._segment = path, segment
        for old in path.parent.glob(f"{path.name}.*"):
            old.unlink()
        self._segments = deque([_Segment(path, 1)])
        self._changed = threading.Condition()

    def append(self, record: dict[str, Any]) -> None:
        """Number a record and store it."""
        with self._changed:
            if self._segments[-1].size >= self._segment:
                with contextlib.suppress(OSError):  # else the file becomes longer
                    self._segments.append(_Segment(self._path, self._segments[-1].end))
            line = json.dumps({"seq": self._segments[-1].end, **record}).encode() + b"\n"
            self._segments[-1].append(line)
            self._changed.notify_all()

    def read(self, number: int, timeout: float) -> tuple[int, bytes]:
        """Return record ``number``, or the next one that is not forgotten, with its number; an empty one if it is not
        available within ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._segments[-1].end > number, timeout):
                return number, b""
            number = max(number, self._segments[0].first)
            return number, next(segment.read(number) for segment in self._segments if number < segment.end)

    def forget(self, number: int) -> None:
        """Remove the files of which nobody needs a record: those up to ``number``."""
        with self._changed:
            while len(self._segments) > 1 and self._segments[0].end <= number + 1:
                self._segments.popleft().close()

    def close(self) -> None:
        """Remove all files."""
        while self._segments:
            self._segments.popleft().close()


def stored_records(path: Path, after: int) -> Iterator[bytes]:
    """Yield the records after number ``after`` that an agent which has ended has left on the disk."""
    for file in sorted(path.parent.glob(f"{path.name}.*"), key=lambda file: int(file.suffix[1:])):
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n") and json.loads(line)["seq"] > after:
                    yield line
