"""The timeline of a run, in words: launches, evaluations, snapshots, requests, machines lost and back.

It is bounded, and does not depend on the order in which the members' events were merged: of every kind, the earliest
and the newest entries by their own times are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from app.run_view.member_state import GONE, TROUBLE, MemberState
from app.run_view.metrics import result_text
from app.run_view.pair_paths import route_changes
from training.records.events import (
    ElectionEvent,
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
"""Entries of one kind that are kept from the beginning, and from the end."""
KEPT_NOTICES = 50
"""Most entries in a list of warnings, or of errors."""
ENDINGS = {"completed": "completed", "failed": "failed", "cancelled": "was stopped"}
_RUN = {
    "starting": "the run is starting",
    "running": "training is under way",
    "paused": "training is paused",
    **{status: f"the run {ending}" for status, ending in ENDINGS.items()},
}
Kind = Literal["run", "machine", "lost", "back", "error", "warning", "evaluation", "snapshot", "request", "path"]


class TimelineEntry(NamedTuple):
    """One line of the timeline. Entries sort by time."""

    time: float
    member: int
    """-1: the run itself."""
    kind: Kind
    text: str
    hint: str = ""
    step: int = -1
    """-1: unknown."""
    status: str = ""
    """Of the member, where the event has one."""
    why: str = ""
    """Reason that was reported for that status; it is part of the text or the hint too."""
    awaited: str = ""
    """The machine that the start waits for: the entry holds until that joins."""
    request: str = ""
    """Id of the request that it answers."""
    outcome: str = ""
    """Of that request: ``accepted``, ``done`` or ``refused``."""

    @property
    def is_arrival(self) -> bool:
        """Whether a machine joined a run that was under way, or came back to it."""
        return self.kind == "back" or self.status == "joined"

    @property
    def word(self) -> str:
        """What became of the machine: ``lost``, ``left``, ``failed``, ``joined`` or ``back``."""
        return "back" if self.kind == "back" else self.status or "failed"


@dataclass(frozen=True)
class TimelineTrack:
    """The earliest and the newest entries of one kind."""

    earliest: tuple[TimelineEntry, ...] = ()
    newest: tuple[TimelineEntry, ...] = ()
    count: int = 0
    """Of all entries, also of those that were dropped."""

    @property
    def entries(self) -> tuple[TimelineEntry, ...]:
        """The kept entries in order, each once."""
        overlap = len(self.earliest) + len(self.newest) - self.count
        return (*self.earliest, *self.newest[max(0, overlap) :])

    def with_entry(self, new: TimelineEntry) -> TimelineTrack:
        """Return the track with one more entry."""
        earliest, newest = sorted((*self.earliest, new)), sorted((*self.newest, new))
        return TimelineTrack(tuple(earliest[:FIRST]), tuple(newest[-NEWEST:]), self.count + 1)


RunTimeline = Mapping[str, TimelineTrack]
"""Tracks by kind."""


def with_entry(timeline: RunTimeline, new: TimelineEntry | None) -> RunTimeline:
    """Return the timeline with one more entry."""
    if new is None:
        return timeline
    updated = {**timeline, new.kind: timeline.get(new.kind, TimelineTrack()).with_entry(new)}
    return updated if new.kind in timeline else dict(sorted(updated.items()))


def newest(timeline: RunTimeline, kind: Kind) -> tuple[TimelineEntry, ...]:
    """Return the newest entries of one kind, oldest first."""
    return timeline.get(kind, TimelineTrack()).newest[-KEPT_NOTICES:]


def chronological(timeline: RunTimeline) -> list[TimelineEntry]:
    """Return all entries that are kept, oldest first."""
    return sorted(entry for track in timeline.values() for entry in track.entries)


def timeline_entry(event: Event, member: MemberState | None) -> TimelineEntry | None:
    """Return the entry that an event makes; ``None``: most events make none.

    Args:
        member: as it was before the event.
    """
    entry = partial(TimelineEntry, event.time, -1 if event.member is None else event.member)
    match event:
        case RunEvent():
            return entry("run", run_sentence(event.status, event.message))
        case MemberEvent():
            news = member_news(event, member)
            step = member.step if member and member.step and event.status in GONE else -1  # 0: it has just come back
            hint = event.message if event.status == "started" else ""  # the number of its process
            return entry(*news, hint, step, event.status, event.message) if news else None
        case EvaluationEvent():
            return entry("evaluation", result_text(event), step=event.step)
        case SnapshotEvent():
            return entry("snapshot", snapshot_sentence(event.step), step=event.step)
        case WarningEvent() if event.unreached and member is not None and event.unreached == member.unreached:
            return None  # it tries again and again
        case WarningEvent():
            step = -1 if event.step is None else event.step
            return entry("warning", event.message, step=step, awaited=event.awaited, why=event.ended_by)
        case ElectionEvent():
            return entry("warning", event.message)
        case ErrorEvent():
            return entry("error", event.message, event.hint, -1 if event.step is None else event.step)
        case WaysEvent():
            changed_routes = route_changes(event, member)
            return entry("path", changed_routes) if changed_routes else None
        case RequestEvent():
            action = " ".join(word for word in (event.action, event.machine, event.outcome) if word)
            answer = with_reason(action, event.message)
            return entry("request", answer, request=event.request, outcome=event.outcome)
        case _:
            return None


def entry_text(entry: TimelineEntry, names: Callable[[int], str]) -> str:
    """Return the text of an entry, with machine and step where it lacks them."""
    name = names(entry.member) if entry.member >= 0 and entry.kind not in ("evaluation", "run") else ""
    machine = f"{name}: " if name and not _names(entry.text, name) else ""
    at = f" (step {entry.step})" if entry.step >= 0 and entry.kind in ("evaluation", "warning", "error") else ""
    return f"{machine}{entry.text}{at}"


def _names(text: str, name: str) -> bool:
    """Whether a text names a machine, or one of those of a member; one letter counts only where it is no other word."""
    if len(name) > 1:
        return name in text or ("+" in name and any(_names(text, part) for part in name.split("+")))
    verbs = (" is ", " lost", " ended", " has ", " comes ", " cannot ", " stays ", " does ")
    beginnings = tuple(f"{name}{follows}" for follows in (": ", "-stage-", *verbs))
    return text.startswith(beginnings) or f"machine {name}" in text


def run_sentence(status: str, reason: str = "") -> str:
    """Return the sentence of a run's new status: ``the run failed: no space left``."""
    return with_reason(_RUN[status], "" if reason == "stopped" else reason)


def snapshot_sentence(step: int) -> str:
    """Return the sentence of a snapshot."""
    return f"snapshot of step {step} written"


def with_reason(statement: str, reason: str) -> str:
    """Return ``statement: reason``, or the statement alone where the reason is empty."""
    return f"{statement}: {reason}" if reason else statement


def member_news(event: MemberEvent, before: MemberState | None) -> tuple[Kind, str] | None:
    """Return kind and text of the entry for a member's new status; ``None``: it repeats or follows from the old one.

    The member and the coordinator both report that it joined or left, and a loss is followed by its consequences: every
    display tells each change once, by this rule. A member whose process has started again is back when it is ready:
    before, it joins and gets the state.
    """
    name = event.name or (before.label if before else f"member {event.member}")
    old_status = before.status if before is not None else ""
    if old_status == event.status:
        return None
    if event.status in TROUBLE:
        return None if old_status in TROUBLE else ("lost", with_reason(f"{name} {event.status}", event.message))
    if event.status == "left" and old_status in ("done", *TROUBLE):
        return None
    is_returning = before is not None and before.is_returning and event.status != "started"
    if event.status == "ready" if is_returning else event.status in ("joined", "ready") and old_status in GONE:
        return "back", f"{name} is back"
    if is_returning and event.status == "joined":
        return None
    on_device = f" on {event.device}" if event.device else ""
    return "machine", with_reason(
        f"{name} {event.status}{on_device}", "" if event.status == "started" else event.message
    )
