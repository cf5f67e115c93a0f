"""Members that were dropped from the run for good, and how that outlasts the coordinator to which it was said.

Only the supervisor drops for good, and it speaks to the coordinator that it has started. So every member knows from its
coordinator who was dropped, and reports it. A coordinator that members elect believes what most of them report, so
that no member alone can shut out another one. Where the supervisor, which has come back, drops one or lets one in
again, the members hear of it and report that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from training.exchange.coordinator_protocol import ProtocolError
from training.exchange.group.coordinator_state import Member
from training.exchange.group.verdicts import Verdict

BANNED = "it was dropped from the run"


class Bans:
    """Ranks that are refused.

    Args:
        is_elected: the coordinator is one that members have elected.
    """

    def __init__(self, is_elected: bool) -> None:
        self._is_elected, self._has_adopted = is_elected, not is_elected
        self.ranks: set[int] = set()

    def check(self, rank: int) -> None:
        """Raise ``ProtocolError`` if a rank is refused."""
        if rank in self.ranks:
            raise ProtocolError(BANNED)

    def adopt(self, mesh: Collection[Member], connected: Collection[int]) -> list[Verdict]:
        """Take over the bans that most members report; return who must be dropped.

        Args:
            mesh: the members that go on.
            connected: the ranks that have come, also others.
        """
        self._has_adopted = True
        if self._is_elected:
            self.ranks |= _reported_by_most(mesh)
        return [(rank, BANNED) for rank in sorted(self.ranks & set(connected))]

    def review(self, mesh: Collection[Member], connected: Collection[int]) -> list[Verdict]:
        """Lift the bans that most members have ceased to report, and adopt new ones; see :meth:`adopt`, before which
        too few members have come to judge."""
        if not self._has_adopted:
            return []
        if self._is_elected:
            self.ranks &= _reported_by_most(mesh)
        return self.adopt(mesh, connected)


def _reported_by_most(mesh: Collection[Member]) -> set[int]:
    votes = Counter(rank for member in mesh for rank in set(member.report.barred))
    return {rank for rank, count in votes.items() if 2 * count > len(mesh)}
