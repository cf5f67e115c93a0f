"""The coordinator's configuration and its records of members."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from profiles.quantities import span_text
from training.exchange.coordinator_protocol import (
    BEAT,
    COUNT_BITS,
    LAST_EPOCH,
    LEASE,
    MAX_RANKS,
    Configuration,
    GroupStatus,
    Hello,
    MeshStart,
    Peer,
    Report,
    StateOrder,
)
from training.exchange.group.quorum import Quorum, VotingRecord
from training.records.events import PeerPath, WarningEvent, WaysEvent
from training.records.run_files import sync_folder, write_atomically


class CoordinatorConfig(BaseModel):
    """Configuration of a coordinator; also the document of ``--config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(min_length=1, max_length=128)
    names: tuple[str, ...] = Field(min_length=1, max_length=MAX_RANKS)
    """Machine names by rank, one for each member."""
    spare: int = Field(0, ge=0, le=64)
    """Ranks after those of ``names`` for members that join during the run."""
    absent: frozenset[int] = frozenset()
    """Ranks that the group starts without; they may join later."""
    local: frozenset[int] = frozenset()
    """Ranks on the coordinator's machine: they are lost when their connections end, not by silence."""
    address: str = "127.0.0.1"
    """Literal address to listen on; ``0.0.0.0`` or ``::`` for all."""
    port: int = Field(0, ge=0, le=65535)
    relay_port: int = Field(0, ge=0, le=65535)
    """Port of the relay; 0: any free one."""
    certificates: Path | None = None
    """Folder ``coordinator/`` of the run's certificates; without one all traffic is in clear, on loopback only."""
    quorum: float = Field(1.0, ge=0, le=1)
    round_deadline: float = Field(60.0, gt=0)
    give_up: float = Field(900.0, gt=0)
    """Seconds after which members that do not reach an operation are dropped."""
    standstill: float = Field(30.0, gt=0)
    """Seconds without a byte, while all members wait, after which the mesh is formed anew; doubled each time."""
    lease: float = Field(LEASE, gt=0)
    """Seconds of silence after which a member is lost."""
    elects: bool = False
    """Members elect another coordinator if they lose this one: a minority of them waits for the others."""
    is_column: bool = False
    """The members are devices that hold the same part of their models: newcomers get the state of all parts from the
    same one, which is the first."""
    term: int = Field(0, ge=0, lt=LAST_EPOCH >> COUNT_BITS)
    """Of a coordinator that members have elected."""
    state: Path | None = None
    """File with its :class:`~training.exchange.group.quorum.VotingRecord`, for when it is started again."""

    @property
    def silence_text(self) -> str:
        """Why a member is lost that sends nothing."""
        return f"silent for {span_text(self.lease)}"


_SMALL_PACKETS_ONLY = (
    "small packets pass, large ones are lost on the way (a VPN's MTU, jumbo frames that a switch refuses); "
    "only small ones are sent there"
)
_RELAYED_ONLY = "too many packets are lost on the way, the large ones at least; what goes there is relayed"


class LastReportedRoutes:
    """The routes that members reported last: one report for each mesh, so that no member can flood the log."""

    def __init__(self) -> None:
        self._meshes: dict[int, int] = {}
        self._reported: dict[tuple[int, int], PeerPath] = {}
        self._lossy: set[frozenset[int]] = set()

    def changes(self, member: Member, members: Mapping[int, Member]) -> Iterator[WaysEvent | WarningEvent]:
        """Yield events for changed routes in a member's report."""
        rank, report = member.rank, member.report
        if not report.routes or report.mesh <= self._meshes.get(rank, 0):
            return
        self._meshes[rank] = report.mesh
        others = {path.peer: path for path in report.routes if path.peer in report.members and path.peer != rank}
        fresh = tuple(path for peer, path in others.items() if self._reported.get((rank, peer)) != path)
        self._reported.update({(rank, path.peer): path for path in fresh})
        if fresh:
            yield WaysEvent(member=rank, ways=fresh)
        for path in fresh:
            pair = frozenset((rank, path.peer))
            if path.loses_large and pair not in self._lossy:
                self._lossy.add(pair)
                ends = " - ".join(members[end].hello.name for end in sorted(pair) if end in members)
                yield WarningEvent(message=f"{ends}: {_RELAYED_ONLY if path.how == 'relayed' else _SMALL_PACKETS_ONLY}")


Order = TypeVar("Order", MeshStart, StateOrder)
_INTERRUPTED = 2 * BEAT
"""Seconds without a report after which it may be that nothing comes through in either direction."""
Role = Literal["waiting", "live", "late", "newcomer"]
"""Waiting for the group to start; in the mesh; left behind, but with the state; without the state."""


@dataclass(eq=False)
class Member:
    """One connected member as the coordinator sees it.

    Args:
        send: sends it a :class:`GroupStatus`; must not block.
        close: ends its connection after everything was sent.
        seen: its address; ``through``: the coordinator's address on the same connection.
    """

    hello: Hello
    send: Callable[[GroupStatus], None]
    close: Callable[[], None]
    seen: str = "127.0.0.1"
    through: str = "127.0.0.1"
    role: Role = "waiting"
    report: Report = field(default_factory=Report)
    silent: float = 0.0
    """Seconds since its last report."""
    unanswered: float = 0.0
    """Seconds since the newest status that it has acknowledged was sent; since its last report, where that came after a
    silence, as when a cable is in again."""
    frozen: bool = False
    """Its lease has expired; it is taken back when it answers."""
    hung_up: bool = False
    """Its connection has ended since; it is taken back when it dials again."""

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def waits(self) -> bool:
        """Whether an operation that it has started has no result yet."""
        return self.report.started > self.report.full

    def receive(self, report: Report, now: float) -> tuple[bool, bool]:
        """Take its report at a time by the clock of :func:`clock_stamp`; return whether it shows that a lost member is
        reached again, and whether it says anything that is new.

        Where messages are always late, as on a link that the training fills, only how much later they become counts.
        """
        previous, self.report = self.report, report
        if answers := report.heard > previous.heard:
            self.unanswered = min(self.unanswered, BEAT, max(0.0, now - (report.heard - 1) / 1000))
        if was_interrupted := self.silent > _INTERRUPTED:
            self.unanswered = 0.0
        self.silent = 0.0
        is_back = self.frozen and (answers or was_interrupted)
        self.frozen = self.frozen and not is_back
        return is_back, report != previous.model_copy(update={"heard": report.heard})

    def pass_time(self, elapsed: float, lease: float) -> bool:
        """Let seconds pass; return whether it is lost: it is silent, or nothing reaches it."""
        self.silent, self.unanswered = self.silent + elapsed, self.unanswered + elapsed
        return max(self.silent, self.unanswered) > lease

    def still_holds(self, epoch: int) -> bool:
        """Whether it has, as far as is known, not given up the mesh of an epoch, which has ended."""
        return self.frozen or self.report.up or self.report.epoch != epoch

    def peer(self, viewer: Member) -> Peer:
        """Return the addresses at which ``viewer`` can dial this member: local, announced, and seen ones."""
        hosts = list(self.hello.hosts)
        if self.seen == viewer.seen:
            hosts.insert(0, viewer.seen if _is_loopback(viewer.seen) else "127.0.0.1")
        else:  # on the coordinator's machine: the address at which others dial that
            hosts.append(viewer.through if _is_loopback(self.seen) else self.seen)
        addresses = tuple((host, self.hello.port) for host in dict.fromkeys(hosts))
        return Peer(name=self.hello.name, addresses=addresses)


def clock_stamp(now: float) -> int:
    """Return a time in seconds as :attr:`GroupStatus.sent` has it."""
    return 1 + int(1000 * now)


class StateOrders:
    """Which member hands the joining state to which newcomers.

    Args:
        first_only: the first live one, also where that was not live when it was ordered.
    """

    def __init__(self, first_only: bool = False) -> None:
        self._first_only = first_only
        self.current: StateOrder | None = None
        self.last = 0
        """Number of the last order."""

    def update(self, newcomers: Sequence[Member], live: Sequence[Member]) -> bool:
        """Order it to be handed to newcomers that are ready; return whether the order changed."""
        order, ready = self.current, [member for member in newcomers if member.report.ready]
        donors = live[:1] if self._first_only else live
        donates = order is not None and any(member.rank == order.donor for member in donors)
        if order is not None and donates and any(member.rank in order.peers for member in ready):
            return False
        if not ready or not live:
            self.current = None
            return order is not None
        self.last += 1
        peers = {member.rank: member.peer(member) for member in (live[0], *ready)}
        self.current = StateOrder(number=self.last, donor=live[0].rank, peers=peers)
        return True

    def receivers(self, newcomers: Sequence[Member]) -> list[Member]:
        """Return the newcomers to which the state is being handed."""
        peers = self.current.peers if self.current is not None else {}
        return [member for member in newcomers if member.rank in peers and member.report.ready]


def seen_by(member: Member, order: Order | None, members: Mapping[int, Member]) -> Order | None:
    """Return an order with the addresses from one of its members' point of view; ``None`` for all other members."""
    if order is None or member.rank not in order.peers:
        return None
    peers = {rank: members[rank].peer(member) for rank in order.peers if rank in members}
    return order.model_copy(update={"peers": peers})


def mesh_start(members: Collection[Member], away: bool, earlier: tuple[Configuration, ...]) -> MeshStart:
    """Return how a mesh of ``members`` begins, which has the votes of ``earlier`` configurations; ``away``: other
    members with the state may return later."""
    stand = max(member.report.full for member in members)
    complete = [member for member in members if member.report.full == stand]
    return MeshStart(
        peers={member.rank: member.peer(member) for member in members},
        stand=stand,
        donor=min(complete, key=lambda member: (member.report.dropped, member.rank)).rank,
        behind={member.rank: member.report.full for member in members if member.report.full < stand},
        away=away,
        earlier=earlier,
    )


def progress_of(members: Collection[Member], orphaned: bool) -> dict[str, int]:
    """Return the progress of members that have the state, as fields of
    :class:`~training.exchange.coordinator_protocol.GroupStatus`.

    Args:
        orphaned: the supervisor that started the group is gone.
    """
    reports = [member.report for member in members]
    most_results = max((report.full for report in reports), default=0)
    results = [
        (number, group or report.members)
        for report in reports
        for number, group, _ in report.begun
        if number <= report.full
    ]

    def waits(member: Member) -> bool:
        """Also before its own report says so: whoever has a result says who contributed to it."""
        full = member.report.full
        return member.waits or any(number > full and member.rank in ranks for number, ranks in results)

    waiting = (member.report.full for member in members if not member.frozen and waits(member))
    halts = [member.report.halt for member in members if member.role == "live"] if orphaned else []
    return {
        "settled": min((report.full for report in reports), default=0),
        "closed": min(waiting, default=most_results),
        "halting": max(halts, default=-1) >= 0,
        "halt": max(halts) if min(halts, default=-1) >= 0 else -1,
    }


def quorum_of(config: CoordinatorConfig, log: Callable[[WarningEvent], None] = lambda event: None) -> Quorum:
    """Return the votes of a coordinator; one that is started again knows those before."""

    def warn(line: str) -> None:
        log(WarningEvent(message=line))

    if config.state is None:
        return Quorum(config.elects, warn=warn)
    record = None
    with contextlib.suppress(OSError, ValueError):
        record = VotingRecord.model_validate_json(config.state.read_bytes())
    return Quorum(config.elects, record, functools.partial(_write_votes, config.state), warn)


def _write_votes(path: Path, record: VotingRecord) -> None:
    """Where they cannot be written there is no record at all: started again, the coordinator then needs more than half
    of the members, as one that they elect."""
    try:
        write_atomically(path, record.model_dump_json().encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # or a power failure brings the record before it back
        sync_folder(path.parent)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
