"""Which members are known to be there or gone, as events tell it: one loss is told once, and so is the return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from training.exchange.coordinator_protocol import BEAT
from training.exchange.group.coordinator_state import Member
from training.records.events import MemberEvent

REDIAL_SECONDS = 60.0
"""For a member that fell silent to dial again, once that connection has ended."""
_Status = Literal["joined", "left", "lost", "ready"]


class PresenceLog:
    """Logs members that come and go.

    What was on its way when a connection fell silent arrives once the cable is in again, and then the connection ends:
    so a return is logged when the member takes part again, or has stayed for a second.

    Args:
        log: receives the events.
    """

    def __init__(self, log: Callable[[MemberEvent], None]) -> None:
        self._log = log
        self._lost: set[int] = set()
        self._returning: dict[int, tuple[Member, str, float]] = {}
        """By rank, members that are back, with the message of the event, and the time at which it is logged."""

    def note(self, member: Member, status: _Status, message: str) -> None:
        """Log a member's new status, unless its loss is known already."""
        self._returning.pop(member.rank, None)
        if status == "lost" and member.rank in self._lost:
            return
        if status == "lost":
            self._lost.add(member.rank)
        else:
            self._lost.discard(member.rank)
        self._log(MemberEvent(member=member.rank, name=member.hello.name, status=status, message=message))

    def note_return(self, member: Member, message: str, now: float) -> None:
        """Log that a member is back; if its loss was logged, when that is sure."""
        if member.rank in self._lost:
            self._returning[member.rank] = member, message, now + BEAT
        else:
            self.note(member, "joined", message)

    def confirm(self, now: float, *members: Member) -> None:
        """Log the returns of members that have stayed long enough, and of ``members``, which take part again."""
        for rank, (member, message, due) in list(self._returning.items()):
            if now >= due or any(one.rank == rank for one in members):
                self.note(member, "joined", message)
