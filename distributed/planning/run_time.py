"""How long a run takes: when it ends, and when the best machine alone would have ended; told everywhere in these words.

Of a plan, of a way that a person looks at, of a run that goes on, and of one that has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed.planning.document import Candidate, Planning
from profiles.errors import counted
from profiles.quantities import duration_text

FIXED_STEPS = "max_steps is fixed: more machines see more samples in the same number of steps, and do not end sooner"
_LEARNS_LESS = 0.95
"""Part of one time that another has to be, so that it is said when a group is where the machine alone would end."""


@dataclass(frozen=True)
class RunTime:
    """Predicted seconds of training, without start and evaluation."""

    seconds: float
    alone: str = ""
    """The best single machine; empty where the run is its own, or nothing was predicted of one."""
    alone_seconds: float = 0.0
    fixed_steps: bool = False
    """Whether several machines take as many steps as one would."""

    @property
    def slower(self) -> bool:
        """Whether the best machine alone would end sooner, with the same samples."""
        return bool(self.alone) and not self.fixed_steps and self.seconds > self.alone_seconds

    def __str__(self) -> str:
        takes = f"This run takes {duration_text(self.seconds)}"
        beside = f"; {self.alone} alone would take {duration_text(self.alone_seconds)}" if self.alone else ""
        return f"{takes}{beside}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """How long it takes, and what has to be known beside it."""
        return (f"{self}.", *((f"{FIXED_STEPS}.",) if self.fixed_steps else ()))


def best_single(ranking: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest machine alone of those that the job fits; ``None`` where none was predicted."""
    singles = [one for one in ranking if one.choice.alone and one.fits and one.samples_per_second > 0]
    return max(singles, key=lambda one: one.samples_per_second, default=None)


def run_time(planning: Planning, candidate: Candidate) -> RunTime | None:
    """Return how long a run takes this way; ``None`` where its speed is not known.

    Args:
        candidate: of the ranking, or one of its ways with another interval.
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
    """Return what a way does to the result, in words: when it is where one machine would end, and the loss it may cost.

    Empty where it is as good as one machine that sees the same samples.
    """
    single, words = best_single(planning.ranking), []
    seconds, after = candidate.steps * candidate.step, planning.same_loss_seconds(candidate)
    if single is not None and not candidate.choice.alone and 0 < after < _LEARNS_LESS * seconds:
        words.append(f"After {duration_text(after)} it is where {single.choice.members[0]} alone would end.")
    elif single is not None and not candidate.choice.alone and _LEARNS_LESS * after > seconds:
        less = f"It has then learnt a little less than {single.choice.members[0]} alone would"
        words.append(f"{less}; for as much it needs {duration_text(after)}.")
    if candidate.loss_increase:
        words.append(f"The final loss may be {100 * candidate.loss_increase:.1f} % higher.")
    return " ".join(words)


def together_text(members: Sequence[str]) -> str:
    """Who trains: ``desk alone``, ``desk and anna``, ``12 machines``."""
    if len(members) == 1:
        return f"{members[0]} alone"
    if len(members) > 3:
        return counted(len(members), "machine")
    return f"{', '.join(members[:-1])} and {members[-1]}"
