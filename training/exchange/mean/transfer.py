"""An operation in flight on several links of a mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from training.exchange.base import ExchangeTimeout
from training.exchange.links.link import Incoming, Outgoing, PeerLost

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
        self._jobs: list[tuple[Outgoing | Incoming, Callable[[Any], None], bool]] = []
        self._blame = blame
        self._left = part_count
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._on_done = on_done
        if not part_count:
            self._finish()

    def add(self, link: Outgoing | Incoming, job: Callable[[Any], None], small: bool = False) -> None:
        """Add one part; ``small``: it blocks at most, if it receives, for the peer."""
        self._jobs.append((link, job, small))

    def submit(self) -> PendingTransfer:
        """Have the links' threads run all parts that have not run yet."""
        while self._jobs:
            link, job, _ = self._jobs.pop(0)
            link.submit(job, self.part_ended)
        return self

    def carry_out(self, seconds: float) -> None:
        """Run parts in this thread as long as the links are idle and the peers respond within ``seconds``: handing a
        few bytes over to threads costs more than transferring them. The links' threads run the rest."""
        until = time.monotonic() + seconds
        try:
            while self._jobs:
                link, job, small = self._jobs[0]
                seconds_left = max(0.0, until - time.monotonic())
                if isinstance(link, Incoming) and not (link.idle and link.wait_readable(seconds_left)):
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
            except Exception as error:  # noqa: BLE001 - raised where the operation is waited for
                self.error = self.error or error
        self._on_done = None  # it refers to the buffers
        self._ended.set()
