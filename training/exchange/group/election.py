"""Which coordinator a member follows when it has lost the one before: what it asks the others, and what it decides.

Members ask each other through their listening sockets whom they follow (:class:`Standing`). One that hears of a
coordinator of a later term goes there. Otherwise, once the members that have lost theirs may elect another one
(:mod:`~training.exchange.group.quorum`), the lowest rank of them starts it on its machine. To dial it is to vote for
it: a member never goes back to an earlier term, and those that it asks come to the later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from training.exchange.coordinator_protocol import Peer, ProtocolError, Report, Standing, parse
from training.exchange.group.quorum import may_elect, next_term
from training.exchange.links.certificates import member_uri
from training.exchange.links.handshake import Identity, question

ELECT_AFTER = 6.0
"""Seconds without a coordinator under which the group can go on, after which a member looks for another one: longer
than a killed one needs to be started again."""
PREPARE_AFTER = 2.5
"""Seconds after which the program of a coordinator is loaded here, in case that this member is elected."""
LOST_AFTER = 5.0
"""Seconds after which it tells others that it has none."""
ASK_AGAIN_AFTER = 3.0
"""Seconds for a coordinator that it has gone to."""
STANDS_FOR = 8.0
"""Seconds for which a coordinator that it has started waits for enough members, before another one is elected."""
_ASK_SECONDS, DIAL_SECONDS = 2.0, 0.9
"""Seconds for an answer, and for one of the addresses of a member."""
Open = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Connects to a host and port."""


class StandInCoordinator(Protocol):
    """Starts coordinators on this machine."""

    def prepare(self) -> None:
        """Load the program of a coordinator, which may be needed soon."""
        ...

    def discard(self) -> None:
        """End what was prepared and not started. Idempotent."""
        ...

    def start(self, term: int) -> int:
        """Start that of a term, in the place of an earlier one; return its port.

        Raises:
            MusterError, OSError: it does not start.
        """
        ...

    def stop(self) -> None:
        """End it: another one is followed. Idempotent."""
        ...

    def release(self) -> None:
        """Let it serve until the last member has left. Idempotent."""
        ...


@dataclass(frozen=True)
class Neighbour:
    """A member that answered, or this one."""

    rank: int
    standing: Standing

    @property
    def report(self) -> Report:
        return self.standing.report


@dataclass(frozen=True)
class Successor:
    """A coordinator on the machine of a member.

    Args:
        port: on that machine; 0: it is to be started.
    """

    term: int
    carrier: int
    port: int = 0


def choose(asker: Neighbour, others: Collection[Neighbour]) -> Successor | None:
    """Return the coordinator that a member follows next; ``None``: it has to ask again."""
    standing, newest = asker.standing, max((n.standing for n in (asker, *others)), key=lambda candidate: candidate.term)
    offered = [n.standing for n in others if n.standing.port and (not n.standing.lost or n.standing.carrier == n.rank)]
    best = max(offered, key=lambda candidate: candidate.term, default=standing)
    if best.term > standing.term:
        return Successor(best.term, best.carrier, best.port)
    lost = [asker, *(neighbour for neighbour in others if neighbour.standing.lost)]
    able = [neighbour.rank for neighbour in lost if neighbour.standing.able]
    waits = (
        standing.carrier == asker.rank and standing.term == newest.term
    )  # for others to come to the one it has started
    if waits or not standing.lost or min(able, default=-1) != asker.rank or not may_elect(lost):
        return None
    return Successor(next_term(newest.term, asker.rank), asker.rank)


async def ask_all(identity: Identity, term: int, peers: Mapping[int, Peer], connect: Open) -> list[Neighbour]:
    """Ask members whom they follow; return those that answer.

    Args:
        term: of the coordinator that this member follows.
    """
    ranks = [rank for rank in peers if rank != identity.rank]
    answers = await asyncio.gather(*(_ask(identity, term, rank, peers[rank], connect) for rank in ranks))
    return [Neighbour(rank, standing) for rank, standing in zip(ranks, answers, strict=True) if standing is not None]


async def _ask(identity: Identity, term: int, rank: int, peer: Peer, connect: Open) -> Standing | None:
    async def ask(host: str, port: int) -> Standing:
        reader, writer = await connect(host, port)
        try:
            check_member(writer, identity, rank)
            writer.write(question(identity, rank, term))
            return parse(Standing, await reader.readline())
        finally:
            writer.transport.abort()

    async def ask_at_all() -> Standing | None:
        for address in peer.addresses:
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, TimeoutError, ProtocolError, ValueError):
                return await asyncio.wait_for(ask(*address), DIAL_SECONDS)
        return None

    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        return await asyncio.wait_for(ask_at_all(), _ASK_SECONDS)
    return None


def check_member(writer: asyncio.StreamWriter, identity: Identity, rank: int) -> None:
    """Check that the other end is a member of this run.

    Raises:
        ssl.SSLError: it has another certificate.
    """
    names = (writer.get_extra_info("peercert") or {}).get("subjectAltName", ())
    if identity.certificates is not None and ("URI", member_uri(identity.run_id, rank)) not in names:
        raise ssl.SSLError(f"its certificate is not that of rank {rank}")


def hosts_of(peer: Peer) -> list[str]:
    """Return the addresses of a member's machine, the fastest route first."""
    return list(dict.fromkeys(host for host, _ in peer.addresses))
