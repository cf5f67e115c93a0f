"""The exchanges of a run, a row each: bytes, times, and which member was slowest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.run_view.member_state import MemberState
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
    """Time from the first member's start to the result."""
    transfer: float
    """Time from the last member's start, for which all others waited, to the result: this is what a plan predicts."""
    interrupted: bool
    """Whether a machine was lost meanwhile: then all waited for it."""
    paused: float
    """Longest time in seconds for which a member's training stood still."""
    mbit: float
    """Payload of the last member, in the direction that carried more, over the transfer, in Mbit/s."""
    last: int
    """Rank of the last member to start; -1 where one alone has reported."""

    @property
    def late(self) -> float:
        """Seconds for which the first member waited until the last one started: the time without the transfer."""
        return self.seconds - self.transfer


def exchanges(state: RunState) -> list[ExchangeRow]:
    """Return the newest exchanges, oldest first."""
    reports: dict[tuple[int, int], list[SyncEvent]] = {}
    for member in state.members.values():
        for sync in _of_member(member):
            reports.setdefault(_position(sync), []).append(sync)
    losses = [entry.time for entry in chronological(state.timeline) if entry.kind == "lost"]
    return [_row(reports[key], losses) for key in sorted(reports)]


def _of_member(member: MemberState) -> list[SyncEvent]:
    """Return a member's newest synchronisations, newest first; those that a resumed run did again count once."""
    listed = list(reversed(member.recent_syncs))
    for sync in reversed(member.earlier_syncs):
        if not listed or _position(sync) < _position(listed[-1]):
            listed.append(sync)
    return listed


def _position(sync: SyncEvent) -> tuple[int, int]:
    return sync.step, sync.round


def _row(reports: Sequence[SyncEvent], losses: Sequence[float]) -> ExchangeRow:
    first, last = max(reports, key=lambda sync: sync.seconds), min(reports, key=lambda sync: sync.seconds)
    largest, payload = max(reports, key=lambda sync: sync.bytes_sent), max(last.bytes_sent, last.bytes_received)
    return ExchangeRow(
        step=first.step,
        number=first.round,
        began=min(sync.time for sync in reports),
        members=len(first.members) or len(reports),
        sent=largest.bytes_sent,
        received=largest.bytes_received,
        seconds=first.seconds,
        transfer=last.seconds,
        interrupted=any(sync.time - sync.seconds <= lost <= sync.time for sync in reports for lost in losses),
        paused=max(sync.wait for sync in reports),
        mbit=payload * 8 / 1e6 / last.seconds if last.seconds > 0 else 0.0,
        last=-1 if last.member is None or len(reports) == 1 else last.member,
    )
