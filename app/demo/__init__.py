"""The tour: recorded machines and a recorded run behind the interfaces of the real ones.

It needs no network and no training, and also provides the documentation's pictures and data for the screens' tests.
Names, chips, speeds, links and health of the machines are invented; losses, word error rates and texts are those of a
real training (``record/README.md``). All machines are named ``demo-...`` and the profile of a run
``demo-...-recorded``, so that nothing can be mistaken for a measurement of the user's machines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

RECORD = Path(__file__).parent / "record"
CONFIG = RECORD / "config.ini"
MOST = 8
"""Largest number of machines."""
JOB = "demo"
"""Profile with which the set-up starts."""


class ScriptClock:
    """A clock for scripted work; closing it ends all waiting.

    Args:
        speed: factor by which it runs faster than the script.
        clock: returns seconds from an arbitrary origin.
    """

    def __init__(self, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed = speed
        self._closed = threading.Event()
        self._clock = clock
        self._began = clock()

    @property
    def passed(self) -> float:
        """Scripted seconds since the start."""
        return (self._clock() - self._began) * self.speed

    def work(self, seconds: float) -> None:
        """Wait for ``seconds`` of the script."""
        self._closed.wait(seconds / self.speed)

    def close(self) -> None:
        self._closed.set()
