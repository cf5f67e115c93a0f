"""Ctrl-C and its sisters in the process that carries a run out."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Protocol

ONE_PRESS = 1.0
"""Seconds in which signals count as one: what starts us may pass on what the terminal has sent us already."""
STOPPING = "stopping after the current step, with a snapshot (once more: end at once, without one)"


class Stoppable(Protocol):
    """A run; :class:`training.local_run.LocalRun` is one."""

    def request_stop(self, message: str) -> None: ...

    def kill(self) -> None: ...


class StopSignals:
    """Turns signals into a stop of the run; a second one ends everything at once.

    Args:
        say: takes what is told to the person.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._run: Stoppable | None = None
        self._asked = 0
        self._first = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked and now - self._first < ONE_PRESS:
            return
        self._first = self._first if self._asked else now
        self._asked += 1
        if self._run is not None:
            self._act(self._run)

    def watch(self, run: Stoppable) -> None:
        """The run has started: carry out what was asked for meanwhile."""
        self._run = run
        if self._asked:
            self._act(run)

    def _act(self, run: Stoppable) -> None:
        if self._asked > 1:
            return run.kill()
        self._say(STOPPING)
        run.request_stop("stopped by the user")


@contextlib.contextmanager
def stopped_by(signals: Sequence[int], say: Callable[[str], None]) -> Iterator[StopSignals]:
    """Let signals stop the run that :meth:`StopSignals.watch` is given; only the main thread hears any."""
    stop = StopSignals(say)
    heard = signals if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
