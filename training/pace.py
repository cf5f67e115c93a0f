"""How long a step takes on a machine: steps are taken until their mean is known well enough, or the time is over.

A step's time has two kinds of noise. What differs from one step to the next is gone in the mean of many. What lasts
for a while is not: another program, or a quota, which lets a process run and then stand still in every period. So the
error of the mean is taken from *blocks* of time, each some periods long (batch means: Law and Kelton, "Simulation
Modeling and Analysis", section 9.5), and a mean covers whole periods.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

WARM_UP, LEAST_STEPS = 2, 6
"""Steps that do not count, and those that have to."""
LEAST_SECONDS, MORE_SECONDS, MOST_SECONDS = 2.0, 10.0, 20.0
"""Of the steps that count: at least; at most where their mean is not known well enough; of all steps of a slow machine,
which takes fewer than :data:`LEAST_STEPS`, but one after its first."""
WELL_KNOWN = 0.02
"""Standard error of the mean over the mean."""
_LEAST_BLOCKS = 6
_BLOCK = 0.25
_PERIODS = 5
"""Of a quota in a block: a block ends with a step, up to one period early or late."""
_STALL = 3.0
"""A single step so much longer than the usual one was held up by something that a run is not. Where there are several,
the machine is like that."""


@dataclass(frozen=True)
class Pace:
    """A step's time in seconds."""

    seconds: float
    """The mean."""
    spread: float
    """Standard deviation of single steps."""
    error: float
    """Standard error of the mean; 0: unknown."""


class PaceTaker:
    """Takes the times of steps that follow each other.

    Args:
        period: seconds over which a quota of processor time is counted; 0: there is none.
    """

    def __init__(self, period: float = 0.0) -> None:
        self._period = period
        self._block = max(_BLOCK, _PERIODS * period)
        self._first: list[float] = []
        self._counted: list[float] = []
        self._time = 0.0
        self._begun = 0
        self._begun_at = 0.0
        self._blocks: list[float] = []
        """The mean step of each."""

    def add(self, seconds: float) -> None:
        """Take the time of one step."""
        if len(self._first) < WARM_UP:
            self._first.append(seconds)
            return
        self._counted.append(seconds)
        self._time += seconds
        if self._time - self._begun_at >= self._block:
            self._blocks.append((self._time - self._begun_at) / (len(self._counted) - self._begun))
            self._begun, self._begun_at = len(self._counted), self._time

    @property
    def enough(self) -> bool:
        """Whether more steps would tell little, or take too long."""
        if len(self._counted) >= LEAST_STEPS and self._time >= LEAST_SECONDS:
            well_known = self._error() <= WELL_KNOWN * self._time / len(self._counted)
            return well_known or self._time >= MORE_SECONDS
        return len(self._first) + len(self._counted) > 1 and self.seconds > MOST_SECONDS

    @property
    def seconds(self) -> float:
        """Of all steps so far."""
        return sum(self._first) + self._time

    def _error(self) -> float:
        """Return the standard error of the mean; infinite where there are too few blocks to tell."""
        count = len(self._blocks)
        return statistics.stdev(self._blocks) / math.sqrt(count) if count >= _LEAST_BLOCKS else math.inf

    def pace(self) -> Pace | None:
        """Return what the steps tell; ``None`` where none was taken."""
        counted = self._counted or self._first[1:] or self._first
        if not counted:
            return None
        kept = _without_a_stall(_whole_periods(counted, self._period))
        error = self._error()
        return Pace(statistics.fmean(kept), statistics.pstdev(kept), error if math.isfinite(error) else 0.0)


def _whole_periods(steps: list[float], period: float) -> list[float]:
    """Return the steps up to the one that ends nearest to the end of a period counted from the first step: a quota
    lets a process run equally long in any stretch of whole periods."""
    total = sum(steps)
    if period <= 0 or total < 2 * _PERIODS * period:
        return steps
    best, off, end, length = len(steps), math.inf, total, len(steps)
    while length and end > total - period:
        if abs(end - period * round(end / period)) < off:
            best, off = length, abs(end - period * round(end / period))
        length -= 1
        end -= steps[length]
    return steps[:best]


def _without_a_stall(steps: list[float]) -> list[float]:
    usual = statistics.median(steps)
    held_up = [seconds for seconds in steps if seconds > _STALL * usual]
    return [seconds for seconds in steps if seconds <= _STALL * usual] if len(held_up) == 1 else steps
