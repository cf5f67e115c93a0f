"""Members that send everything through TLS itself (``transport = tls``), and pairs of which only one does."""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from coordinated_lab import RUN, lab, means
from test_mesh import PATIENCE, Group, random_vectors, reduced
from waiting import until

from profiles.files.resolve import profile_from_options
from profiles.schema import Transport
from training.exchange.base import ExchangeError
from training.exchange.links.handshake import RECEIVES, SENDS, Handshakes, HandshakeTimeout
from training.exchange.links.link import PeerLost
from training.exchange.links.listener import ConnectTimeouts, Identity, Listener
from training.exchange.links.sealing import MAX_FRAME
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.torch_backend.tensor_operations import Reducer, TensorReduction
from training.run.local_plan import plan_local_run
from training.workers.worker import Rendezvous, connect


@pytest.fixture
def three(certificates: Path) -> Iterator[list[Mesh]]:
    group = Group(3, certificates, transport="tls")
    yield group.form()
    group.close()


def is_tls(mesh: Mesh) -> bool:
    return all(isinstance(link.socket, ssl.SSLSocket) and link.socket.version() == "TLSv1.3" for link in mesh.links())


def test_sums_have_the_bits_of_their_rank_order(three: list[Mesh]) -> None:
    assert all(map(is_tls, three))
    for elements in (1, 1000, MAX_FRAME // 4, 3 * MAX_FRAME // 4 + 1):
        vectors = random_vectors(elements, torch.float32)
        expected = (vectors[0] + vectors[1]) + vectors[2]
        reduced(three, vectors)
        assert all(torch.equal(vector, expected) for vector in vectors)


def test_messages_of_any_size_arrive_as_they_were(three: list[Mesh]) -> None:
    for tag, size in enumerate((0, 1, (16 << 10) - 24, MAX_FRAME, MAX_FRAME + 1), start=1):
        room, word = bytearray(size), bytes([tag]) * size
        three[0].send(1, tag, memoryview(word))
        three[1].receive(0, tag, memoryview(room)).wait(PATIENCE)
        assert room == word


def test_a_lost_member_is_named_and_nothing_of_it_is_read_or_sent_in_clear(three: list[Mesh]) -> None:
    vectors, reducer = random_vectors(2_000_000, torch.float32), Reducer(torch.distributed.ReduceOp.SUM, 3)
    operations = [mesh.reduce(TensorReduction(vector, mesh, reducer)) for mesh, vector in zip(three[:2], vectors)]
    for link in three[2].links():
        link.cut()
    assert is_tls(three[2])  # whoever is still in the middle of something goes on through TLS, to its end
    for one in operations:
        with pytest.raises(PeerLost, match="rank 2 is lost") as caught:
            one.wait(PATIENCE)
        assert caught.value.rank == 2


@pytest.mark.parametrize("does", [SENDS, RECEIVES])
@pytest.mark.parametrize(("dials", "answers"), [("auto", "tls"), ("tls", "auto")])
def test_two_of_different_transports_say_so(
    certificates: Path, does: int, dials: Transport, answers: Transport
) -> None:
    host = Listener("127.0.0.1", Identity("run", 1, certificates / "member-1", answers))
    own = Handshakes(Identity("run", 0, certificates / "member-0", dials), ConnectTimeouts())
    patient = HandshakeTimeout(PATIENCE, lambda: False, lambda: False)
    with pytest.raises(
        ExchangeError, match="one of the two has transport = tls, the other one auto; give all the same"
    ):
        own.open_handshake(socket.create_connection(host.address), ("c", 1, does), "", 0.0, patient)
    assert not host.arrivals
    host.close()


@pytest.mark.parametrize("transport", ["auto", "tls"])
def test_the_option_of_a_plan_reaches_its_members(tmp_path: Path, transport: str) -> None:
    options = {"task": "custom", "model_path": "a:b", "dataset_path": "a:b", "transport": transport}
    plan = plan_local_run(profile_from_options("x", options), 2).model_copy(update={"run_id": RUN})
    with lab(tmp_path, 2, tls=True, elements=5000) as running, ThreadPoolExecutor(2) as pool:
        assert running.certificates is not None
        where, secrets = Rendezvous(running.address), running.certificates
        ours = {"secrets": secrets, "device": torch.device("cpu"), "emit": lambda event: None}
        join = functools.partial(connect, plan, rendezvous=lambda: where, **ours)
        for member in pool.map(join, range(2)):
            assert isinstance(member, MeshMember)
            running.members[member.rank] = member
        members = [running.members[rank] for rank in range(2)]
        until(lambda: all(member.mesh is not None for member in members))
        assert all(is_tls(member.mesh) == (transport == "tls") for member in members if member.mesh)
        vectors = random_vectors(5000, torch.float32, 2)
        assert all(
            torch.equal(one.mean, (vectors[0] + vectors[1]) / 2) for one in means(members, "x", vectors, "fp32", 1.0)
        )
