"""What has happened in a run, in words: launches, evaluations, snapshots, requests, machines lost and back.

Bounded, and the same whatever the order in which the members' events were merged: of every kind the earliest and the
newest ones by their own time are kept.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.member_state import GONE, MemberState
from training.events import (
    ErrorEvent,
    EvaluationEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    TimingEvent,
    UnknownEvent,
    WarningEvent,
)

FIRST, NEWEST = 40, 160
Kind = Literal["run", "machine", "lost", "back", "error", "warning", "evaluation", "snapshot", "request"]


class Happening(NamedTuple):
    """One line of the list. They sort by time."""

    time: float
    member: int
    """-1: the run itself."""
    kind: Kind
    text: str
    hint: str = ""
    step: int = -1
    """-1: none is known."""


@dataclass(frozen=True)
class Chronicle:
    """The earliest and the newest of one kind."""

    first: tuple[Happening, ...] = ()
    newest: tuple[Happening, ...] = ()
    count: int = 0

    @property
    def kept(self) -> tuple[Happening, ...]:
        """What is kept, in order, without doubles where both ends meet."""
        spare = len(self.first) + len(self.newest) - self.count
        return (*self.first, *self.newest[max(0, spare) :])

    def with_one(self, new: Happening) -> Chronicle:
        """Return the chronicle with one more."""
        first, newest = _placed(self.first, new), _placed(self.newest, new)
        return Chronicle(first[:FIRST], newest[-NEWEST:], self.count + 1)


Chronicles = Mapping[str, Chronicle]


def noted(chronicles: Chronicles, new: Happening | None) -> Chronicles:
    """Return the chronicles with one more happening."""
    if new is None:
        return chronicles
    every = {**chronicles, new.kind: chronicles.get(new.kind, Chronicle()).with_one(new)}
    return every if new.kind in chronicles else dict(sorted(every.items()))


def in_order(chronicles: Chronicles) -> list[Happening]:
    """Return everything that is kept, oldest first."""
    return sorted(happening for chronicle in chronicles.values() for happening in chronicle.kept)


def happening(event: Event, member: MemberState | None) -> Happening | None:
    """Return what an event means for a person; most mean nothing by themselves.

    Args:
        member: as it was before the event.
    """
    rank = -1 if event.member is None else event.member
    match event:
        case RunEvent():
            return Happening(event.time, rank, "run", _run_text(event))
        case MemberEvent():
            return _of_member(event, rank, member)
        case EvaluationEvent():
            text = ", ".join(_metric_text(name, value) for name, value in sorted(_all_metrics(event).items()))
            return Happening(event.time, rank, "evaluation", f"{event.split}: {text}", step=event.step)
        case SnapshotEvent():
            return Happening(event.time, rank, "snapshot", f"snapshot of step {event.step} written", step=event.step)
        case WarningEvent():
            return Happening(event.time, rank, "warning", event.message, step=_step(event.step))
        case ErrorEvent():
            return Happening(event.time, rank, "error", event.message, event.hint, _step(event.step))
        case RequestEvent():
            about = f" {event.machine}" if event.machine else ""
            why = f": {event.message}" if event.message else ""
            return Happening(event.time, rank, "request", f"{event.action}{about} {event.outcome}{why}")
        case ProgressEvent() | StepEvent() | SyncEvent() | MachineEvent() | TimingEvent() | UnknownEvent():
            return None


def _run_text(event: RunEvent) -> str:
    return f"run {event.status}" + (f": {event.message}" if event.message else "")


def _of_member(event: MemberEvent, rank: int, before: MemberState | None) -> Happening | None:
    name = event.name or (before.name if before else "") or f"member {rank}"
    if before is not None and before.status == event.status:
        return None  # the hub and the member both say it
    if event.status == "left" and before is not None and before.status in ("done", "lost", "failed"):
        return None
    why = f": {event.message}" if event.message else ""
    if event.status in ("lost", "failed"):
        if before is not None and before.status in ("lost", "failed"):
            return None
        return Happening(event.time, rank, "lost", f"{name} {event.status}{why}")
    if event.status in ("started", "joined", "ready") and before is not None and before.status in GONE:
        return Happening(event.time, rank, "back", f"{name} is back")
    where = f" on {event.device}" if event.device else ""
    return Happening(event.time, rank, "machine", f"{name} {event.status}{where}{why}")


def _all_metrics(event: EvaluationEvent) -> dict[str, float]:
    return {**event.metrics, **({"loss": event.loss} if event.loss is not None else {})}


def _metric_text(name: str, value: float) -> str:
    return f"{name.upper()} {value * 100:.1f} %" if name in ("wer", "cer") else f"{name} {value:.4g}"


def _step(step: int | None) -> int:
    return -1 if step is None else step


def _placed(row: tuple[Happening, ...], new: Happening) -> tuple[Happening, ...]:
    place = bisect.bisect_right(row, new)
    return (*row[:place], new, *row[place:])
