"""The machines that a run was asked to add, from that moment until a member of theirs reports."""

from __future__ import annotations

from app.run_view.member_state import MemberState
from app.run_view.run_state import RunState
from profiles.quantities import duration_text

BEING_ADDED = "being added"
_FIRST_RANK = -2
"""Stands for the rank of the first of them, which they get later; below those of the members and of the run."""


def requested(state: RunState) -> dict[str, float]:
    """Return the machines that are being added, with the times at which they were asked for, oldest first."""
    answers = sorted(state.requests.values(), key=lambda answer: answer.time)
    return {
        answer.machine: answer.time
        for answer in answers
        if answer.action == "add" and answer.outcome == "accepted" and answer.machine
    }


def newcomers(state: RunState) -> tuple[MemberState, ...]:
    """Return the machines that are being added and have no member yet, each as one whose rank is below 0."""
    if state.ended is not None:
        return ()
    names = {member.label for member in state.members.values()}
    waiting = [(name, since) for name, since in requested(state).items() if name not in names]
    return tuple(_newcomer(_FIRST_RANK - index, name, since, state) for index, (name, since) in enumerate(waiting))


def _newcomer(rank: int, name: str, since: float, state: RunState) -> MemberState:
    member = MemberState(rank, name=name, status=BEING_ADDED, since=since, updated=since)
    reports = state.phase_reports
    if not reports or reports[-1].time < since or name not in reports[-1].phase:
        return member
    return MemberState(
        rank, name=name, status=BEING_ADDED, since=since, updated=reports[-1].time,
        phase=reports[-1].phase, phase_reports=reports,
    )  # fmt: skip


def stage_of(member: MemberState, state: RunState, now: float) -> str:
    """Return a member's work that is no step, or that it is being added, with the time; empty: neither."""
    since = requested(state).get(member.label) if state.ended is None and not member.active else None
    if member.status == BEING_ADDED:
        since = member.since
    adding = f"{BEING_ADDED}, {duration_text(max(0.0, now - since))} so far" if since is not None else ""
    return member.preparing(now) or adding


def adding_text(state: RunState) -> str:
    """Return the machine that is being added, and how far that is: ``adding pc (sending to pc 3.2 MB/85.4 MB)``."""
    name = next(reversed(requested(state)), "")
    return f"adding {name}{f' ({state.phase})' if name in state.phase else ''}" if name else ""
