"""Energy from what meters say: joules that a counter has counted, or watts that are read now and then. Pure."""

from __future__ import annotations

MOST_WATTS = 5000.0
"""No single meter measures more: a counter that seems to has been reset."""
LONGEST_GAP = 60.0
"""Seconds between two readings of power over which nobody can say what was drawn."""


class Counter:
    """Energy of a meter that counts joules.

    Args:
        wraps_at: joules after which the meter begins again at 0; ``None``: it never does.
    """

    def __init__(self, wraps_at: float | None = None) -> None:
        self.joules = 0.0
        """Since the first reading."""
        self._wraps_at = wraps_at
        self._last: tuple[float, float] | None = None

    def add(self, counted: float, at: float) -> float | None:
        """Take a reading at a time in seconds; return the mean watts since the one before, if it tells them.

        It may wrap once between two readings. A counter that was reset, as a driver does that is loaded again, tells
        nothing about the time before.
        """
        before = self._last
        if before is not None and at <= before[1]:
            return None
        self._last = (counted, at)
        if before is None:
            return None
        spent, seconds = counted - before[0], at - before[1]
        if spent < 0 and self._wraps_at is not None:
            spent += self._wraps_at
        if not 0 <= spent <= MOST_WATTS * seconds:
            return None
        self.joules += spent
        return spent / seconds


class Integral:
    """Energy of a meter that only tells its power: by the trapezoidal rule."""

    def __init__(self) -> None:
        self.joules = 0.0
        """Since the first reading."""
        self._last: tuple[float, float] | None = None

    def add(self, watts: float, at: float) -> float | None:
        """Take a reading at a time in seconds; return its watts if they make sense."""
        if not 0 <= watts <= MOST_WATTS:
            return None
        before, self._last = self._last, (watts, at)
        if before is not None and 0 < at - before[1] <= LONGEST_GAP:
            self.joules += (watts + before[0]) / 2 * (at - before[1])
        return watts
