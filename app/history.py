"""What has happened in a run, in words: launches, evaluations, snapshots, requests, machines lost and back.

Bounded, and the same whatever the order in which the members' events were merged: of every kind the earliest and the
newest ones by their own time are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from app.member_state import GONE, PRESENT_STATUSES, TROUBLE, MemberState
from app.metrics import metric_label, metric_text, metrics_of
from app.pair_paths import route_changes
from training.events import (
    ErrorEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    WarningEvent,
    WaysEvent,
)

FIRST, NEWEST = 40, 160
KEPT_NOTICES = 50
"""Warnings, and errors, that a list of them has."""
_RUN = {
    "starting": "the run is starting",
    "running": "training is under way",
    "paused": "training is paused",
    "completed": "the run completed",
    "failed": "the run failed",
    "cancelled": "the run was stopped",
}
Kind = Literal["run", "machine", "lost", "back", "error", "warning", "evaluation", "snapshot", "request", "path"]


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
    status: str = ""
    """Of the member, where it is told."""
    why: str = ""
    """What its teller gave as the reason of that status; the text has it too."""

    @property
    def came(self) -> bool:
        """Whether a machine came to a run that was under way, or came back to it."""
        return self.kind == "back" or self.status == "joined"


@dataclass(frozen=True)
class Chronicle:
    """The earliest and the newest of one kind."""

    earliest: tuple[Happening, ...] = ()
    newest: tuple[Happening, ...] = ()
    count: int = 0

    @property
    def entries(self) -> tuple[Happening, ...]:
        """What is kept, in order, without doubles where both ends meet."""
        spare = len(self.earliest) + len(self.newest) - self.count
        return (*self.earliest, *self.newest[max(0, spare) :])

    def with_entry(self, new: Happening) -> Chronicle:
        """Return the chronicle with one more."""
        earliest, newest = sorted((*self.earliest, new)), sorted((*self.newest, new))
        return Chronicle(tuple(earliest[:FIRST]), tuple(newest[-NEWEST:]), self.count + 1)


Chronicles = Mapping[str, Chronicle]


def with_entry(chronicles: Chronicles, new: Happening | None) -> Chronicles:
    """Return the chronicles with one more happening."""
    if new is None:
        return chronicles
    updated = {**chronicles, new.kind: chronicles.get(new.kind, Chronicle()).with_entry(new)}
    return updated if new.kind in chronicles else dict(sorted(updated.items()))


def newest(chronicles: Chronicles, kind: Kind) -> tuple[Happening, ...]:
    """Return the newest of one kind, oldest first."""
    return chronicles.get(kind, Chronicle()).newest[-KEPT_NOTICES:]


def chronological(chronicles: Chronicles) -> list[Happening]:
    """Return everything that is kept, oldest first."""
    return sorted(happening for chronicle in chronicles.values() for happening in chronicle.entries)


def timeline_entry(event: Event, member: MemberState | None) -> Happening | None:
    """Return what an event means for a person; most mean nothing by themselves.

    Args:
        member: as it was before the event.
    """
    entry = partial(Happening, event.time, -1 if event.member is None else event.member)
    match event:
        case RunEvent():
            return entry("run", with_reason(_RUN[event.status], "" if event.message == "stopped" else event.message))
        case MemberEvent():
            news = member_news(event, member)
            step = member.step if member and member.step and event.status in GONE else -1  # 0: it has just come back
            return entry(*news, step=step, status=event.status, why=event.message) if news else None
        case EvaluationEvent():
            text = ", ".join(
                f"{metric_label(name)} {metric_text(name, value)}" for name, value in metrics_of(event).items()
            )
            return entry("evaluation", f"{event.split}: {text}", step=event.step)
        case SnapshotEvent():
            return entry("snapshot", f"snapshot of step {event.step} written", step=event.step)
        case WarningEvent():
            return entry("warning", event.message, step=-1 if event.step is None else event.step)
        case ErrorEvent():
            return entry("error", event.message, event.hint, -1 if event.step is None else event.step)
        case WaysEvent():
            changed_routes = route_changes(event, member)
            return entry("path", changed_routes) if changed_routes else None
        case RequestEvent():
            action = " ".join(word for word in (event.action, event.machine, event.outcome) if word)
            return entry("request", with_reason(action, event.message))
        case _:
            return None


def with_reason(statement: str, reason: str) -> str:
    """``what: why``, or what alone where nobody said why."""
    return f"{statement}: {reason}" if reason else statement


def member_news(event: MemberEvent, before: MemberState | None) -> tuple[Kind, str] | None:
    """Return what a member's new state is to be told as; ``None``: it was told, or follows from what was.

    Member and coordinator say that it joined or left, and a loss is followed by what it led to: whoever shows a run
    tells each once, by this rule.
    """
    name = event.name or (before.label if before else f"member {event.member}")
    old_status = before.status if before is not None else ""
    if old_status == event.status:
        return None
    if event.status in TROUBLE:
        return None if old_status in TROUBLE else ("lost", with_reason(f"{name} {event.status}", event.message))
    if event.status == "left" and old_status in ("done", *TROUBLE):
        return None
    if event.status in PRESENT_STATUSES and old_status in GONE:
        return "back", f"{name} is back"
    on_device = f" on {event.device}" if event.device else ""
    return "machine", with_reason(f"{name} {event.status}{on_device}", event.message)
