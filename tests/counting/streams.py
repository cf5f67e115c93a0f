"""Streams and events of the device that counts, and what was asked of them; without torch.

The members of a process share its main stream, and their threads use it at the same time: as CUDA's, it takes their
work one after another, and an event knows of all copies that are not there when it is recorded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_OURS = (f"{_ROOT / 'training'}/", str(Path(__file__).with_name("steps.py")))


class Counts:
    """What was asked of the device since :meth:`begin`, by place: a file of Muster and its line."""

    free = 1 << 40
    """Bytes of the device that nobody has."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the end of a tensor may come at any moment
        self._counting = False
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._in_use = 0
        self.begin(counting=False)

    def begin(self, counting: bool = True) -> None:
        self.waits: Counter[str] = Counter()
        self.waits_beside: Counter[str] = Counter()
        """Those of threads of a side queue, which hold nobody up."""
        self.launches: Counter[str] = Counter()
        self.pageable: Counter[str] = Counter()
        """Bytes copied from or to memory that is not pinned."""
        self.to_host: Counter[str] = Counter()
        """Bytes, pinned or not."""
        self.to_device: Counter[str] = Counter()
        self.races: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        """Most bytes of the device's memory in use when the line launched something."""
        self._counting = counting

    def end(self) -> None:
        self._counting = False

    def note(self, kind: str, amount: int = 1, place: str = "") -> None:
        if kind == "waits" and threading.current_thread().name.startswith("side queue"):
            kind = "waits_beside"
        if self._counting:
            place = place or place_of_caller()
            with self._lock:
                getattr(self, kind)[place] += amount
                self.held[place] = max(self._in_use, self.held[place])

    def hold(self, address: int, size: int) -> None:
        """Note one more tensor in the memory of ``size`` bytes at an address."""
        with self._lock:
            self._users[address] += 1
            if self._users[address] == 1:
                self._sizes[address] = size
                self._in_use += size

    def release(self, address: int) -> None:
        """Note the end of one of its tensors; the memory is free with the last one's."""
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self._in_use -= self._sizes.pop(address)

    def report(self) -> dict[str, dict[str, int]]:
        kinds = ("waits", "waits_beside", "launches", "pageable", "to_host", "to_device", "races", "held")
        return {kind: dict(getattr(self, kind).most_common()) for kind in kinds}


counts = Counts()


def place_of_caller() -> str:
    """Return the line of Muster's code behind the caller."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"


# ------------------------------------------------------------------------------------------------- streams and events


_lock = threading.Lock()
"""Holds the streams while one of them changes, and while copies arrive."""


class Stream:
    """A queue of the device: what it has done, what it knows of other streams, and copies that are under way."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.done = 0
        self.seen: dict[Stream, int] = {}
        self.copies: list[_Once] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        with _lock:
            for stream, done in event.seen.items():
                self.seen[stream] = max(done, self.seen.get(stream, 0))
            self.copies += event.copies

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        counts.note("waits")
        self.arrive()

    def wrote(self) -> int:
        """Note a launch that writes; return its moment."""
        with _lock:
            self.done += 1
            return self.done

    def copy(self, action: Callable[[], object]) -> None:
        """Queue a copy: it is there when somebody has waited for it."""
        with _lock:
            self.copies.append(_Once(action))

    def arrive(self) -> None:
        """Let all that it copies be there."""
        with _lock:
            _finish(self.copies)
            self.copies = []


class Event:
    """A moment of a stream."""

    def __init__(self, **_: Any) -> None:
        self.seen: dict[Stream, int] = {}
        self.copies: list[_Once] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with _lock:
            self.seen, self.copies = {**stream.seen, stream: stream.done}, list(stream.copies)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        counts.note("waits")
        with _lock:
            _finish(self.copies)


class _Once:
    """A copy, done the first time that it is called: a stream and events may wait for it."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def __call__(self) -> None:
        if self._action is not None:
            self._action()
        self._action = None


def _finish(copies: list[_Once]) -> None:
    for copy in copies:
        copy()


_default, _local = Stream(), threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", _default)


@contextlib.contextmanager
def in_stream(stream: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), stream
    try:
        yield
    finally:
        _local.stream = before
