"""The exchanges of a run, a row each: bytes, times, and which member was slowest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.run_view.run_state import RunState
from app.run_view.timeline import chronological
from training.records.events import SyncEvent


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange, from the reports of its members."""

    step: int
    number: int
    """Its number, counted from the start."""
    began: float
    """Unix time of its first report."""
    members: int
    sent: int
    """Bytes of the member that sent most."""
    received: int
    """Bytes that the same member received."""
    seconds: float
    """Time from the start to the result, of the slowest member."""
    transfer: float
    """The same of the last member to arrive, which did not wait for others: this is what a plan predicts."""
    interrupted: bool
    """Whether a machine was lost meanwhile: then all waited for it."""
    wait: float
    """Longest time in seconds for which a member's training stood still."""
    mbit: float
    """Payload of the slowest member, in the direction that carried more, over the time, in Mbit/s."""
    slowest: int
    """Rank of the slowest member; -1 where one alone has reported."""


def exchanges(state: RunState) -> list[ExchangeRow]:
    """Return the newest exchanges, oldest first."""
    reports: dict[tuple[int, int], list[SyncEvent]] = {}
    for member in state.members.values():
        for sync in member.recent_syncs:
            reports.setdefault((sync.step, sync.round), []).append(sync)
    losses = [entry.time for entry in chronological(state.timeline) if entry.kind == "lost"]
    return [_row(reports[key], losses) for key in sorted(reports)]


def _row(reports: Sequence[SyncEvent], losses: Sequence[float]) -> ExchangeRow:
    largest, longest = (max(reports, key=lambda s: s.bytes_sent), max(reports, key=lambda s: s.seconds))
    payload, rank = max(longest.bytes_sent, longest.bytes_received), longest.member
    return ExchangeRow(
        step=longest.step,
        number=longest.round,
        began=min(sync.time for sync in reports),
        members=len(longest.members) or len(reports),
        sent=largest.bytes_sent,
        received=largest.bytes_received,
        seconds=longest.seconds,
        transfer=min(sync.seconds for sync in reports),
        interrupted=any(sync.time - sync.seconds <= lost <= sync.time for sync in reports for lost in losses),
        wait=max(sync.wait for sync in reports),
        mbit=payload * 8 / 1e6 / longest.seconds if longest.seconds > 0 else 0.0,
        slowest=-1 if rank is None or len(reports) == 1 else rank,
    )
