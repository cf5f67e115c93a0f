"""Whether somebody uses this computer: input as far as the system tells it, and what other programs compute.

A computer without a screen and a terminal has no input that could be seen: only its load counts there.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil

from distributed.joining.lending.terms import LendingTerms, in_hours
from training.hardware.idle_time import IdleTime
from training.hardware.sensors import OtherLoad, battery

QUIET = 300.0
"""Seconds without input after which nobody uses a computer."""
CALM = 60.0
"""Seconds of little load after which other programs count as done."""
BUSY = 0.25
"""Share of all cores above which other programs are somebody's work."""
_LOAD_EVERY, _ASK_EVERY = 1.0, 0.5
_INPUT = re.compile(r"i8042|i2c[_-]?hid|elan|synaptics|touchpad|keyboard|mouse", re.IGNORECASE)
"""Names of interrupts of keyboards and pointing devices in ``/proc/interrupts``."""


@dataclass(frozen=True)
class OwnerPresence:
    """What was seen of a computer's user at one moment."""

    minute: int
    """Of the day, local time."""
    quiet: float | None = None
    """Seconds since the last input; ``None``: the system does not tell."""
    others: float | None = None
    """Share of all cores that other programs use."""
    on_mains: bool = True


class RestPolicy:
    """Decides from what is seen whether a computer rests; pure but for what it remembers of the load."""

    def __init__(self, terms: LendingTerms) -> None:
        self._terms = terms
        self._calm_from = float("-inf")
        self._was_busy = False

    def reason(self, seen: OwnerPresence, now: float) -> str:
        """Return why nothing of others may run; empty: it may.

        Args:
            now: on a monotonic clock.
        """
        if self._terms.hours is not None and not in_hours(self._terms.hours, seen.minute):
            return "it is lent at other hours"
        if self._terms.on_mains and not seen.on_mains:
            return "it runs on battery"
        if self._terms.while_idle:
            if seen.quiet is not None and seen.quiet < QUIET:
                return "its owner is there"
            if self._is_busy(seen, now):
                return "its owner's programs compute"
        return ""

    def _is_busy(self, seen: OwnerPresence, now: float) -> bool:
        """Whether other programs compute: in two looks in a row, and until they have been calm for a while."""
        is_high = seen.others is not None and seen.others >= BUSY
        if is_high and self._was_busy:
            self._calm_from = now + CALM
        self._was_busy = is_high
        return now < self._calm_from


class PresenceSensor:
    """Looks at this computer.

    Args:
        terms: what is of interest.
        seconds: returns the processor seconds of the pool's own programs, by process number.
    """

    def __init__(self, terms: LendingTerms, seconds: Callable[[], dict[int, float]]) -> None:
        self._terms = terms
        self._load = OtherLoad(seconds) if terms.while_idle else None
        self._others: float | None = None
        self._looked = time.monotonic()
        self._input = InputClock()

    def look(self) -> OwnerPresence:
        moment = time.localtime()
        power = battery(psutil) if self._terms.on_mains else None
        is_plugged = power is None or power.power_plugged is not False
        quiet = self._input.quiet() if self._terms.while_idle else None
        return OwnerPresence(60 * moment.tm_hour + moment.tm_min, quiet, self._share(), is_plugged)

    def _share(self) -> float | None:
        """Return the load of other programs, measured once a second."""
        if self._load is not None and time.monotonic() - self._looked >= _LOAD_EVERY:
            self._others, self._looked = self._load.share(), time.monotonic()
            return self._others
        return None


def is_input_hidden(root: Path = Path("/"), idle_time: Callable[[], float | None] | None = None) -> bool:
    """Whether this computer shows a desktop that does not tell of its user: a mouse would not be noticed there.

    Args:
        root: where ``tmp`` and ``run`` are.
        idle_time: asks the desktop; default: this one.
    """
    if sys.platform == "darwin":
        return False
    displays = [*root.glob("tmp/.X11-unix/X*"), *root.glob(f"run/user/{os.getuid()}/wayland-*")]
    nobody = SimpleNamespace(users=list)
    return bool(displays) and (idle_time or IdleTime(machine=nobody).seconds)() is None


class InputClock:
    """Seconds since the last input, from whatever this system tells without special rights.

    Args:
        idle_time: asks the desktop and the terminals; that may start a program, so it is asked twice a second.
    """

    def __init__(self, idle_time: Callable[[], float | None] | None = None) -> None:
        self._idle_time = idle_time or IdleTime().seconds
        self._answer: float | None = None
        self._asked = float("-inf")
        self._interrupts, self._changed = _interrupts(), float("-inf")

    def quiet(self) -> float | None:
        """Return the seconds since the last key or pointer movement; ``None``: no source tells."""
        now = time.monotonic()
        if now - self._asked >= _ASK_EVERY:
            self._answer, self._asked = self._idle_time(), now
        if (count := _interrupts()) != self._interrupts:
            self._interrupts, self._changed = count, now
        known = [] if self._answer is None else [self._answer + now - self._asked]
        return min([*known, *([now - self._changed] if count is not None else [])], default=None)


def _interrupts() -> int | None:
    """Return the number of interrupts of keyboards and pointers of this computer itself; ``None``: none are known."""
    try:
        lines = Path("/proc/interrupts").read_text().splitlines()
    except OSError:
        return None
    counted = [line.split() for line in lines if _INPUT.search(line)]
    numbers = [int(word) for words in counted for word in words[1:] if word.isdecimal()]
    return sum(numbers) if numbers else None
