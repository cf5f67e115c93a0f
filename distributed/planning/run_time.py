"""The predicted time of a run, compared with that of the best machine alone, in the words used everywhere.

For plans, candidates, and runs in progress and at their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed.planning.documents.document import Candidate, Planning
from profiles.errors import counted
from profiles.quantities import duration_text

FIXED_STEPS = "max_steps is fixed: more machines see more samples in the same number of steps, and do not end sooner"
_NOTICEABLE_RATIO = 0.95
"""Ratio of two times below which the difference is mentioned."""


@dataclass(frozen=True)
class RunTime:
    """Predicted time of training, without start and evaluations, in seconds."""

    seconds: float
    alone: str = ""
    """The best single machine; empty if the run is on it, or none was predicted."""
    alone_seconds: float = 0.0
    fixed_steps: bool = False
    """Whether a group takes as many steps as one machine."""

    @property
    def slower(self) -> bool:
        """Whether the best machine alone would end sooner, with the same samples."""
        return bool(self.alone) and not self.fixed_steps and self.seconds > self.alone_seconds

    def __str__(self) -> str:
        takes = f"This run takes {duration_text(self.seconds)}"
        comparison = f"; {self.alone} alone would take {duration_text(self.alone_seconds)}" if self.alone else ""
        return f"{takes}{comparison}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The time of the run, and a note if the number of steps is fixed."""
        return (f"{self}.", *((f"{FIXED_STEPS}.",) if self.fixed_steps else ()))


def best_single(ranking: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate of one machine that fits; ``None`` if none was predicted."""
    singles = [
        candidate
        for candidate in ranking
        if candidate.choice.alone and candidate.fits and candidate.samples_per_second > 0
    ]
    return max(singles, key=lambda candidate: candidate.samples_per_second, default=None)


def run_time(planning: Planning, candidate: Candidate) -> RunTime | None:
    """Return the time of a run with a candidate; ``None`` if its speed is not known.

    Args:
        candidate: one of the ranking, possibly with another interval.
    """
    seconds = candidate.steps * candidate.step
    if seconds <= 0:
        return None
    single = best_single(planning.ranking)
    if single is None or single.choice.members == candidate.choice.members:
        return RunTime(seconds)
    fixed = planning.job.steps > 0 and not candidate.choice.alone
    return RunTime(seconds, single.choice.members[0], single.steps * single.step, fixed)


def quality_text(planning: Planning, candidate: Candidate) -> str:
    """Return the effect of a candidate on the result, in words: when it reaches the final loss of one machine, and the
    expected increase of the loss.

    Empty if it learns as much as one machine from the same samples.
    """
    single, words = best_single(planning.ranking), []
    seconds, after = candidate.steps * candidate.step, planning.same_loss_seconds(candidate)
    if single is not None and not candidate.choice.alone and 0 < after < _NOTICEABLE_RATIO * seconds:
        words.append(f"After {duration_text(after)} it is where {single.choice.members[0]} alone would end.")
    elif single is not None and not candidate.choice.alone and _NOTICEABLE_RATIO * after > seconds:
        less = f"It has then learnt a little less than {single.choice.members[0]} alone would"
        words.append(f"{less}; for as much it needs {duration_text(after)}.")
    if candidate.loss_increase:
        words.append(f"The final loss may be {100 * candidate.loss_increase:.1f} % higher.")
    return " ".join(words)


def together_text(members: Sequence[str]) -> str:
    """Return the members as text: ``desk alone``, ``desk and anna``, ``12 machines``."""
    if len(members) == 1:
        return f"{members[0]} alone"
    if len(members) > 3:
        return counted(len(members), "machine")
    return f"{', '.join(members[:-1])} and {members[-1]}"
