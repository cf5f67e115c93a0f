"""Which members must be dropped so that the others can go on, and why, judged by all members' reports. No network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from profiles.quantities import span_text
from training.exchange.base import Group
from training.exchange.coordinator_protocol import (
    PROTOCOL_VERSION,
    Configuration,
    Hello,
    MeshStart,
    ProtocolError,
    Report,
)
from training.exchange.group.coordinator_state import CoordinatorConfig, Member
from training.records.events import WarningEvent

_MAX_STRIKES, _MAX_UNEXPLAINED_ENDS = 3, 9
_BREAKS = "its connections keep breaking"
_MAX_MISSED = 2
_STATE_PATIENCE = 4
"""Times that an operation may take until it is given up, for a newcomer to take the state."""
_MAX_NAMED_RANKS, _MAX_NAME = 12, 40
"""Ranks of a group, and characters of a name, that a verdict quotes: it is a single line."""
Verdict = tuple[int, str]
"""A rank, and why it must be dropped."""


def check_hello(hello: Hello, config: CoordinatorConfig, started: bool) -> None:
    """Check a member's hello, before or after the group has started.

    Raises:
        ProtocolError: it does not belong to this group.
    """
    planned = len(config.names)
    if hello.version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {hello.version}, the coordinator speaks {PROTOCOL_VERSION}")
    if hello.run_id != config.run_id:
        raise ProtocolError("a member of another run")
    if hello.world_size != planned or hello.rank >= planned + config.spare:
        raise ProtocolError(f"rank {hello.rank} of {hello.world_size} in a run of {planned}")
    if hello.rank >= planned and not started:
        raise ProtocolError(f"rank {hello.rank} joins later, and the run has not begun yet")


def check_report(rank: int, report: Report, epoch: float = math.inf, committed: Configuration | None = None) -> None:
    """Check one member's report against the newest epoch, and the newest configuration that counts.

    Raises:
        ProtocolError: it is inconsistent.
    """
    if report.dropped > report.full or report.aside > report.full or report.lost == rank or report.mesh > report.epoch:
        raise ProtocolError("it contradicts itself")
    if committed is not None and report.committed is not None and report.committed.epoch > committed.epoch:
        raise ProtocolError("it reports a configuration that was never committed")
    if report.epoch > epoch:
        raise ProtocolError(f"it speaks of mesh {report.epoch}, which there has not been")


class ModelSizeVote:
    """Decides the length of the model's longest vector: the one most members report, or the lowest rank's if there is
    no majority. It is fixed once all members have reported."""

    def __init__(self) -> None:
        self._agreed_elements: int | None = None

    def deviating(self, members: Iterable[Member], building: bool) -> list[Verdict]:
        """Return the members whose model differs.

        Args:
            building: a member has not reported its model yet.
        """
        elements_by_rank = {member.rank: member.report.elements for member in members if member.report.elements >= 0}
        if building or not elements_by_rank:
            return []
        if self._agreed_elements is None:
            votes = Counter(elements_by_rank.values())
            self._agreed_elements = elements_by_rank[
                max(elements_by_rank, key=lambda rank: (votes[elements_by_rank[rank]], -rank))
            ]
        why = f"its model has {{}} numbers to exchange, the others' {self._agreed_elements}"
        return [
            (rank, why.format(elements))
            for rank, elements in elements_by_rank.items()
            if elements != self._agreed_elements
        ]


class OperationMismatch:
    """Judges members that describe one operation differently. It waits until all have described it, so that the
    deviating member is dropped.

    Args:
        seconds: after which members that have not described it are not waited for any longer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    @property
    def is_undecided(self) -> bool:
        """Whether members contradicted one another at the last check, and others had still to report."""
        return self._since is not None

    def judge(self, members: Sequence[Member], now: float) -> list[Verdict]:
        """Return the members to drop.

        A group that all its members name is right, and a member that contradicts most others is wrong. If neither
        decides it, all contradicted members are dropped.
        """
        for number, statements in _statements_by_number(members):
            opponents = _contradictions(statements) if len(set(statements.values())) > 1 else {}
            if not any(opponents.values()):
                continue
            self._since = now if self._since is None else self._since
            if any(member.report.started < number for member in members) and now - self._since < self._seconds:
                return []
            self._since = None
            agreed = {rank for rank, (group, _) in statements.items() if group and _is_agreed(statements, rank)}
            disputed = {rank: others for rank, others in opponents.items() if others and rank not in agreed}
            wrong = [rank for rank, others in disputed.items() if 2 * len(others) > len(statements) - 1] or list(
                disputed
            )
            names = {member.rank: member.hello.name[:_MAX_NAME] for member in members}
            why = _difference(number, statements, sorted((wrong[0], min(disputed[wrong[0]]))), names)
            return [(rank, why) for rank in wrong]
        self._since = None
        return []


Statement = tuple[Group, str]
"""Group and description of an operation, according to one member."""


def _statements_by_number(members: Iterable[Member]) -> list[tuple[int, dict[int, Statement]]]:
    """Return each operation's descriptions, by number and rank."""
    by_number: dict[int, dict[int, Statement]] = {}
    for member in members:
        for number, group, description in member.report.begun:
            by_number.setdefault(number, {})[member.rank] = group, description
    return sorted(by_number.items())


def _is_agreed(statements: Mapping[int, Statement], rank: int) -> bool:
    """Whether all members of a rank's group make the same statement."""
    return all(statements.get(peer) == statements[rank] for peer in statements[rank][0])


def _difference(number: int, statements: Mapping[int, Statement], pair: Sequence[int], names: Mapping[int, str]) -> str:
    """Return a sentence with two members' descriptions of an operation."""
    if statements[pair[0]][0] != statements[pair[1]][0]:
        claims = ", but ".join(f"{_group_in_words(statements[rank][0])} for {names[rank]}" for rank in pair)
        return f"exchange {number} is of {claims}: give the same members everywhere"
    claims = ", but ".join(f"{statements[rank][1]} for {names[rank]}" for rank in pair)
    return f"exchange {number} is {claims}: all members have to do the same"


def _contradictions(statements: Mapping[int, Statement]) -> dict[int, set[int]]:
    """Return the ranks each rank contradicts: one of the two counts the other in, and their statements differ."""
    opponents: dict[int, set[int]] = {rank: set() for rank in statements}
    for rank, statement in statements.items():
        for peer in statement[0] or statements:
            if statements.get(peer, statement) != statement:
                opponents[rank].add(peer)
                opponents[peer].add(rank)
    return opponents


def _group_in_words(group: Group) -> str:
    if not group:
        return "all members"
    return f"ranks {', '.join(map(str, group[:_MAX_NAMED_RANKS]))}{' ...' if len(group) > _MAX_NAMED_RANKS else ''}"


def find_false_claim(holders: Sequence[Member], mesh: MeshStart | None) -> Verdict | None:
    """Return the member that claims the result of an operation which most others of its mesh have not started.

    Args:
        holders: members with the state, which have given up their mesh and reported.
        mesh: the last one; members outside it do not know what was done in it. ``None``: unknown.
    """
    group = [member for member in holders if mesh is not None and member.rank in mesh.peers]
    if mesh is None or len(group) < 2:
        return None
    claimant = max(group, key=lambda member: joint_result(member.report))
    others = [member.report for member in group if member is not claimant]
    full = joint_result(claimant.report)
    if full <= mesh.stand or any(report.full >= full for report in others):
        return None
    doubters = [report for report in others if report.started < full]
    if 2 * len(doubters) < len(others) or not doubters:
        return None
    return claimant.rank, f"it says that it has the result of exchange {full}, which others have not begun"


def joint_result(report: Report) -> int:
    """Return the last operation of all members that has a result, according to one member's report."""
    return report.full - report.aside


def holders_of_recomputed(group: Sequence[Member], bounds: Mapping[int, int]) -> list[Verdict]:
    """Return the members with results that the others have recomputed without them.

    Args:
        group: members with the state.
        bounds: by rank of an absent member: the operations that stood when the first mesh without it was formed.
    """
    right = max(group, key=lambda member: bounds.get(member.rank, math.inf))
    gone = [m for m in group if m is not right and m.report.full > bounds.get(m.rank, math.inf)]
    return [(m.rank, "the others recomputed a result without it that it already had") for m in gone]


def left_behind(live: Sequence[Member], elects: bool) -> list[Verdict]:
    """Return members that reconnect to a restarted coordinator but were not in the newest mesh: the others' progress
    when that began is unknown. A mesh that one of its members has never been in has not stood, and nothing was done
    there; nor where they ``elect`` coordinators and none of them knows that it counts, as whoever has done anything
    there was connected with all the others."""

    def may_have_stood(reports: Member) -> bool:
        mesh, members, committed = reports.report.mesh, reports.report.members, reports.report.committed
        if elects and (committed is None or committed.epoch < mesh):
            return False
        return all(other.report.mesh >= mesh for other in live if other.rank in members)

    stood = [(member.report.mesh, member.report.members) for member in live if may_have_stood(member)]
    _, newest = max(stood, default=(0, ()))
    return [(member.rank, "the others went on without it") for member in live if member.rank not in newest]


def too_far_behind(live: Sequence[Member], late: Sequence[Member]) -> list[Verdict]:
    """Return members that return after missing a result that nobody keeps, or more than :data:`_MAX_MISSED`: with the
    steps between them they would hold the others up for longer than a newcomer does."""
    oldest = min((_oldest_base(member.report) for member in live), default=0)
    least = max(oldest, max((member.report.full for member in live), default=0) - _MAX_MISSED)
    back = [member for member in late if not member.frozen and member.waits]
    return [(m.rank, "the others went on without it") for m in back if m.report.full < least]


def without_kept_results(group: Sequence[Member]) -> list[Verdict]:
    """Return the members of the next mesh that lack a result which those that have all results do not keep."""
    stand = max(member.report.full for member in group)
    oldest = min(_oldest_base(member.report) for member in group if member.report.full == stand)
    return [(m.rank, "it is too far behind the others") for m in group if m.report.full < oldest]


def _oldest_base(report: Report) -> int:  # results that a member has to have so that it can be handed the others
    return min(report.dropped, joint_result(report))


class AwaitedOperation:
    """Judges members that have not reached an operation the others wait for."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.reset()

    def reset(self) -> None:
        """Nothing is waited for."""
        self.number, self._since = 0, 0.0

    def judge(
        self, present: Sequence[Member], joiners: Sequence[Member], now: float
    ) -> tuple[list[Verdict], list[Member]]:
        """Return the members to drop, and those that the others leave behind.

        Args:
            present: members of the mesh.
            joiners: newcomers to which the joining state is being handed.
        """
        number, config = min(member.report.full for member in present) + 1, self._config
        absent = [member for member in present if member.report.started < number]
        if any(m.report.elements < 0 for m in present) or not (absent or joiners) or len(absent) == len(present):
            self.reset()
            return [], []
        if self.number != number:
            self.number, self._since = number, now
        waited = now - self._since
        if not absent:
            late = joiners if waited >= _STATE_PATIENCE * config.give_up else ()
            return [(m.rank, f"did not take the training state within {span_text(round(waited))}") for m in late], []
        if waited >= config.give_up:
            return [(m.rank, f"did not reach exchange {number} within {span_text(round(waited))}") for m in absent], []
        enough = len(present) - len(absent) >= max(1, math.ceil(config.quorum * len(present)))
        return [], absent if enough and waited >= config.round_deadline else []

    def warning(self, member: Member) -> WarningEvent:
        """Return the event about a member that is left behind."""
        return WarningEvent(message=f"{member.hello.name} is late; exchange {self.number} goes on without it")


class Standstill:
    """Detects that all members wait for one another and nothing moves: a route between two of them has failed silently.

    Args:
        seconds: for which that is tolerated, doubled each time until an operation completes.
    """

    def __init__(self, seconds: float) -> None:
        self._base_seconds = self._seconds = seconds
        self._moved, self._since, self._done = 0, 0.0, 0

    def judge(self, members: Sequence[Member], now: float) -> bool:
        """Check the members of a mesh; return whether it has to be given up."""
        moved, done = sum(member.report.moved for member in members), max(member.report.full for member in members)
        if done > self._done:  # bytes alone prove nothing: each new mesh moves some before it stalls
            self._done, self._seconds = done, self._base_seconds
        if moved != self._moved or not all(member.waits for member in members):
            self._moved, self._since = moved, now
        if now - self._since < self._seconds:
            return False
        self._seconds, self._since = 2.0 * self._seconds, now
        return True


class LinkFaultJudge:
    """Judges members whose connections break repeatedly, and members that give meshes up without a reason.

    Reports about one another count from mesh to mesh, until an operation completes. A member that only sees a
    connection end may see that a third member has hung up because of a fourth: that weighs less, and nothing once a
    member is lost.
    """

    def __init__(self) -> None:
        self._unexplained_breaks: Counter[int] = Counter()
        self._explained, self._unexplained = _Accusations(), _Accusations()
        """Accusations with evidence from the connection, and without."""
        self._ranks: set[int] = set()
        self._results = 0

    def record_break(self, member: Member, mesh: Iterable[int]) -> None:
        """Record that a mesh ends because of a member's report."""
        if member.report.lost not in set(mesh) - {member.rank}:
            self._unexplained_breaks[member.rank] += 1

    def judge(self, live: Sequence[Member]) -> Verdict | None:
        """Judge the end of a mesh: return the member to drop if the same two members broke :data:`_MAX_STRIKES` meshes
        without an operation in between, or
        :data:`_MAX_UNEXPLAINED_ENDS` if the reports only say that a connection ended."""
        results_before, self._results = self._results, max(member.report.full for member in live)
        before, self._ranks = self._ranks, {member.rank for member in live}
        if self._results > results_before:
            self._clear()
        if self._ranks != before:
            self._unexplained = _Accusations()
        accusing = [m for m in live if m.report.lost is not None and m.report.lost in self._ranks - {m.rank}]
        self._explained.add([m for m in accusing if not m.report.hung_up])
        self._unexplained.add([m for m in accusing if m.report.hung_up])
        for member in live:
            if self._unexplained_breaks[member.rank] >= _MAX_STRIKES:
                self._clear()
                return member.rank, member.report.why or _BREAKS
        verdict = self._explained.worst(self._ranks, _MAX_STRIKES)
        verdict = verdict or self._unexplained.worst(self._ranks, _MAX_UNEXPLAINED_ENDS)
        if verdict is not None:
            self._clear()
        return verdict

    def _clear(self) -> None:
        self._unexplained_breaks.clear()
        self._explained, self._unexplained = _Accusations(), _Accusations()


class _Accusations:
    """Accusations of members by others, in all meshes since the last completed operation."""

    def __init__(self) -> None:
        self._strikes: Counter[frozenset[int]] = Counter()
        """Number of meshes each pair has broken."""
        self._accusers: dict[int, Counter[int]] = {}
        self._why: dict[int, str] = {}

    def add(self, accusing: Sequence[Member]) -> None:
        """Add the reports about the end of one mesh."""
        pairs = [(member.rank, member.report.lost or 0, member.report.why) for member in accusing]
        self._strikes.update({frozenset((rank, lost)) for rank, lost, _ in pairs})
        for rank, lost, why in pairs:
            self._accusers.setdefault(lost, Counter())[rank] += 1
            self._why[lost] = why

    def worst(self, ranks: set[int], max_strikes: int) -> Verdict | None:
        """Return which member of a pair with that many strikes must be dropped: the one more members accuse, or more
        often; if that does not decide, after twice as many strikes, the higher rank."""
        for pair, strikes in self._strikes.items():
            if strikes < max_strikes or not pair <= ranks:
                continue
            guilt = {rank: self._guilt(rank, ranks) for rank in pair}
            if len(set(guilt.values())) > 1 or len(ranks) < 3 or strikes >= 2 * max_strikes:
                guilty = max(pair, key=lambda rank: (guilt[rank], rank))
                return guilty, self._why.get(guilty) or _BREAKS
        return None

    def _guilt(self, rank: int, ranks: set[int]) -> tuple[int, int]:
        """Return the number of accusers of a member, and of their accusations."""
        accusers = [times for accuser, times in self._accusers.get(rank, {}).items() if accuser in ranks]
        return len(accusers), sum(accusers)
