"""What a coordinator must know of its group, and one of its members as it sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from training.exchange.control import LEASE, MAX_RANKS, Hello, Peer, Report, Status

_MOST_STRIKES = 3


class CoordinatorConfig(BaseModel):
    """What a coordinator must know; also the document of ``--config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(min_length=1, max_length=128)
    names: tuple[str, ...] = Field(min_length=1, max_length=MAX_RANKS)
    """Machine names by rank; as many as there are members."""
    spare: int = Field(0, ge=0, le=64)
    """Ranks after those of ``names`` for members that come while the run is on."""
    local: frozenset[int] = frozenset()
    """Ranks on the coordinator's machine: they are not lost by silence, but with their connections."""
    address: str = "127.0.0.1"
    """Literal address to listen on; ``0.0.0.0`` or ``::`` for all."""
    port: int = Field(0, ge=0, le=65535)
    certificates: Path | None = None
    """Folder ``hub/`` of the run's certificates; without one all goes in clear, on loopback only."""
    quorum: float = Field(1.0, ge=0, le=1)
    round_deadline: float = Field(60.0, gt=0)
    give_up: float = Field(900.0, gt=0)
    """Seconds after which members that do not come to an operation are dropped."""
    lease: float = Field(LEASE, gt=0)
    """Seconds of silence after which a member is lost."""


Role = Literal["waiting", "live", "late", "newcomer"]
"""Waiting for the group to begin; in the mesh; left behind, with its state; without the state."""


@dataclass(eq=False)
class Member:
    """One connected member as the coordinator sees it.

    Args:
        send: takes its :class:`Status`; must not block.
        close: ends its connection after what was sent.
        seen: its address, ``through`` the coordinator's on the same connection.
    """

    hello: Hello
    send: Callable[[Status], None]
    close: Callable[[], None]
    seen: str = "127.0.0.1"
    through: str = "127.0.0.1"
    role: Role = "waiting"
    report: Report = field(default_factory=Report)
    silent: float = 0.0
    frozen: bool = False
    """Its lease is over; it is taken back when it says something."""

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def waits(self) -> bool:
        """Whether an operation that it has started has no result yet."""
        return self.report.started > self.report.full

    def peer(self, of: Member) -> Peer:
        """Return where ``of`` finds this member: on its own machine, where it says it is, and where it was seen."""
        hosts = list(self.hello.hosts)
        if self.seen == of.seen:
            hosts.insert(0, of.seen if _is_loopback(of.seen) else "127.0.0.1")
        else:  # one that is where the coordinator is has the address that others dial the coordinator at
            hosts.append(of.through if _is_loopback(self.seen) else self.seen)
        addresses = tuple((host, self.hello.port) for host in dict.fromkeys(hosts))
        return Peer(name=self.hello.name, addresses=addresses)


class Quarrels:
    """Pairs of members whose connection breaks again and again."""

    def __init__(self) -> None:
        self._strikes: Counter[frozenset[int]] = Counter()
        self._stood = 0

    def noted(self, live: Sequence[Member]) -> tuple[int, str] | None:
        """A mesh is given up: return who has to go, and why, where it failed :data:`_MOST_STRIKES` times by the same
        two without an operation in between. It is whom most accuse; where both do, the higher rank."""
        stood, self._stood = self._stood, max(member.report.full for member in live)
        if self._stood > stood:
            self._strikes.clear()
        ranks = {member.rank for member in live}
        accusing = [m for m in live if m.report.lost is not None and m.report.lost in ranks - {m.rank}]
        accused = Counter(member.report.lost for member in accusing)
        self._strikes.update({frozenset((m.rank, m.report.lost or 0)) for m in accusing})
        worst = next((pair for pair, strikes in self._strikes.items() if strikes >= _MOST_STRIKES), None)
        if worst is None or not worst <= ranks:
            return None
        self._strikes.clear()
        rank = max(worst, key=lambda one: (accused[one], one))
        return rank, next((m.report.why for m in accusing if m.report.lost == rank), "its connections break")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
