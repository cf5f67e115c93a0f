"""An operation in flight on several links of a mesh."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from profiles.quantities import span_text
from training.exchange.base import ExchangeTimeout
from training.exchange.links.link import Incoming, Outgoing
from training.exchange.links.loop import Job, Loop

Done = Callable[[Exception | None], None]


class PendingTransfer:
    """Complete when its last part is.

    Args:
        part_count: number of parts that have to end.
        on_done: called once, in the thread that ends the last part, with the error if there was one.
        blame: returns the common cause of errors, if there is one.
    """

    def __init__(
        self, part_count: int, on_done: Done | None = None, blame: Callable[[], Exception | None] = lambda: None
    ) -> None:
        self.error: Exception | None = None
        self._jobs: list[tuple[Outgoing | Incoming, Job]] = []
        self._loop: Loop | None = None
        self._blame = blame
        self._left = part_count
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._on_done = on_done
        if not part_count:
            self._finish()

    def add(self, link: Outgoing | Incoming, job: Job) -> None:
        """Add one part."""
        self._jobs.append((link, job))
        self._loop = link.loop

    def submit(self, start: bool = True) -> PendingTransfer:
        """Have the links run all parts.

        Args:
            start: ``False``: this thread drives the links at once (:meth:`drive`).
        """
        while self._jobs:
            link, job = self._jobs.pop(0)
            link.submit(job, self.part_ended, start=False)
        if start and self._loop is not None:
            self._loop.start()
        return self

    def drive(self, until: Callable[[], bool] | None = None, seconds: float = math.inf) -> None:
        """Carry it out in this thread, unless another one does that: until ``until()``, by default until it is
        complete, for up to ``seconds``, or until there is nothing more to do."""
        if self._loop is not None:
            self._loop.drive(until or self._ended.is_set, seconds)

    def drive_for(self, event: threading.Event, seconds: float) -> bool:
        """Wait up to ``seconds`` for an event that follows its end, and drive the links meanwhile if no other thread
        does; return whether it came."""
        deadline = time.monotonic() + seconds
        self.drive(event.is_set, seconds)
        return event.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))

    def cut(self) -> None:
        """End it, and everything else on these links: no more bytes of it leave this member."""
        if self._loop is not None and not self._ended.is_set():
            self._loop.cut()

    def part_ended(self, error: Exception | None) -> None:
        with self._lock:
            if error is not None:
                self.error = self._blame() or self.error or error
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._finish()

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is complete.

        Raises:
            ExchangeTimeout: not within ``timeout`` seconds.
            PeerLost: a member is gone.
        """
        if not self._ended.wait(timeout):
            raise ExchangeTimeout(f"no result after {span_text(timeout or 0)}")
        if self.error is not None:
            raise self.error

    def _finish(self) -> None:
        if self._on_done is not None:
            try:
                self._on_done(self.error)
            except Exception as error:  # noqa: BLE001 - raised where the operation is waited for
                self.error = self.error or error
        self._on_done = None  # it refers to the buffers
        self._ended.set()
