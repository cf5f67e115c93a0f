"""Something under way on several links of a mesh at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from training.exchange.base import ExchangeTimeout
from training.exchange.link import Incoming, Outgoing, PeerLost

Done = Callable[[Exception | None], None]


class PendingTransfer:
    """Complete when its last part is.

    Args:
        parts: that have to end.
        then: called once, by whoever ends the last part, with what went wrong.
        blame: the cause of errors, where there is one for all.
    """

    def __init__(
        self, part_count: int, on_done: Done | None = None, blame: Callable[[], Exception | None] = lambda: None
    ) -> None:
        self.error: Exception | None = None
        self._jobs: list[tuple[Outgoing | Incoming, Callable[[Any], None], bool]] = []
        self._blame = blame
        self._left = part_count
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._on_done = on_done
        if not part_count:
            self._finish()

    def add(self, link: Outgoing | Incoming, job: Callable[[Any], None], small: bool = False) -> None:
        """Enter the work of one part; ``small``: it waits for nobody but, where it receives, for the other end."""
        self._jobs.append((link, job, small))

    def submit(self) -> PendingTransfer:
        """Have what was entered, and is not carried out yet, carried out by the links' threads."""
        while self._jobs:
            link, job, _ = self._jobs.pop(0)
            link.submit(job, self.part_ended)
        return self

    def carry_out(self, seconds: float) -> None:
        """Carry out here what was entered, so far as nothing else is under way and the others come within ``seconds``:
        handing it over to threads costs more than a few bytes do. Those carry out the rest."""
        until = time.monotonic() + seconds
        try:
            while self._jobs:
                link, job, small = self._jobs[0]
                if isinstance(link, Incoming) and not (link.idle and link.comes(max(0.0, until - time.monotonic()))):
                    break
                error: Exception | None = None
                try:
                    done = small and link.try_now(job)
                except PeerLost as lost:
                    done, error = True, lost
                del self._jobs[0]
                if not done:
                    link.submit(job, self.part_ended)
                del job  # as the links do
                if done:
                    self.part_ended(error)
        finally:
            self.submit()

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
            raise ExchangeTimeout(f"no result after {timeout:g} s")
        if self.error is not None:
            raise self.error

    def _finish(self) -> None:
        if self._on_done is not None:
            try:
                self._on_done(self.error)
            except Exception as error:  # noqa: BLE001 - whoever waits for the operation must get it
                self.error = self.error or error
        self._on_done = None  # it holds what was exchanged
        self._ended.set()
