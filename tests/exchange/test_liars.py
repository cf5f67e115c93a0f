"""What a member of the run that lies cannot do to the others, nor a stranger to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from coordinated_lab import Lab, lab
from test_coordinator_hostile import dial, hello, running, serves  # noqa: F401 - the fixture
from test_election import StandInHere, mean_of
from test_mesh import Group, at_once
from waiting import PATIENCE, until

from training.exchange.base import ExchangeError
from training.exchange.coordinator_protocol import (
    MAX_STATUS,
    GroupStatus,
    HeldResults,
    MeshStart,
    Peer,
    Report,
    StateOrder,
    encode_line,
)
from training.exchange.group import succession
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.election import Successor, ask_all
from training.exchange.group.join_config import JoinConfig
from training.exchange.group.quorum import next_term
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.links.handshake import tls_contexts
from training.exchange.links.link import Outgoing, PeerLost
from training.exchange.mean.handover import TAG, JoinStateServer, channel_of, hand_over_missing
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.mean.mesh_operations import MeshGather, Meter
from training.exchange.mean.operation_log import OperationLog
from training.exchange.unauthenticated import MAX_PER_HOST
from training.records.events import MemberEvent

HUGE = struct.pack("<Q", 1 << 39)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Group]:
    issue_run_certificates(tmp_path, "run", range(2), ["127.0.0.1"])
    made = Group(2, tmp_path)
    yield made
    made.close()


def test_whom_a_member_accuses_on_its_way_out_is_not_believed_where_a_coordinator_judges(pair: Group) -> None:
    noticed: list[PeerLost] = []
    names = {0: "liar", 1: "studio", 2: "victim"}
    form = functools.partial(Mesh.form, channel="c", addresses=pair.addresses, names=names, on_lost=noticed.append)
    liar, studio = at_once(*(functools.partial(form, listener) for listener in pair.listeners))
    waiting = studio.receive(0, 1, memoryview(bytearray(1)))
    liar.outgoing(1).say_farewell(PeerLost(2, "victim", "it went away"))
    with pytest.raises(PeerLost, match="with liar is lost"):
        waiting.wait(PATIENCE)
    until(lambda: 0 in {lost.rank for lost in noticed})  # the liar's own end names the victim, and nobody else's does
    for mesh in (liar, studio):
        mesh.give_up()


def test_a_result_that_is_larger_than_one_can_be_takes_no_memory(pair: Group) -> None:
    liar, studio = pair.form()
    told = memoryview(encode_line(HeldResults(full=1, dropped=0, results=((1, (), (0, 1)),))))
    liar.gather(told, {1: memoryview(bytearray(1000))}, lambda peer, size: None, None, 0).submit()
    liar.send(1, TAG, memoryview(HUGE))
    peers = {rank: Peer(name=f"m{rank}") for rank in range(2)}
    with pytest.raises(PeerLost, match="549755813888 bytes") as caught:
        hand_over_missing(
            studio, MeshStart(peers=peers, stand=1, donor=0, behind={1: 0}), OperationLog(1), threading.Lock(), 1000
        )
    assert caught.value.rank == 0


def test_a_state_that_is_larger_than_one_can_be_takes_no_memory(pair: Group) -> None:
    peers = {rank: Peer(name=f"m{rank}", addresses=(pair.listeners[rank].address,)) for rank in range(2)}
    order, deadline = StateOrder(number=1, donor=0, peers=peers), time.monotonic() + PATIENCE
    newcomer = JoinStateServer(pair.listeners[1])

    def lie() -> None:
        found = pair.listeners[0].meet(channel_of(order), 1, True, peers[1].addresses, deadline)
        link = Outgoing(found, 1, {1: "m1"}, lambda lost: None)
        link.submit(lambda one: one.send(TAG, memoryview(HUGE)), lambda error: None)
        link.close(PATIENCE)

    def take() -> None:
        with pytest.raises(ExchangeError, match="549755813888 bytes, where 1000 may come"):
            newcomer.fetch(order, deadline, None, lambda: True, 1000)

    at_once(lie, take)


@pytest.mark.parametrize("lies", [b"not what this gather begins with", b"", b"1"])
def test_what_is_of_another_gather_ends_the_connection(pair: Group, lies: bytes) -> None:
    liar, studio = pair.form()
    own = MeshGather(1, "x", b"1", Meter())
    waiting = own.begin(studio, lambda error: None).submit()
    liar.gather(memoryview(lies), {1: memoryview(bytearray(100))}, lambda peer, size: None, None, 1).submit()
    with pytest.raises(PeerLost, match="another exchange than the gather 'x'") as caught:
        waiting.wait(PATIENCE)
    assert caught.value.rank == 0 and not caught.value.hung_up


def test_whoever_only_sees_a_connection_end_says_so(pair: Group) -> None:
    noticed: list[PeerLost] = []
    form = functools.partial(Mesh.form, channel="c", addresses=pair.addresses, on_lost=noticed.append)
    gone, studio = at_once(*(functools.partial(form, listener) for listener in pair.listeners))
    waiting = studio.receive(0, 1, memoryview(bytearray(1)))
    gone.give_up()
    with pytest.raises(PeerLost):
        waiting.wait(PATIENCE)
    assert [(lost.rank, lost.hung_up) for lost in noticed] == [(0, True)]
    studio.give_up()


def test_a_member_is_called_what_the_plan_calls_it(running: Lab) -> None:  # noqa: F811
    connection = dial(running, hello(2, name="machine-0"), encode_line(Report()))
    until(lambda: running.statuses(2)[-1] == "joined")
    assert [e.name for e in running.events if isinstance(e, MemberEvent) and e.member == 2][-1] == "machine-2"
    connection.close()
    until(lambda: running.statuses(2)[-1] == "lost")
    assert serves(running)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_strangers_of_one_host_that_say_nothing_keep_no_member_from_the_coordinator(tmp_path: Path) -> None:
    def stranger() -> socket.socket:
        return socket.create_connection(("127.0.0.1", one.port), PATIENCE, ("127.0.0.2", 0))

    with lab(tmp_path, 2, tls=True) as one:
        silent = [stranger() for _ in range(MAX_PER_HOST)]
        until(lambda: len(one.coordinator.unauthenticated) == MAX_PER_HOST)
        with stranger() as surplus:
            assert surplus.recv(1) == b""  # before any handshake
        one.connect_all()
        for connection in silent:
            connection.close()
        until(lambda: not len(one.coordinator.unauthenticated))


def test_a_members_certificate_does_not_pass_for_the_coordinators(tmp_path: Path) -> None:
    with lab(tmp_path, 2, tls=True) as one:
        assert one.certificates is not None
        liar = Coordinator(one.config.model_copy(update={"certificates": one.certificates / "member-1"}))
        try:
            own, address = one.certificates / "member-0", f"127.0.0.1:{liar.start()}"
            with pytest.raises(ExchangeError, match="its certificate does not match"):
                MeshMember(JoinConfig(address, own, one.config.run_id, 0, 2, "machine-0")).join(PATIENCE)
        finally:
            liar.stop()


class LyingCoordinator:
    """Takes members that dial, with the keys of one of them, and sends each these bytes."""

    def __init__(self, keys: Path, lies: bytes) -> None:
        self._context, self._lies = tls_contexts(keys)[0], lies
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.dialled = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._lie, args=self._listening.accept()[:1], daemon=True).start()

    def _lie(self, connection: socket.socket) -> None:
        assert self._context is not None
        with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as one:
            one.recv(1)
            self.dialled += 1
            one.sendall(self._lies)
            while one.recv(1 << 16):
                continue

    def close(self) -> None:
        self._listening.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("carrier", "lies"),
    [
        (2, b"rubbish\n"),
        (2, b"x" * (MAX_STATUS + 1)),
        (2, encode_line(GroupStatus(failed="you are dropped"))),
        (1, b""),  # whose keys the liar does not have
    ],
    ids=["rubbish", "a line without end", "drops all", "another's name"],
)
def test_a_coordinator_that_nobody_has_elected_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: int, lies: bytes
) -> None:
    monkeypatch.setattr(succession, "STANDS_FOR", 0.3)
    with lab(tmp_path, 3, tls=True, elects=True) as one:
        with ThreadPoolExecutor(3) as pool:
            members = list(pool.map(lambda rank: one.connect(rank, stand_in=StandInHere(one, rank)), range(3)))
        assert mean_of(members, "before") == [1.0] * 3
        assert one.certificates is not None
        liar = LyingCoordinator(one.certificates / "member-2", lies)
        line, term = members[2]._client.succession, next_term(0, 2)
        line.allegiance.followed = Successor(term, carrier, liar.port)
        question = functools.partial(
            ask_all, members[2]._joining.identity, term, line.allegiance.peers, line.open_member
        )
        until(lambda: len(asyncio.run(question())) == 2)  # it waits for two seconds, a busy machine for longer
        until(lambda: liar.dialled >= 2 or carrier == 1)
        until(lambda: mean_of(members, "after") == [1.0] * 3)  # at first the others may go on without one
        liar.close()
