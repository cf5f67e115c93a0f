"""How a member joins a group: under which rank, by which addresses, and how it finds the coordinator."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from profiles.schema import Transport
from training.exchange.coordinator_protocol import LEASE, PROTOCOL_VERSION, Hello, Peer
from training.exchange.group.election import StandInCoordinator, Successor
from training.exchange.links.handshake import Identity

REDIAL_FOR = 60.0
"""Seconds within which a lost coordinator must be back."""


@dataclass
class Allegiance:
    """The coordinator that a member follows after an election, also when it joins its group again."""

    successor: Successor | None = None
    """The one that it dials; ``None``: that which the run was started with."""
    hosts: list[str] = field(default_factory=list)
    """Addresses of its machine, the one to dial next first."""
    followed: Successor | None = None
    """The last one that it was connected with."""
    peers: dict[int, Peer] = field(default_factory=dict)
    """The members of the newest mesh."""
    barred: set[int] = field(default_factory=set)
    """Who was dropped for good, as the coordinator says."""
    readmitted: set[int] = field(default_factory=set)
    """Whom the supervisor has let in again since the election."""
    banned: set[int] = field(default_factory=set)
    """Whom the supervisor has dropped for good since the election."""


@dataclass(frozen=True)
class JoinConfig:
    """Which group a member joins, and under which rank and name.

    Args:
        address: ``host:port`` of the coordinator, a literal address.
        certificates: folder of this member's certificates; ``None`` for traffic in clear on loopback.
        listen: literal address on which other members dial this one.
        hosts: literal addresses under which it is announced, the fastest route first; empty: those of its interfaces.
        shards: how much of every vector each member owns, by rank; see
            :func:`~training.exchange.mean.owners.shard_bounds`.
        local: the coordinator is on this machine, see :class:`training.records.plan.MemberPlan`.
        on_return: called when the group, which had continued without this member, has taken it back.
        interface: the network interface over which most others reach this member fastest, if that was measured.
        rendezvous: returns ``host:port`` of the coordinator and of the relay, where they may change during the run; a
            relay without an address is on the coordinator's host, on the port the coordinator announces.
        on_unreachable: called while the coordinator cannot be reached, with its address, the reason, and the rank on
            whose machine it is if members have elected it.
        transport: the same for all members, see :class:`~training.exchange.links.handshake.Identity`.
        lease: seconds of silence after which the coordinator counts as lost.
        redial_for: seconds within which a lost coordinator must be back.
        stand_in: starts a coordinator here if the members elect this one for it; ``None``: they elect none.
        allegiance: see there; the same where a member joins again.
        on_election: called when this member follows another coordinator.
    """

    address: str
    certificates: Path | None
    run_id: str
    rank: int
    world_size: int
    name: str
    listen: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    shards: Mapping[int, float] | None = None
    local: bool = False
    on_return: Callable[[], None] = lambda: None
    rendezvous: Callable[[], tuple[str, str]] | None = None
    on_unreachable: Callable[[str, str, int | None], None] = lambda address, why, carrier: None
    interface: str = ""
    transport: Transport = "auto"
    lease: float = LEASE
    redial_for: float = REDIAL_FOR
    stand_in: StandInCoordinator | None = None
    allegiance: Allegiance = field(default_factory=Allegiance)
    on_election: Callable[[Successor], None] = lambda successor: None

    @property
    def identity(self) -> Identity:
        return Identity(self.run_id, self.rank, self.certificates, self.transport)

    @property
    def endpoints(self) -> tuple[str, str]:
        """Current addresses of the coordinator and of the relay."""
        return (self.address, "") if self.rendezvous is None else self.rendezvous()

    def hello(self, listening: tuple[str, int]) -> Hello:
        """Return the member's first message, which announces the address that it listens on."""
        return Hello(
            version=PROTOCOL_VERSION,
            run_id=self.run_id,
            rank=self.rank,
            world_size=self.world_size,
            name=self.name,
            incarnation=os.urandom(8).hex(),
            port=listening[1],
            hosts=self.reached_at(listening[0]),
        )

    def reached_at(self, listening: str) -> tuple[str, ...]:
        """Return the addresses at which this member can currently be dialled."""
        return tuple(self.hosts) or dialable_addresses(listening, self.interface)


def parse_endpoint(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, the host in brackets if it is IPv6."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def dialable_addresses(listening: str, best: str = "") -> tuple[str, ...]:
    """Return the addresses of this machine's interfaces that others may dial, ``best`` and the fastest interface first.

    Empty if it listens on loopback; only the address itself if it listens on one.
    """
    if listening not in ("0.0.0.0", "::"):
        return () if listening.startswith("127.") or listening == "::1" else (listening,)
    states = psutil.net_if_stats()
    interfaces = psutil.net_if_addrs()
    up = sorted(
        (name for name in interfaces if name in states and states[name].isup),
        key=lambda n: (n != best, -states[n].speed),
    )
    kinds = (socket.AF_INET, socket.AF_INET6) if listening == "::" else (socket.AF_INET,)
    candidates = (a.address.split("%")[0] for name in up for a in interfaces[name] if a.family in kinds)
    # A link-local address (169.254...), as on a cable between two machines, is of use to one other machine only.
    addresses = sorted((a for a in candidates if not a.startswith(("127.", "fe80")) and a != "::1"), key=_is_link_local)
    return tuple(addresses[:16])


def _is_link_local(address: str) -> bool:
    return address.startswith("169.254.")
