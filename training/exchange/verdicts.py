"""Which member has to go for the others to go on, and why: judged by what all of them report. No network in here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from training.exchange.control import PROTOCOL_VERSION, Hello, ProtocolError, Report
from training.exchange.group_member import CoordinatorConfig, Member

_MOST_STRIKES = 3
_MOST_MISSED = 2
Verdict = tuple[int, str]
"""A rank, and why it has to go."""


def check_hello(hello: Hello, config: CoordinatorConfig, started: bool) -> None:
    """Look at who has come, before or after the group has started.

    Raises:
        ProtocolError: it is none of this group.
    """
    planned = len(config.names)
    if hello.version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {hello.version}, the coordinator speaks {PROTOCOL_VERSION}")
    if hello.run_id != config.run_id:
        raise ProtocolError("a member of another run")
    if hello.world_size != planned or hello.rank >= planned + config.spare:
        raise ProtocolError(f"rank {hello.rank} of {hello.world_size} in a run of {planned}")
    if hello.rank >= planned and not started:
        raise ProtocolError(f"rank {hello.rank} comes later, and the run has not begun")


def check_report(rank: int, report: Report, epoch: float = math.inf) -> None:
    """Look at what one member says of itself, when the newest mesh is that of ``epoch``.

    Raises:
        ProtocolError: it cannot be.
    """
    if report.kept > report.full or report.lost == rank or report.mesh > report.epoch:
        raise ProtocolError("it contradicts itself")
    if report.epoch > epoch:
        raise ProtocolError(f"it speaks of mesh {report.epoch}, which there has not been")


class ModelSize:
    """How long the longest vector of the model is: what most members say, or where there is no most, the lowest rank.
    When all have said it, it stays so."""

    def __init__(self) -> None:
        self._right: int | None = None

    def wrong(self, members: Iterable[Member], building: bool) -> list[Verdict]:
        """Return who has another model.

        Args:
            building: somebody has not said yet what it has.
        """
        told = {member.rank: member.report.elements for member in members if member.report.elements >= 0}
        if building or not told:
            return []
        if self._right is None:
            votes = Counter(told.values())
            self._right = told[max(told, key=lambda rank: (votes[told[rank]], -rank))]
        why = f"its model has {{}} numbers to exchange, the others' {self._right}"
        return [(rank, why.format(said)) for rank, said in told.items() if said != self._right]


def unbelievable(group: Sequence[Member], stand: int | None) -> Verdict | None:
    """Return who says that it has the result of an operation which most others of its mesh have not even begun.

    Args:
        group: members with the state, who have given up the mesh and reported.
        stand: the operations that stood when that mesh was formed; ``None``: nobody knows.
    """
    first = max(group, key=lambda member: member.report.full)
    others = [member.report for member in group if member is not first]
    full = first.report.full
    if stand is None or full <= stand or not others or any(report.full >= full for report in others):
        return None
    doubters = [report for report in others if report.started < full]
    if 2 * len(doubters) < len(others) or not doubters:
        return None
    return first.rank, f"it says that it has the result of exchange {full}, which others have not begun"


def strayed(group: Sequence[Member], bounds: Mapping[int, int]) -> list[Verdict]:
    """Return who has results that the others have made again without it.

    Args:
        group: members with the state.
        bounds: the operations that stood when the first mesh without a member was formed, by its rank.
    """
    right = max(group, key=lambda member: bounds.get(member.rank, math.inf))
    gone = [one for one in group if one is not right and one.report.full > bounds.get(one.rank, math.inf)]
    return [(one.rank, "the others have made a result again without it that it has") for one in gone]


def left_behind(live: Sequence[Member]) -> list[Verdict]:
    """Return who of those that come back to a coordinator was no member of the newest mesh: how far the others were
    without it when that began, nobody knows."""
    newest = max(live, key=lambda member: member.report.mesh).report.members if live else ()
    return [(member.rank, "the others have gone on without it") for member in live if member.rank not in newest]


def outrun(live: Sequence[Member], late: Sequence[Member]) -> list[Verdict]:
    """Return who is back after it has missed more than :data:`_MOST_MISSED` results: with the steps between them it
    would hold the others up for longer than a newcomer does."""
    first = max((member.report.full for member in live), default=0)
    back = [member for member in late if not member.frozen and member.waits]
    return [(m.rank, "the others went on without it") for m in back if m.report.full < first - _MOST_MISSED]


class Standstill:
    """All wait for one another and nothing moves: a way between two of them is gone without a word.

    Args:
        seconds: for which that may be so, twice as long after each time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._moved, self._since = 0, 0.0

    def noted(self, there: Sequence[Member], now: float) -> bool:
        """Look at the members of a mesh; return whether it has to be given up."""
        moved = sum(member.report.moved for member in there)
        if moved != self._moved or not all(member.waits for member in there):
            self._moved, self._since = moved, now
        if now - self._since < self._seconds:
            return False
        self._seconds, self._since = 2.0 * self._seconds, now
        return True


class Quarrels:
    """Pairs of members whose connection breaks again and again, and who breaks off without a reason."""

    def __init__(self) -> None:
        self._strikes: Counter[frozenset[int]] = Counter()
        self._stood = 0

    def broken_by(self, member: Member, mesh: Iterable[int]) -> None:
        """A mesh ends because of what a member reports."""
        if member.report.lost not in set(mesh) - {member.rank}:
            self._strikes[frozenset((member.rank,))] += 1

    def noted(self, live: Sequence[Member]) -> Verdict | None:
        """A mesh is given up: return who has to go, and why, where it failed :data:`_MOST_STRIKES` times by the same
        two without an operation in between. It is whom most accuse; where both do, the higher rank."""
        stood, self._stood = self._stood, max(member.report.full for member in live)
        if self._stood > stood:
            self._strikes.clear()
        ranks = {member.rank for member in live}
        accusing = [m for m in live if m.report.lost is not None and m.report.lost in ranks - {m.rank}]
        accused = Counter(member.report.lost for member in accusing)
        self._strikes.update({frozenset((m.rank, m.report.lost or 0)) for m in accusing})
        worst = next((who for who, strikes in self._strikes.items() if strikes >= _MOST_STRIKES and who <= ranks), None)
        if worst is None:
            return None
        self._strikes.clear()
        rank = max(worst, key=lambda one: (accused[one], one))
        told = (m.report.why for m in live if m.report.why and (m.report.lost == rank or worst == {m.rank}))
        return rank, next(told, "its connections break")
