"""Where the time of a start goes: each process measures its parts, one after the other."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from training.events import TimingEvent


class Laps:
    """Parts that follow each other.

    Args:
        emit: takes the event of every part.
        whole_process: the first part begins with this process, not now, and the CPU seconds are those of all its
            threads, not of the calling one.
    """

    def __init__(self, emit: Callable[[TimingEvent], object], whole_process: bool = True) -> None:
        self._emit = emit
        self._time = time.time() - (process_age() if whole_process else 0.0)
        self._clock = time.process_time if whole_process else time.thread_time
        self._cpu = 0.0 if whole_process else time.thread_time()

    def end(self, part: str) -> None:
        """Say that a part is over; the next one begins."""
        now, cpu = time.time(), self._clock()
        self._emit(TimingEvent(time=now, part=part, seconds=max(now - self._time, 0.0), cpu=cpu - self._cpu))
        self._time, self._cpu = now, cpu


def process_age() -> float:
    """Return the seconds since this process was started."""
    if sys.platform == "linux":  # psutil adds a boot time in whole seconds
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return max(time.time() - psutil.Process().create_time(), 0.0)
