"""The time that scripted work takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Waits as long as scripted work takes, and no longer than until it is closed.

    Args:
        speed: how much faster than the script.
        clock: seconds since any moment.
    """

    def __init__(self, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self._closed = threading.Event()
        self._clock = clock
        self._began = clock()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def passed(self) -> float:
        """Seconds of the script since the beginning."""
        return (self._clock() - self._began) * self.speed

    def work(self, seconds: float) -> bool:
        """Let ``seconds`` of the script pass; false where it was closed meanwhile."""
        return not self._closed.wait(seconds / self.speed)

    def close(self) -> None:
        self._closed.set()
