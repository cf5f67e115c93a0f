"""What happened in a run since the last visit to it, in one line.

A mark in the run folder holds the number of the newest event that was shown, and the time. The news follow from the
events alone, so a clock that was set meanwhile affects only how long ago the visit was. Several viewers share the mark:
the newest event that any of them showed counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.run_view.run_series import of_run
from app.run_view.run_state import RunState
from app.run_view.tables.machine_changes import arrivals_and_departures
from app.run_view.timeline import TimelineEntry, TimelineTrack, chronological
from profiles.errors import counted
from profiles.quantities import clock_text, loss_text, machine_text, span_text
from training.records.events import Event
from training.records.plan import status_word
from training.records.run_files import write_atomically

MARK = "seen.json"
SOON = 60.0
"""Seconds of absence from which on news are shown."""
_LARGEST = 4096
_LAST = 10
"""Steps, or buckets of steps, whose mean counts as the current loss; a single step is too noisy."""
_MOST = 3
"""Most losses and returns of machines that are listed one by one."""


class SeenMark(BaseModel):
    """How far a run was seen."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    seq: Annotated[int, Field(ge=-1, le=2**60)]
    """Number of the newest event that was shown; -1: none."""
    at: Annotated[float, Field(ge=0, le=1e11)]
    """Unix time."""


def read_mark(run: Path) -> SeenMark | None:
    """Return the mark of a run folder; ``None`` where there is none that can be read."""
    path = run / MARK
    try:
        return SeenMark.model_validate_json(path.read_bytes()) if path.stat().st_size <= _LARGEST else None
    except (OSError, ValidationError):
        return None


class Visit:
    """One visit to a run, from opening to leaving it; notes every event before it is applied.

    Args:
        seen: number of the newest event that is no news; -1: none.
    """

    def __init__(self, run: Path, seen: int = -1) -> None:
        self._run = run
        self._left = read_mark(run)
        self._seq = seen
        self._seen_state: RunState | None = None

    def note(self, event: Event, before: RunState) -> None:
        """Note an event of the log, and the state before it."""
        if event.seq is None:
            return
        if self._left is not None and self._seen_state is None and event.seq > self._left.seq:
            self._seen_state = before
        self._seq = max(self._seq, event.seq)

    def leave(self, now: float) -> None:
        """Write the mark atomically; a folder that cannot be written gets none."""
        mark = read_mark(self._run)
        if mark is None or mark.seq <= self._seq:
            with suppress(OSError):
                write_atomically(self._run / MARK, SeenMark(seq=self._seq, at=now).model_dump_json().encode())

    def line(self, state: RunState, now: float) -> str:
        """Return the news since the mark; empty after a short absence, or where a finished run has none.

        Args:
            state: of the run now.
            now: Unix time by the clock of this machine.
        """
        left = self._left
        if left is None or 0 <= now - left.at < SOON:
            return ""
        news = list(_news(self._seen_state or state, state, now))
        if not news and state.ended is not None:
            return ""
        ago = (
            f" {span_text(60 * round((now - left.at) / 60))} ago" if now >= left.at else ""
        )  # else the clock was set back
        return f"Since you left{ago}: {', '.join(news) or f'nothing, still at step {state.step:,}'}"


def _news(seen_state: RunState, state: RunState, now: float) -> Iterator[str]:
    if seen_state.started is not None and state.started is not None and seen_state.started != state.started:
        yield f"resumed at {clock_text(state.started, now)}"
    if state.step != seen_state.step:
        yield f"step {seen_state.step:,} -> {state.step:,}"
    before, after = map(_loss, (seen_state, state))
    if after is not None and after != before:
        yield f"loss {loss_text(after)}" if before is None else f"loss {loss_text(before)} -> {loss_text(after)}"
    seen_entries = set(chronological(seen_state.timeline))
    new = [entry for entry in chronological(state.timeline) if entry not in seen_entries]
    yield from _losses(state, new, now)
    written = [entry.step for entry in new if entry.kind == "snapshot"]
    if written:
        counts = [s.timeline.get("snapshot", TimelineTrack()).count for s in (state, seen_state)]
        qualifier = (
            "more than " if counts[0] - counts[1] > len(written) else ""
        )  # the timeline drops entries in the middle
        yield qualifier + counted(len(set(written)), "snapshot")
    if state.status == "paused" != seen_state.status:
        yield "paused"
    if state.ended is not None and state.ended != seen_state.ended:
        yield f"{status_word(state.status)} at {clock_text(state.ended, now)}"


def _loss(state: RunState) -> float | None:
    points = of_run(state.curves, "loss").points()[-_LAST:]
    return statistics.fmean(point.mean for point in points) if points else None


def _losses(state: RunState, new: Sequence[TimelineEntry], now: float) -> Iterator[str]:
    """Yield which machines were lost and came back, each return after its loss."""
    member_moves = {entry for entry in arrivals_and_departures(state) if entry.kind in ("lost", "back")}
    moved = sorted((entry for entry in new if entry in member_moves), key=lambda entry: entry.member)
    messages: list[tuple[float, str]] = []
    for member, changes in groupby(moved, key=lambda entry: entry.member):
        name, lost = machine_text(state.name(member)), False
        for entry in changes:
            at = clock_text(entry.time, now)
            if entry.kind == "lost":
                messages.append((entry.time, f"lost {name} at {at}"))
            elif lost:
                messages[-1] = (messages[-1][0], f"{messages[-1][1]}, back at {at}")
            else:
                messages.append((entry.time, f"{name} back at {at}"))
            lost = entry.kind == "lost"
    if len(messages) <= _MOST:
        yield from (words for _, words in sorted(messages))
        return
    shown = [entry for entry in moved if entry.kind == "lost"] or moved
    names = dict.fromkeys(state.name(entry.member) for entry in shown)
    away = [state.name(rank) for rank, member in state.members.items() if member.status in ("lost", "failed")]
    still = f", {', '.join(away)} still away" if away else ""
    yield f"{counted(len(shown), 'time')} a machine {shown[0].kind} ({', '.join(names)}){still}"
