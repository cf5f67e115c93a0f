"""``events.jsonl``: append-only, every event numbered, readable after any kind of break; and what a process tells."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from profiles.errors import RunFailed
from training.records.bounded_fields import LONGEST_LINE
from training.records.events import Event, from_line, to_line
from training.records.run_files import explain

_TAIL = 1 << 20
_POLL = 0.1


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log; lines that are torn, damaged or not events are passed over."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    with stream:
        for line in stream:
            event = _parse(line)
            if event is not None:
                yield event


def _parse(line: bytes) -> Event | None:
    try:
        return from_line(line)
    except (ValueError, RecursionError):
        return None


def follow_events(path: Path, goes_on: Callable[[], bool]) -> Iterator[Event | None]:
    """Yield the events of a growing log; ``None`` while there are none, and for a line that is not an event.

    Raises:
        OSError: it cannot be opened.
    """
    for line in follow_lines(path, goes_on):
        yield _parse(line) if line else None


def follow_lines(path: Path, goes_on: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the whole lines of a growing file, and empty ones while there are none, until it grows no more.

    A line that is longer than any event comes in pieces.

    Raises:
        OSError: it cannot be opened.
    """
    partial_line = b""
    with path.open("rb") as stream:
        while True:
            ending = not goes_on()  # asked before reading, so that the last lines are not missed
            while chunk := stream.read(1 << 16):
                *lines, partial_line = (partial_line + chunk).split(b"\n")
                yield from (line for line in lines if line)
                if len(partial_line) > LONGEST_LINE:
                    yield partial_line
                    partial_line = b""
            if ending:
                return
            yield b""
            time.sleep(_POLL)


def newest_number(path: Path) -> int:
    """Return the number of the last event of a log; -1: it has none."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        return _last_seq(stream.fileno(), os.fstat(stream.fileno()).st_size)
    return -1


def _last_seq(descriptor: int, size: int) -> int:
    for length in (_TAIL, size):
        start = max(0, size - length)
        lines = os.pread(descriptor, size - start, start).splitlines()
        for line in reversed(lines):
            event = _parse(line)
            if event is not None and event.seq is not None:
                return event.seq
    return -1


class EventLog:
    """The writing end of a log; several threads may append.

    Opening cuts a line that a killed process left half-written and goes on with the number after the last one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._has_reported_error = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._size = self._cut_torn_tail()
            self._next = _last_seq(self._descriptor, self._size) + 1
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, event: Event) -> Event:
        """Write one event and return it with its ``seq``.

        Raises:
            RunFailed: the first time a write fails. Later appends keep trying and lose only what cannot be written.
        """
        with self._lock:
            numbered = event.model_copy(update={"seq": self._next})
            self._next += 1
            try:
                self._write((to_line(numbered) + "\n").encode())
            except OSError as error:
                if not self._has_reported_error:
                    self._has_reported_error = True
                    message, hint = explain(error, self._path)
                    raise RunFailed(f"events are being lost: {message}", hint) from error
            return numbered

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _write(self, data: bytes) -> None:
        """Write all of ``data`` at the end, or leave the file as it was."""
        position = self._size
        try:
            while data:
                written = os.pwrite(self._descriptor, data, position)
                position += written
                data = data[written:]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size = position

    def _cut_torn_tail(self) -> int:
        size = os.fstat(self._descriptor).st_size
        end = size
        while end > 0:
            start = max(0, end - _TAIL)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._descriptor, end)
        return end


class EventSink:
    """Writes events as JSON lines to a text stream; safe to call from several threads.

    If the process that reads them was killed, they are dropped: that is no reason to end before everything is saved.
    """

    def __init__(self, stream: TextIO, member: int | None = None) -> None:
        self._stream = stream
        self._member = member
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.member is None and self._member is not None:
            event = event.model_copy(update={"member": self._member})
        with self._lock:
            try:
                self._stream.write(to_line(event) + "\n")
                self._stream.flush()
            except BrokenPipeError:  # what is buffered would be written again and again, at the end of the process too
                with open(os.devnull, "wb") as null:
                    os.dup2(null.fileno(), self._stream.fileno())
