"""Decides how many steps a short run takes, and what they say about the time of a step."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

WARM_UP, LEAST_STEPS = 2, 6
"""Steps that do not count, and the least number of steps that do."""
LEAST_SECONDS, MORE_SECONDS, MOST_SECONDS = 2.0, 10.0, 20.0
"""Seconds of the counted steps: at least; at most, if their mean is not known well enough; of all steps of a slow
machine, which takes fewer than :data:`LEAST_STEPS`, but at least one after its first."""
SHARE_OF_RUN = 0.1
"""Share of the predicted time of the run in which the steps of one batch size end, but not before twice
:data:`LEAST_SECONDS`: a short run is not planned for longer than it gains."""
WELL_KNOWN = 0.02
"""Standard error of the mean over the mean."""
_LEAST_BLOCKS = 6
_BLOCK = 0.25
_PERIODS = 5
"""Periods of a quota in a block: a block ends with a step, up to one period early or late."""
_STALL = 3.0
"""Ratio to the median from which a single step was delayed by something outside the run. If there are several, the
machine is like that."""


@dataclass(frozen=True)
class StepTime:
    """A step's time in seconds."""

    seconds: float
    """The mean."""
    spread: float
    """Standard deviation of single steps."""
    error: float
    """Standard error of the mean; 0: unknown."""


class StepTimer:
    """Collects the times of consecutive steps.

    Args:
        period: seconds over which a quota of processor time is counted; 0: there is none.
        run_steps: steps of the run that is planned; 0: not known.
    """

    def __init__(self, period: float = 0.0, run_steps: int = 0) -> None:
        self._period, self._run_steps = period, run_steps
        self._block = max(_BLOCK, _PERIODS * period)
        self._warm_up: list[float] = []
        self._counted: list[float] = []
        self._time = 0.0
        self._begun = 0
        self._begun_at = 0.0
        self._blocks: list[float] = []
        """Mean step of each block."""

    def add(self, seconds: float) -> None:
        """Take the time of one step."""
        if len(self._warm_up) < WARM_UP:
            self._warm_up.append(seconds)
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
            return well_known or self._time >= MORE_SECONDS or self.seconds > self._longest
        return (self._counted and self.seconds > self._longest) or (
            len(self._warm_up) > 1 and self.seconds > MOST_SECONDS
        )

    @property
    def _mean(self) -> float:
        """Mean of all steps so far, in seconds."""
        return self.seconds / max(1, len(self._warm_up) + len(self._counted))

    @property
    def _longest(self) -> float:
        """Seconds that the steps take at most: there are few of them before a short run."""
        share = SHARE_OF_RUN * self._run_steps * self._mean if self._run_steps else math.inf
        return max(2 * LEAST_SECONDS, share)

    def expected(self, ratio: float = 1.0) -> float:
        """Return the seconds that all steps probably take at a batch size where one takes ``ratio`` times as long."""
        step = ratio * self._mean
        usual = WARM_UP * step + max(LEAST_SECONDS, LEAST_STEPS * step)
        return max(2 * step, min(usual, ratio * self._longest, MOST_SECONDS + step))

    @property
    def seconds(self) -> float:
        """Seconds of all steps so far."""
        return sum(self._warm_up) + self._time

    def _error(self) -> float:
        """Return the standard error of the mean; infinite where there are too few blocks to tell."""
        count = len(self._blocks)
        return statistics.stdev(self._blocks) / math.sqrt(count) if count >= _LEAST_BLOCKS else math.inf

    def step_time(self) -> StepTime | None:
        """Return the time of a step; ``None`` if none was taken."""
        counted = self._counted or self._warm_up[1:] or self._warm_up
        if not counted:
            return None
        steps = _without_a_stall(_whole_periods(counted, self._period))
        error = self._error()
        return StepTime(statistics.fmean(steps), statistics.pstdev(steps), error if math.isfinite(error) else 0.0)


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
