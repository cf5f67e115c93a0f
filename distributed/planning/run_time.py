"""The predicted time of a run, compared with that of the best machine alone, in the words used everywhere.

For plans, candidates, and runs in progress and at their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from distributed.planning.documents.document import Candidate, Planning
from profiles.errors import counted
from profiles.quantities import duration_text, machine_text, share_text
from training.records.plan import MemberPlan, RunPlan

FIXED_STEPS = "max_steps is fixed: more machines see more samples in the same number of steps, and do not end sooner"
_NOTICEABLE_RATIO = 0.95
"""Ratio of two times below which the difference is mentioned."""
SLOWER_BELOW = 0.97
"""Speed-up over the best single machine below which that machine alone is better; rates are known to a few per cent."""


@dataclass(frozen=True)
class RunTime:
    """The time of a run, and of the best machine alone, as they are predicted before it starts; in seconds.

    It is the time that :mod:`training.records.attempts` counts: from when training begins to the end, with evaluations.
    """

    seconds: float = 0.0
    """0: not predicted."""
    alone: str = ""
    """The best single machine; empty if the run is on it, or none was predicted."""
    alone_seconds: float = 0.0
    alone_rate: float = 0.0
    """Its samples/s."""
    fixed_steps: bool = False
    """Whether a group takes as many steps as one machine."""

    def __str__(self) -> str:
        takes = f"This run takes {duration_text(self.seconds)}" if self.seconds else "The time of this run is not known"
        if not self.alone:
            return takes
        alone, seconds = f"{machine_text(self.alone)} alone", duration_text(self.alone_seconds)
        if not self.is_no_faster:
            return f"{takes}; {alone} would take {seconds}"
        longer = self.seconds * SLOWER_BELOW > self.alone_seconds
        return f"{takes}, {'longer than' if longer else 'about as long as'} {alone} ({seconds})"

    @property
    def is_no_faster(self) -> bool:
        """Whether the best machine alone is about as fast, or faster."""
        return bool(self.alone) and self.seconds > SLOWER_BELOW * self.alone_seconds > 0

    @property
    def sentences(self) -> tuple[str, ...]:
        """The time of the run, and why a group does not end sooner, or what to do then."""
        alone = f"{machine_text(self.alone)} alone"
        if not self.is_no_faster:
            return (f"{self}.",)
        advice = f"Train on {alone}, or connect the machines faster"
        return (f"{self}.", f"{FIXED_STEPS if self.fixed_steps else advice}.")

    @property
    def beside(self) -> str:
        """The times, to be shown beside the actual one: ``1:24 promised; pc alone 1:50``."""
        promised = f"{duration_text(self.seconds)} promised" if self.seconds else ""
        alone = f"{machine_text(self.alone)} alone {duration_text(self.alone_seconds)}" if self.alone else ""
        return "; ".join(filter(None, (promised, alone)))

    def document(self) -> dict[str, float | str | bool]:
        """Return the times as a JSON document."""
        return asdict(self)


def took_text(seconds: float | None, time: RunTime | None = None) -> str:
    """Return the time of a run beside what was promised: ``trained 1:30 (1:24 promised; pc alone 1:50)``."""
    return f"trained {duration_text(seconds)}{f' ({time.beside})' if time is not None else ''}"


def best_single(ranking: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate of one machine that fits; ``None`` if none was predicted."""
    singles = [
        candidate
        for candidate in ranking
        if candidate.choice.alone and candidate.fits and candidate.samples_per_second > 0
    ]
    return max(singles, key=lambda candidate: candidate.samples_per_second, default=None)


def run_time(planning: Planning, candidate: Candidate | None) -> RunTime | None:
    """Return the time of a run with a candidate; ``None`` if nothing is known of it.

    Args:
        candidate: one of the ranking, possibly with another interval.
    """
    single = best_single(planning.ranking)
    if candidate is None or (single is None and not candidate.seconds):
        return None
    if single is None or single.choice.members == candidate.choice.members:
        return RunTime(candidate.seconds)
    fixed = planning.job.steps > 0 and not candidate.choice.alone
    return RunTime(candidate.seconds, single.choice.members[0], single.seconds, single.samples_per_second, fixed)


def promised_time(planning: Planning | None) -> RunTime | None:
    """Return the time of a run that follows a plan, as its plan promises it; ``None``: nothing was predicted."""
    return run_time(planning, planning.best) if planning else None


def steps_text(candidate: Candidate) -> str:
    """Return the steps of a run and their samples: ``80 steps of 24 samples``; ``of up to 24``, where those that end an
    epoch are smaller."""
    batch = counted(candidate.global_batch, "sample")
    return f"{counted(candidate.steps, 'step')} of {'up to ' if candidate.has_smaller_steps else ''}{batch}"


def quality_text(planning: Planning, candidate: Candidate) -> str:
    """Return the effect of a candidate on the result, in words: the expected increase of the loss, and when it reaches
    the final loss of one machine.

    Empty if it learns about as much as one machine, or reaches that sooner by training longer: then there is nothing
    to decide.
    """
    single, words = best_single(planning.ranking), []
    seconds, after = candidate.seconds, planning.same_loss_seconds(candidate)
    if single is not None and not candidate.choice.alone:
        alone = f"{machine_text(single.choice.members[0])} alone"
        if 0 < after < _NOTICEABLE_RATIO * seconds:
            words.append(f"After {duration_text(after)} the model is as good as that of {alone} at its end.")
        elif after > single.seconds > 0 and after > seconds:
            longer = f"{duration_text(after)} instead of {duration_text(seconds)}"
            words.append(f"To be as good as the model of {alone}, which is faster, this run must train {longer}.")
    if candidate.loss_increase:
        words.insert(0, f"The final loss may be {share_text(candidate.loss_increase)} higher.")
    return " ".join(words)


def stages_text(names: Sequence[str], blocks: Sequence[tuple[int, int]]) -> str:
    """Return which layers lie where: ``The model is divided over a, b and c: layers 1-12, 13-20, 21-28``.

    Args:
        names: of the devices.
        blocks: of each of them, the first one from 0 and the first one of the next device; empty: not known.
    """
    stages = len(names) // (divided_members(blocks) or 1)
    groups = [_and(names[first : first + stages]) for first in range(0, len(names), stages)]
    return _divided(groups, blocks[:stages])


def divided_members(blocks: Sequence[tuple[int, int]]) -> int:
    """Return how many members hold a divided model; 0: it is not divided.

    Args:
        blocks: see :class:`~distributed.planning.documents.document.Choice`.
    """
    return sum(start == 0 for start, _ in blocks)


def _divided(groups: Sequence[str], blocks: Sequence[tuple[int, int]]) -> str:
    """Return which layers the devices of each of these members hold: all have the same cut."""
    over = f"The model is divided over {groups[0]}"
    if len(groups) > 1:
        over = f"{counted(len(groups), 'member')} hold the model, each divided over its devices ({'; '.join(groups)})"
    ranges = ", ".join(f"{start + 1}-{end}" if end > start + 1 else str(end) for start, end in blocks)
    return f"{over}: layers {ranges}" if ranges else f"{over}, in about equal parts"


def _and(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def plan_stages_text(plan: RunPlan) -> str:
    """Return which layers of a plan's members lie where, or that each device holds a part of all."""

    def names(member: MemberPlan) -> list[str]:
        is_one_each = all(member.machines) and len(member.machines) == len(member.devices)
        processes = [plan.process(rank) for rank in plan.processes_of(member.rank)]
        return [process.device.machine if is_one_each else process.name for process in processes]

    groups = [_and(names(member)) for member in plan.members]
    if plan.profile.run.layout == "shard":
        return f"{'; '.join(groups)}: a shard of every weight on each"
    if plan.profile.run.layout == "tensor":
        return f"{'; '.join(groups)}: a slice of every matrix on each"
    return _divided(groups, [device.blocks for device in plan.members[0].devices if device.blocks])


def together_text(members: Sequence[str], blocks: Sequence[tuple[int, int]] = ()) -> str:
    """Return the members as text: ``desk alone``, ``desk and anna``, ``12 machines``.

    Args:
        blocks: of a divided model, see :class:`~distributed.planning.documents.document.Choice`.
    """
    if blocks:
        return stages_text(members, blocks)
    if len(members) == 1:
        return f"{machine_text(members[0])} alone"
    if len(members) > 3:
        return counted(len(members), "machine")
    return f"{', '.join(members[:-1])} and {members[-1]}"
