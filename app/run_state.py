"""What a run looks like right now: a pure function of its events.

``state = apply(state, event)`` is all there is; the live display, ``runs show``, the dry run and the dashboard are
readers of the same :class:`RunState`. Members' events may be merged in any order as long as each member's own order
is kept: whatever is shared between members (evaluations, warnings, the last snapshot) is chosen by rules that do not
look at who came first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from app.member_state import MemberState, OfMember, advance
from training.events import (
    ErrorEvent,
    EvaluationEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    WarningEvent,
)

KEPT_WARNINGS = 50


@dataclass(frozen=True)
class Notice:
    """A warning or an error."""

    time: float
    member: int
    """-1 for the run itself."""
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Result:
    """One evaluation of one split."""

    step: int
    time: float
    loss: float | None
    metrics: Mapping[str, float]
    samples: int
    seconds: float

    @property
    def order(self) -> tuple[object, ...]:
        """Position among the evaluations of a split; the same for every order of arrival."""
        return (self.step, self.time, self.samples, self.seconds, repr((self.loss, sorted(self.metrics.items()))))


@dataclass(frozen=True)
class SplitResults:
    """First, last and best evaluation of one split. Best: lowest WER, or loss where there is no WER."""

    first: Result
    last: Result
    best: Result


@dataclass(frozen=True)
class RunState:
    """A run."""

    status: str = "starting"
    message: str = ""
    started: float | None = None
    """When the run started, or went on after a resume."""
    updated: float | None = None
    """Time of the newest event."""
    total_steps: int | None = None
    members: Mapping[int, MemberState] = field(default_factory=dict)
    evaluations: Mapping[str, SplitResults] = field(default_factory=dict)
    snapshot_step: int | None = None
    snapshot_path: str = ""
    warnings: tuple[Notice, ...] = ()
    """The newest ones, oldest first."""
    errors: tuple[Notice, ...] = ()

    @property
    def resume_step(self) -> int | None:
        """Newest step of which every member that ever trained has a snapshot; ``None``: there is none."""
        steps = [member.snapshot_step for member in self.members.values() if member.step or member.snapshot_step]
        return None if None in steps else min((step for step in steps if step is not None), default=None)

    @property
    def step(self) -> int:
        """Steps that all members still at work have done."""
        working = [member.step for member in self.members.values() if member.active]
        return min(working) if working else max((member.step for member in self.members.values()), default=0)

    @property
    def samples_per_second(self) -> float:
        return sum(member.samples_per_second for member in self.members.values() if member.active)

    @property
    def seconds_left(self) -> float | None:
        """Estimate for the steps that are left, at the pace of the slowest member in its window."""
        paces = [m.seconds_per_step for m in self.members.values() if m.active and m.seconds_per_step]
        if self.total_steps is None or not paces:
            return None
        return max(0, self.total_steps - self.step) * max(pace for pace in paces if pace)

    @property
    def weights_differ(self) -> bool:
        """Whether two members report different weights after the same synchronisation."""
        hashes: dict[tuple[int, int], str] = {}
        syncs = [member.last_sync for member in self.members.values()]
        for sync in syncs:
            if (
                sync
                and sync.weight_hash
                and hashes.setdefault((sync.step, sync.round), sync.weight_hash) != (sync.weight_hash)
            ):
                return True
        return False


def reduce_events(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """Apply ``events`` one after the other."""
    return reduce(apply, events, state or RunState())


def apply(state: RunState, event: Event) -> RunState:
    """Return the state after ``event``; never raises, whatever the order of events."""
    state = dataclasses.replace(state, updated=max(event.time, state.updated or event.time))
    match event:
        case RunEvent():
            return _run(state, event)
        case EvaluationEvent():
            return _evaluation(state, event)
        case SnapshotEvent():
            return _with_member(_snapshot(state, event), event)
        case WarningEvent():
            return dataclasses.replace(state, warnings=_newest(state.warnings, _notice(event)))
        case ErrorEvent():
            errors = _newest(state.errors, dataclasses.replace(_notice(event), hint=event.hint))
            return _with_member(dataclasses.replace(state, errors=errors), event)
        case MemberEvent() | ProgressEvent() | StepEvent() | SyncEvent() | MachineEvent():
            return _with_member(state, event)
        case _:
            return state


def _run(state: RunState, event: RunEvent) -> RunState:
    return dataclasses.replace(
        state,
        status=event.status,
        message=event.message,
        started=event.time if event.status == "starting" or state.started is None else state.started,
        total_steps=event.total_steps if event.total_steps is not None else state.total_steps,
    )


def _snapshot(state: RunState, event: SnapshotEvent) -> RunState:
    if (event.step, event.path) <= (
        state.snapshot_step if state.snapshot_step is not None else -1,
        state.snapshot_path,
    ):
        return state
    return dataclasses.replace(state, snapshot_step=event.step, snapshot_path=event.path)


def _notice(event: WarningEvent | ErrorEvent) -> Notice:
    return Notice(event.time, -1 if event.member is None else event.member, event.message)


def _newest(notices: tuple[Notice, ...], new: Notice) -> tuple[Notice, ...]:
    return tuple(sorted((*notices, new), key=dataclasses.astuple)[-KEPT_WARNINGS:])


def _evaluation(state: RunState, event: EvaluationEvent) -> RunState:
    result = Result(event.step, event.time, event.loss, event.metrics, event.samples, event.seconds)
    known = state.evaluations.get(event.split)
    results = (result,) if known is None else (known.first, known.last, known.best, result)
    ordered = sorted(results, key=lambda one: one.order)
    best = min(ordered, key=_badness)
    split = SplitResults(first=ordered[0], last=ordered[-1], best=best)
    evaluations = {**state.evaluations, event.split: split}
    return dataclasses.replace(state, evaluations=dict(sorted(evaluations.items())))


def _badness(result: Result) -> tuple[object, ...]:
    value = result.metrics.get("wer", result.loss)
    return (value if value is not None and math.isfinite(value) else math.inf, result.order)


def _with_member(state: RunState, event: OfMember) -> RunState:
    if event.member is None:
        return state
    member = state.members.get(event.member, MemberState(event.member))
    members = {**state.members, event.member: advance(member, event)}
    return dataclasses.replace(state, members=dict(sorted(members.items())))
