"""The machines that joined and left a run, and at which steps."""

from __future__ import annotations

import math

from app.run_view.member_state import GONE, PRESENT_STATUSES
from app.run_view.run_series import of_member
from app.run_view.run_state import RunState
from app.run_view.timeline import TimelineEntry, chronological


def arrivals_and_departures(state: RunState) -> list[TimelineEntry]:
    """Return the entries of machines that joined and left, oldest first.

    That all leave a run that is stopped, and are back when it resumes, is left out.
    """
    moves: list[TimelineEntry] = []
    present: set[int] = set()
    away: dict[int, bool] = {}
    for entry in chronological(state.timeline):
        went = entry.status in GONE or (entry.kind == "error" and entry.member >= 0)
        if entry.is_arrival or entry.status in PRESENT_STATUSES:
            present.add(entry.member)
        elif went:
            present.discard(entry.member)
        if entry.status == "done" or not (went or entry.is_arrival) or away.get(entry.member) == went:
            continue
        if entry.kind == "back" and entry.member not in away:
            continue
        away[entry.member] = went
        moves.append(entry)
        if entry.status == "left" and not present:
            while moves and moves[-1].status == "left" and moves[-1].why == entry.why:
                away[moves.pop().member] = False
    return moves


def machine_changes(state: RunState) -> list[tuple[float, TimelineEntry]]:
    """Return the steps at which machines joined and left, without the beginning and the end of the run."""
    moves, since = [], dict[int, float]()
    for entry in arrivals_and_departures(state):
        step = float(entry.step) if entry.step >= 0 else _step_at(state, entry.time)
        if step is None and entry.is_arrival and entry.member in since:  # it was alone
            step = since[entry.member] + 1
        elif step is None and not entry.is_arrival and entry.member in state.members:
            step = max(state.members[entry.member].step, since.get(entry.member, 0.0))
        if step is not None and entry.kind == "back":
            step = _first_own_step(state, entry.member, step)
        last_step = state.total_steps if state.total_steps is not None else math.inf
        if step is None or (entry.is_arrival and step < 1) or (entry.status == "left" and step >= last_step):
            continue
        since[entry.member] = step
        moves.append((step, entry))
    return moves


def _first_own_step(state: RunState, rank: int, start: float) -> float:
    """Return the first step at or after ``start`` that a member took: before it, it started and got the state."""
    series = of_member(state.curves, rank, "loss")
    steps = (float(bucket.number * series.width) for bucket in series.buckets)
    return next((step for step in steps if step >= start), start)


def _step_at(state: RunState, moment: float) -> float | None:
    """Return the approximate step at a time, interpolated between events that have both; ``None``: unknown."""
    moments = [(sync.time, sync.step) for member in state.members.values() for sync in member.recent_syncs]
    moments += [
        (entry.time, entry.step) for entry in chronological(state.timeline) if entry.step >= 0 and not entry.status
    ]
    moments += [member.began for member in state.members.values() if member.began]
    moments += [(member.window[-1].time, member.step) for member in state.members.values() if member.window]
    before = max((pair for pair in moments if pair[0] <= moment), default=None)
    after = min((pair for pair in moments if pair[0] > moment), default=None)
    if before is None or after is None:
        return None
    share = (moment - before[0]) / max(1e-9, after[0] - before[0])
    return before[1] + share * max(0, after[1] - before[1])
