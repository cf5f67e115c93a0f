"""A member looks for another coordinator, by the rules of :mod:`training.exchange.group.election`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace

from profiles.errors import MusterError
from training.exchange.coordinator_protocol import MAX_STATUS, GroupStatus, Peer, Report, Standing, encode_line
from training.exchange.group.election import (
    ASK_AGAIN_AFTER,
    DIAL_SECONDS,
    ELECT_AFTER,
    LOST_AFTER,
    PREPARE_AFTER,
    STANDS_FOR,
    Neighbour,
    StandInCoordinator,
    Successor,
    ask_all,
    choose,
    hosts_of,
)
from training.exchange.group.join_config import JoinConfig
from training.exchange.group.quorum import may_elect
from training.exchange.links.dialling import send_small_segments
from training.exchange.links.handshake import tls_contexts


class Succession:
    """Which coordinator a member follows.

    Args:
        report: returns the member's state.
    """

    def __init__(self, joining: JoinConfig, report: Callable[[], Report]) -> None:
        self._joining, self._report, self._rank = joining, report, joining.rank
        self._stand_in, self.allegiance = joining.stand_in, joining.allegiance
        _, self._context = tls_contexts(joining.certificates)
        self._settled_at = math.inf if joining.allegiance.followed is None else time.monotonic()
        self._chosen_at = -math.inf
        self._is_able, self._is_challenged = joining.stand_in is not None, False
        self._is_prepared, self._reaches_enough = False, True
        self._searching: asyncio.Future[Successor | None] | None = None

    @property
    def endpoints(self) -> tuple[str, str]:
        """Current addresses of the coordinator, and of the relay if that is not on its machine."""
        if self.allegiance.successor is None:
            return self._joining.endpoints
        host, port = self.allegiance.hosts[0], self.allegiance.successor.port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ""

    @property
    def is_local(self) -> bool:
        """Whether the coordinator is on this machine."""
        successor = self.allegiance.successor
        return self._joining.local if successor is None else successor.carrier == self._rank

    @property
    def is_on_trial(self) -> bool:
        """Whether this member has gone to another coordinator, which has not said a word of sense yet."""
        return self.allegiance.successor != self.allegiance.followed

    @property
    def elects_at(self) -> float:
        """When this member looks for another coordinator, by the monotonic clock."""
        return self._settled_at + ELECT_AFTER if self._is_able else math.inf

    def settle(self) -> None:
        """Note that the group goes on under the present coordinator."""
        self._settled_at, self._is_able = time.monotonic(), self._stand_in is not None

    def rotate(self) -> None:
        """Dial the next address of the coordinator's machine; the coordinator before, if the one that this member went
        to has not answered, and so has not its vote."""
        allegiance = self.allegiance
        if self.is_on_trial and time.monotonic() > self._chosen_at + STANDS_FOR:
            allegiance.successor, allegiance.hosts = allegiance.followed, self._hosts_of(allegiance.followed)
        elif allegiance.hosts:
            allegiance.hosts.append(allegiance.hosts.pop(0))

    def _hosts_of(self, successor: Successor | None) -> list[str]:
        """Return the addresses of a coordinator's machine, as far as they are known."""
        if successor is None or successor.carrier == self._rank:
            return ["127.0.0.1"] if successor is not None else []
        return hosts_of(self.allegiance.peers.get(successor.carrier, Peer(name="")))

    def meet(self, status: GroupStatus) -> None:
        """Note who was dropped for good, and the members of a new mesh, who are asked if the coordinator is lost; those
        before are asked, too: one that was cut off may have gone to a later coordinator, and cannot come back from
        there."""
        if status.epoch:  # else the coordinator does not know yet what those before have said
            self.allegiance.barred = set(status.barred)
        if status.form is not None:
            self.allegiance.peers = {**self.allegiance.peers, **status.form.peers}

    def release(self) -> None:
        """Let a coordinator on this machine serve until the last member has left."""
        if self._stand_in is not None:
            self._stand_in.release()

    def answer_question(self, term: int) -> bytes:
        """Return what another member is told about this one's coordinator, a line.

        Args:
            term: of the coordinator that the other one follows: members of an earlier term come to it.
        """
        self._is_challenged |= term > self._standing.term
        return encode_line(self._standing)

    @property
    def _standing(self) -> Standing:
        followed, lost = self.allegiance.followed, time.monotonic() - self._settled_at > LOST_AFTER
        standing = Standing(report=self._report(), lost=lost, able=self._is_able and self._reaches_enough)
        if followed is None:
            return standing
        coordinator = {"term": followed.term, "carrier": followed.carrier, "port": followed.port}
        return standing.model_copy(update=coordinator)

    def prepare(self) -> None:
        """Have a coordinator at hand in good time: on a busy machine its program takes seconds to load."""
        stand_in, away = self._stand_in, time.monotonic() - self._settled_at
        if stand_in is not None and self._is_able and self._is_prepared != (away > PREPARE_AFTER):
            self._is_prepared = not self._is_prepared
            asyncio.get_running_loop().run_in_executor(
                None, stand_in.prepare if self._is_prepared else stand_in.discard
            )

    def begin_search(self) -> None:
        """Look for another coordinator, if the present one has been away for too long or somebody follows a later one;
        the search goes on beside what is sent and received."""
        is_due = time.monotonic() > max(self._settled_at + ELECT_AFTER, self._chosen_at + ASK_AGAIN_AFTER)
        if self._searching is None and self._stand_in is not None and (is_due or self._is_challenged):
            self._searching = asyncio.ensure_future(self._find_successor(self._stand_in, is_due))

    async def wait(self) -> None:
        """Wait for the end of the search; a machine on which no program starts does not keep it from dialling."""
        if self._searching is not None:
            await asyncio.wait({self._searching}, timeout=STANDS_FOR)

    def result(self, is_held: bool) -> Successor | None:
        """Return what the search has found; ``None``: nothing, or it has not ended.

        Args:
            is_held: the group does not go on under the present coordinator; else none of this machine is of use.
        """
        search = self._searching
        if search is None or not search.done():
            return None
        self._searching = None
        successor = search.result()
        if successor is not None and successor.carrier == self._rank and not is_held and self._stand_in is not None:
            self._stand_in.stop()  # started while the group came back
            return None
        return successor if self._hosts_of(successor) else None

    async def _find_successor(self, stand_in: StandInCoordinator, is_due: bool) -> Successor | None:
        """Ask the others, and return the coordinator to follow.

        Args:
            is_due: the present one has been away for too long.
        """
        self._is_challenged = False
        asker, peers = Neighbour(self._rank, self._standing), self.allegiance.peers
        answers = await ask_all(self._joining.identity, asker.standing.term, peers, self.open_member)
        self._reaches_enough = may_elect([asker, *answers])
        able = self._is_able and self._reaches_enough
        successor = choose(Neighbour(self._rank, asker.standing.model_copy(update={"able": able})), answers)
        if is_due and asker.standing.carrier == asker.rank and time.monotonic() > self._chosen_at + STANDS_FOR:
            self._is_able = False  # nobody can dial it here: another one is to be elected
        if successor is None or (successor.carrier not in peers and not successor.port):
            return None
        if successor.port:
            return successor if await self._can_reach(successor) else None
        try:
            port = await asyncio.get_running_loop().run_in_executor(None, stand_in.start, successor.term)
        except (MusterError, OSError):
            self._is_able = False
            return None
        return replace(successor, port=port)

    async def _can_reach(self, successor: Successor) -> bool:
        """Whether the coordinator on another member's machine can be dialled."""
        for host in self._hosts_of(successor):
            with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, successor.port), DIAL_SECONDS)
                writer.transport.abort()
                return True
        return False

    def follow(self, successor: Successor) -> None:
        """Dial another coordinator from now on."""
        self.allegiance.successor, self._chosen_at = successor, time.monotonic()
        self.allegiance.hosts = self._hosts_of(successor)

    def note_vote(self) -> None:
        """Note that this member is connected with the coordinator it dials, and never goes back to an earlier one."""
        if self.allegiance.successor is None or not self.is_on_trial:
            return
        self.allegiance.followed = self.allegiance.successor
        if self._stand_in is not None and not self.is_local:
            self._stand_in.stop()
        self._joining.on_election(self.allegiance.successor)

    async def open_member(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await open_tls((host, port), self._context, "muster-member")


async def open_tls(
    address: tuple[str, int], context: ssl.SSLContext | None, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address, through TLS if there is a context.

    Args:
        name: of the server, for its certificate.
    """
    loop = asyncio.get_running_loop()
    (family, _, _, _, socket_address), *_ = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    connection = socket.socket(family)
    try:
        connection.setblocking(False)
        send_small_segments(connection)  # messages are small anyway, and large packets may get lost
        await loop.sock_connect(connection, socket_address)
    except BaseException:
        connection.close()
        raise
    name_there = name if context is not None else None  # from here on the socket is asyncio's to close
    return await asyncio.open_connection(sock=connection, ssl=context, server_hostname=name_there, limit=MAX_STATUS)
