"""The tour: recorded machines and a recorded run behind the interfaces of the real ones.

It needs no network and no training, and serves the documentation's pictures and the screens' tests too. Names, chips
and health of the machines are invented; links, speeds and the run were recorded on lab hosts (``record/README.md``).
All machines are named ``demo-...`` and the profile of a run ``scripted-demo``, so that nothing can be taken for a
measurement of yours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from app.console import TOUR_PROFILE

RECORD = Path(__file__).parent / "record"
CONFIG = RECORD / "config.ini"
MOST = 8
"""Machines."""
PROFILE = TOUR_PROFILE
JOB = "demo"
"""The profile that the set-up begins with."""


class ScriptClock:
    """A clock for scripted work; closing it ends all waiting.

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
    def passed(self) -> float:
        """Scripted seconds since the beginning."""
        return (self._clock() - self._began) * self.speed

    def work(self, seconds: float) -> None:
        """Wait for ``seconds`` of the script."""
        self._closed.wait(seconds / self.speed)

    def close(self) -> None:
        self._closed.set()
