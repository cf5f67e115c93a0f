"""Links and meshes of real connections on loopback, several members in one process."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import timed_out, until

from profiles.errors import BadInput
from profiles.schema import Transport
from training.exchange.base import ExchangeError, ExchangeTimeout
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.links.link import MAX_EARLY, PeerLost
from training.exchange.links.listener import ConnectTimeouts, Identity, Listener
from training.exchange.links.sealing import MAX_FRAME
from training.exchange.mean.mesh import Mesh
from training.exchange.torch_backend.point_to_point import PointToPointLinks
from training.exchange.torch_backend.tensor_operations import Reducer, TensorReduction, view

pytestmark = pytest.mark.slow

RUN = "run"
PATIENCE = 60.0
T = TypeVar("T")


def told(mesh: Mesh) -> dict[int, str]:
    """Return how what a member sends to each other one goes."""
    return {peer: str(way) for peer, way in mesh.routes.items()}


def at_once(*calls: Callable[[], T]) -> list[T]:
    """Carry all out side by side; raise what the first raised."""
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def call(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]


class Group:
    """Members 0 to n - 1, each with its listener."""

    def __init__(
        self, members: int, folder: Path | None, timeouts: ConnectTimeouts | None = None, transport: Transport = "auto"
    ) -> None:
        self.listeners = [
            Listener(
                "127.0.0.1", Identity(RUN, rank, folder and folder / f"member-{rank}", transport), timeouts=timeouts
            )
            for rank in range(members)
        ]
        self.addresses = {rank: [one.address] for rank, one in enumerate(self.listeners)}
        self._formed = 0
        self._stack = ExitStack()

    def form(self, addresses: Mapping[int, Sequence[tuple[str, int]]] | None = None) -> list[Mesh]:
        self._formed += 1
        channel, found = f"group/{self._formed}", addresses or self.addresses
        meshes = at_once(*(lambda one=one: Mesh.form(one, channel, found) for one in self.listeners))  # type: ignore[misc]
        for mesh in meshes:
            self._stack.callback(mesh.close)
        return meshes

    def close(self) -> None:
        self._stack.close()
        for listener in self.listeners:
            listener.close()


@pytest.fixture(scope="module", params=["sealed", "clear"])
def three(request: pytest.FixtureRequest, certificates: Path) -> Iterator[list[Mesh]]:
    group = Group(3, None if request.param == "clear" else certificates)
    yield group.form()
    group.close()


@pytest.fixture
def group(certificates: Path) -> Iterator[Group]:
    made = Group(3, certificates)
    yield made
    made.close()


def random_vectors(elements: int, dtype: torch.dtype, members: int = 3) -> list[torch.Tensor]:
    return [torch.randn(elements, generator=torch.Generator().manual_seed(r)).mul(9).to(dtype) for r in range(members)]


def reduced(meshes: list[Mesh], vectors: list[torch.Tensor]) -> None:
    reducer = Reducer(torch.distributed.ReduceOp.SUM, len(meshes))
    operations = [mesh.reduce(TensorReduction(vector, mesh, reducer)) for mesh, vector in zip(meshes, vectors)]
    for one in operations:
        one.wait(PATIENCE)


@pytest.mark.parametrize("elements", [1, 2, 191, 200_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_hold_the_sum_in_rank_order_to_the_bit(three: list[Mesh], elements: int, dtype: torch.dtype) -> None:
    vectors = random_vectors(elements, dtype)
    expected = (vectors[0] + vectors[1]) + vectors[2]
    reduced(three, vectors)
    for vector in vectors:
        assert torch.equal(vector, expected)


def test_all_links_of_a_member_share_a_thread(three: list[Mesh]) -> None:
    assert [len({link.loop for link in mesh.links()}) for mesh in three] == [1, 1, 1]


def test_several_reductions_are_under_way_at_once(three: list[Mesh]) -> None:
    sizes = [400_000, 100, 90_000, 250_000]
    all_vectors = [random_vectors(size, torch.float32) for size in sizes]
    expected = [(a + b) + c for a, b, c in all_vectors]
    reducer = Reducer(torch.distributed.ReduceOp.SUM, 3)
    operations = [
        mesh.reduce(TensorReduction(vectors[mesh.rank], mesh, reducer)) for mesh in three for vectors in all_vectors
    ]
    for one in operations:
        one.wait(PATIENCE)
    assert all(torch.equal(v, right) for vectors, right in zip(all_vectors, expected) for v in vectors)


def test_bytes_are_those_of_a_reduce_scatter_and_an_all_gather(three: list[Mesh]) -> None:
    before = [mesh.bytes_sent for mesh in three]
    reduced(three, random_vectors(1_000_000, torch.float32))
    least = 2 * (2 / 3) * 4_000_000
    for mesh, start in zip(three, before):
        assert least <= mesh.bytes_sent - start <= 1.005 * least


@given(sizes=st.lists(st.integers(0, 3 * MAX_FRAME + 1), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_messages_of_any_size_arrive_as_they_were(three: list[Mesh], sizes: list[int]) -> None:
    sent = {mesh.rank: [memoryview(bytes([mesh.rank + 1]) * size) for size in sizes] for mesh in three}
    rooms = {mesh.rank: {peer: [bytearray(size) for size in sizes] for peer in mesh.peers} for mesh in three}
    operations = [
        mesh.exchange(
            dict.fromkeys(mesh.peers, sent[mesh.rank]),
            {peer: [memoryview(room) for room in rooms[mesh.rank][peer]] for peer in mesh.peers},
        )
        for mesh in three
    ]
    for one in operations:
        one.wait(PATIENCE)
    assert all(
        bytes(room) == bytes(message)
        for by_peer in rooms.values()
        for peer, received in by_peer.items()
        for room, message in zip(received, sent[peer])
    )


def test_messages_wait_for_who_asks_for_their_tag(group: Group) -> None:
    a, b, _ = group.form()
    for tag in (5, 6, 7):
        a.send(1, tag, memoryview(bytes([tag]) * tag))
    for tag in (7, 5, 6):
        room = bytearray(tag)
        b.receive(0, tag, memoryview(room)).wait(PATIENCE)
        assert bytes(room) == bytes([tag]) * tag


def test_what_nobody_asks_for_takes_no_more_than_its_bound(group: Group) -> None:
    a, b, _ = group.form()
    waiting = b.receive(0, 9, memoryview(bytearray(1)))
    data = memoryview(bytes(MAX_EARLY // 3))
    for _ in range(4):
        a.send(1, 5, data)
    with pytest.raises(PeerLost, match="rank 0 is lost: it is doing another operation"):
        waiting.wait(PATIENCE)


def test_a_longer_message_than_fits_ends_the_connection(group: Group) -> None:
    a, b, _ = group.form()
    a.send(1, 1, memoryview(bytes(11)))
    with pytest.raises(PeerLost, match="11 bytes for operation 1 where 10 belong"):
        b.receive(0, 1, memoryview(bytearray(10))).wait(PATIENCE)


def test_a_lost_member_ends_all_that_is_under_way_and_is_named(group: Group) -> None:
    meshes = group.form()
    vectors = random_vectors(2_000_000, torch.float32)
    reducer = Reducer(torch.distributed.ReduceOp.SUM, 3)
    operations = [mesh.reduce(TensorReduction(vector, mesh, reducer)) for mesh, vector in zip(meshes[:2], vectors)]
    for link in meshes[2].links():
        link.cut()
    for one in operations:
        with pytest.raises(PeerLost, match="rank 2 is lost") as caught:
            one.wait(PATIENCE)
        assert caught.value.rank == 2


def test_a_busy_member_that_hears_of_a_loss_late_is_told_who_it_was(group: Group) -> None:
    a, b, _ = group.form()
    sent = list[int]()
    b.send(0, 1, memoryview(bytes(50 << 20)))  # more than all buffers on the way hold
    until(lambda: sent.append(b.outgoing(0).bytes) or (sent[-1] > 0 and sent[-6:] == sent[-1:] * 6))
    b.break_off(PeerLost(2, "rank 2", "a test"))
    until(lambda: b.incoming(2)._cut)
    with pytest.raises(PeerLost, match="rank 2 is lost: a test"):
        a.receive(1, 1, memoryview(bytearray(50 << 20))).wait(PATIENCE)


def test_a_new_mesh_after_a_loss_reads_nothing_of_the_old_one(group: Group) -> None:
    first = group.form()
    first[0].send(1, 1, memoryview(b"old"))
    for mesh in first:
        mesh.break_off(PeerLost(2, "rank 2", "a test"))
    vectors = random_vectors(5000, torch.float32)
    expected = (vectors[0] + vectors[1]) + vectors[2]
    reduced(group.form(), vectors)
    assert all(torch.equal(vector, expected) for vector in vectors)


def test_who_was_stopped_itself_takes_that_for_nobodys_silence(group: Group) -> None:
    looks, away = list[int](), 0.0

    def clock() -> float:
        looks.append(1)
        return away

    a, b, _ = group.form()
    watched = PointToPointLinks(a, group.listeners[0], "watched", group.addresses, 0.2, clock=clock)
    room = bytearray(3)
    waiting = a.receive(1, 1, memoryview(room))
    until(lambda: len(looks) > 20)
    away = 10 * PATIENCE
    seen = len(looks)
    until(lambda: len(looks) > seen + 20)
    b.send(0, 1, memoryview(b"new"))
    waiting.wait(PATIENCE)
    assert room == b"new" and a.lost is None
    watched.close(0.0)


def test_a_member_that_cannot_be_dialled_dials_both_ways(group: Group) -> None:
    meshes = group.form({**group.addresses, 0: []})
    vectors = random_vectors(50_000, torch.float32)
    expected = (vectors[0] + vectors[1]) + vectors[2]
    reduced(meshes, vectors)
    assert torch.equal(vectors[0], expected)


def test_the_next_address_is_tried_where_the_first_answers_nobody(group: Group) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = unused.getsockname()
        meshes = group.form({rank: [dead, *addresses] for rank, addresses in group.addresses.items()})
    assert meshes[0].peers == [1, 2]


def test_who_is_missing_is_named(certificates: Path) -> None:
    group = Group(2, certificates)
    form = functools.partial(
        Mesh.form, group.listeners[0], "c", {0: [], 1: [("127.0.0.1", 1)]}, {0: "studio", 1: "tower"}
    )
    timed_out(form, ExchangeTimeout, r"no connection with tower: 127\.0\.0\.1:\d+")
    group.close()


def test_a_certificate_of_another_rank_or_run_is_refused(certificates: Path, tmp_path: Path) -> None:
    issue_run_certificates(tmp_path, "other", [1], ["127.0.0.1"])
    host = Listener("127.0.0.1", Identity(RUN, 0, certificates / "member-0"))
    for folder in (tmp_path / "member-1", certificates / "member-2"):
        false = Listener("127.0.0.1", Identity(RUN, 1, folder))
        with pytest.raises(ExchangeError, match="no connection with rank 0"):
            Mesh.form(false, "c", {0: [host.address], 1: []}, seconds=1.0)
        false.close()
    assert not host.arrivals
    host.close()


def test_without_certificates_only_loopback_is_allowed() -> None:
    with pytest.raises(BadInput, match="issue certificates"):
        Listener("0.0.0.0", Identity(RUN, 0, None))


def test_strangers_words_are_hung_up_on_and_others_still_come_in(certificates: Path) -> None:
    group = Group(2, certificates)
    for word in (b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"muster 1" + bytes(300)):
        stranger = socket.create_connection(group.listeners[0].address, PATIENCE)
        stranger.sendall(word)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(100):
                pass
        stranger.close()
    assert not group.listeners[0].arrivals
    group.form()
    group.close()


def test_a_closed_listener_leaves_no_thread(certificates: Path) -> None:
    before = set(threading.enumerate())
    group = Group(2, certificates)
    group.form()
    group.close()
    until(lambda: not [one for one in set(threading.enumerate()) - before if one.name != "hypothesis"])


def test_a_view_is_the_tensors_own_memory() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    view(tensor)[:2] = b"\x80\x3f"
    assert tensor[0] == 1.0


def test_whoever_waits_for_a_connection_that_was_closed_hears_of_its_end(certificates: Path) -> None:
    group = Group(2, certificates)
    mesh, _ = group.form()
    transfer = mesh.gather(memoryview(b"x"), {1: memoryview(bytearray(9))}, lambda peer, size: None, None, 1)
    mesh.incoming(1).close(PATIENCE)
    transfer.submit(start=False).drive(seconds=PATIENCE)
    with pytest.raises(PeerLost):
        transfer.wait(PATIENCE)
    group.close()
