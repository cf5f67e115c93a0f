"""What a report shows of a run's events: curves over the steps and totals of every member. Pure.

A run that was resumed repeats the steps after its snapshot: curves hold the newest version of every step, totals hold
everything that was really done and sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple, TypeVar

from app.run_state import Notice, RunState, apply
from training.events import (
    ErrorEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RunEvent,
    StepEvent,
    SyncEvent,
    WarningEvent,
)

POINTS = 600
"""A curve has at most this many points; every point keeps the smallest and the largest value it stands for."""
NOTICES = 300
MARKS = ("joined", "lost", "left", "failed")


class Step(NamedTuple):
    """What is kept of one step of one member."""

    step: int
    loss: float
    weight: float
    learning_rate: float
    samples: int
    seconds: float


@dataclass
class MemberTotals:
    """Everything a member did, over all attempts. Seconds and bytes."""

    rank: int
    steps: int = 0
    samples: int = 0
    compute: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    step_bytes: tuple[int, int] = (0, 0)
    sync_bytes: tuple[int, int] = (0, 0)
    syncs: int = 0
    sync_seconds: float = 0.0

    @property
    def bytes(self) -> tuple[int, int]:
        """Sent and received; some strategies count them by step, others by synchronisation."""
        return max(self.step_bytes, self.sync_bytes)

    def add_step(self, event: StepEvent) -> None:
        self.steps += 1
        self.samples += event.samples
        self.compute += event.compute
        self.wait += event.wait
        self.transfer += event.transfer
        sent, received = self.step_bytes
        self.step_bytes = (sent + event.bytes_sent, received + event.bytes_received)

    def add_sync(self, event: SyncEvent) -> None:
        self.syncs += 1
        self.sync_seconds += event.seconds
        sent, received = self.sync_bytes
        self.sync_bytes = (sent + event.bytes_sent, received + event.bytes_received)


@dataclass(frozen=True)
class Point:
    """One point of the curves: some steps of all members."""

    step: int
    """The last one."""
    loss: float | None
    low: float | None
    high: float | None
    learning_rate: float
    samples_per_second: float


@dataclass(frozen=True)
class Mark:
    """Something that happened to a member, at the step the run was at."""

    step: int
    rank: int
    status: str
    message: str


class Synchronisation(NamedTuple):
    """What is kept of one synchronisation of one member."""

    step: int
    seconds: float
    wait: float


class Evaluation(NamedTuple):
    """What is kept of one evaluation of one split."""

    step: int
    loss: float | None
    metrics: Mapping[str, float]


_Numbered = TypeVar("_Numbered", Step, Synchronisation, Evaluation)


@dataclass
class Record:
    """All that a report needs of the events."""

    state: RunState = field(default_factory=RunState)
    steps: dict[int, list[Step]] = field(default_factory=dict)
    """By rank."""
    totals: dict[int, MemberTotals] = field(default_factory=dict)
    syncs: dict[int, list[Synchronisation]] = field(default_factory=dict)
    """By rank."""
    evaluations: dict[str, list[Evaluation]] = field(default_factory=dict)
    """By split."""
    marks: list[Mark] = field(default_factory=list)
    notices: list[tuple[str, Notice]] = field(default_factory=list)
    """``error`` or ``warning``, in the order in which they came; at most ``NOTICES``."""
    dropped_notices: int = 0
    attempts: int = 0

    def add(self, event: Event) -> None:
        """Take one event in."""
        before, self.state = self.state, apply(self.state, event)
        match event:
            case StepEvent() if event.member is not None:
                self._totals(event.member).add_step(event)
                _renew(self.steps.setdefault(event.member, []), _step(event))
            case SyncEvent() if event.member is not None:
                self._totals(event.member).add_sync(event)
                sync = Synchronisation(event.step, event.seconds, event.wait)
                _renew(self.syncs.setdefault(event.member, []), sync)
            case EvaluationEvent():
                result = Evaluation(event.step, event.loss, event.metrics)
                _renew(self.evaluations.setdefault(event.split, []), result)
            case MemberEvent() if event.status in MARKS and event.member is not None:
                if self.state.members[event.member].status == event.status:  # else it follows from what was said before
                    self._mark(Mark(before.step, event.member, event.status, event.message))
            case WarningEvent() | ErrorEvent():
                self._notice(event)
            case RunEvent():
                self.attempts += event.status == "starting"
            case _:
                pass

    def _mark(self, mark: Mark) -> None:
        """Remember it, unless it was said before (a member and the hub may both say it) or is how every run goes."""
        last = next((known.status for known in reversed(self.marks) if known.rank == mark.rank), "")
        usual = {"joined": mark.step == 0, "left": mark.step == self.state.total_steps}
        if mark.status != last and not usual.get(mark.status, False):
            self.marks.append(mark)

    def _totals(self, rank: int) -> MemberTotals:
        return self.totals.setdefault(rank, MemberTotals(rank))

    def _notice(self, event: WarningEvent | ErrorEvent) -> None:
        if len(self.notices) >= NOTICES:
            self.dropped_notices += 1
            return
        hint = event.hint if isinstance(event, ErrorEvent) else ""
        rank = -1 if event.member is None else event.member
        self.notices.append((event.kind, Notice(event.time, rank, event.message, hint)))


def record_of(events: Iterable[Event]) -> Record:
    """Return the record of a run's events."""
    record = Record()
    for event in events:
        record.add(event)
    return record


def _step(event: StepEvent) -> Step:
    seconds = event.compute + event.wait
    return Step(event.step, event.loss, event.weight, event.learning_rate, event.samples, seconds)


def _renew(items: list[_Numbered], new: _Numbered) -> None:
    """Append what comes next; what is done again replaces what it repeats."""
    while items and items[-1].step >= new.step:
        items.pop()
    items.append(new)


def curve(record: Record, points: int = POINTS) -> list[Point]:
    """Return the curves over the steps in at most ``points`` points."""
    last = max((steps[-1].step for steps in record.steps.values() if steps), default=0)
    width = max(1, -(-last // points))
    buckets: dict[int, dict[int, list[Step]]] = {}
    for rank, steps in record.steps.items():
        for step in steps:
            buckets.setdefault((step.step - 1) // width, {}).setdefault(rank, []).append(step)
    return [_point(buckets[number]) for number in sorted(buckets)]


def _point(members: Mapping[int, Sequence[Step]]) -> Point:
    every = [step for steps in members.values() for step in steps]
    newest = max(every, key=lambda step: step.step)
    losses = [step for step in every if isfinite(step.loss)]
    weight = sum(step.weight for step in losses)
    mean = sum(step.loss * step.weight for step in losses) / weight if weight > 0 else None
    return Point(
        step=newest.step,
        loss=mean,
        low=min((step.loss for step in losses), default=None),
        high=max((step.loss for step in losses), default=None),
        learning_rate=newest.learning_rate,
        samples_per_second=sum(_pace(steps) for steps in members.values()),
    )


def _pace(steps: Sequence[Step]) -> float:
    """Samples a second of training time: evaluations and snapshots between the steps do not count."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.samples for step in steps) / seconds if seconds > 0 else 0.0
