"""Engine ``nccl`` over gloo: the mesh's membership, and long means through a process group of stock torch."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from coordinated_lab import Lab, cut, lab, means
from stream_reference import contribution, stream_means

from tests.waiting import PATIENCE, until
from training.exchange.base import Contribution, ExchangeError, JoiningState, MeanResult, weighted_mean
from training.exchange.codecs import codec_by_name, roundtrip
from training.exchange.codecs.microscaling import Int8Codec
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.residuals import MeanEncoder, MeanResiduals, Residual
from training.exchange.stock_torch import torch_group
from training.exchange.stock_torch.mesh_store import MeshStore
from training.exchange.stock_torch.torch_group import TorchGroup, TorchMesh, UnusableMember, choose_backend
from training.exchange.stock_torch.torch_mean import Attempt

pytestmark = pytest.mark.slow

FP32 = codec_by_name("fp32")
CODECS = ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.05"]
SIZES = [0, 1, 37, 5_000, 300_000, 900_001]
"""Over the links and through torch, parts of blocks, several pieces, and shards of unequal size."""


def values_of(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank + 1))


def mesh_of(member: MeshMember) -> TorchMesh:
    return cast(TorchMesh, until(lambda: member.mesh))


def group_of(member: MeshMember) -> Any:
    """The process group of a member's mesh."""
    mesh = mesh_of(member)
    assert mesh.group is not None
    return mesh.group


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_codec_gives_the_bits_of_the_rank_order_mean(tmp_path: Path, world: int) -> None:
    weights = [3.0, 1.5, 7.0][:world]
    cases = [(codec_by_name(name), elements) for name in CODECS for elements in SIZES]
    with lab(tmp_path, world, engine="nccl") as running:
        members = running.connect_all()
        pending = []
        for codec, elements in cases:
            vectors = [values_of(rank, elements) for rank in range(world)]
            ours = zip(members, vectors, weights)
            pending.append([m.start_mean("x", values, weight, codec) for m, values, weight in ours])
            for values in vectors:  # they were copied
                values.fill_(float("nan"))
        for (codec, elements), operation in zip(cases, pending):
            decoded = [(weight, roundtrip(codec, values_of(rank, elements))) for rank, weight in enumerate(weights)]
            expected = roundtrip(codec.reply, weighted_mean(decoded))
            results = [one.wait(60) for one in operation]
            assert all(torch.equal(one.mean, expected) for one in results), (codec.name, elements)
            assert {(r.weight, r.members, r.included) for r in results} == {(sum(weights), tuple(range(world)), True)}
        assert {group_of(member).backend for member in members} == {"gloo" if world > 1 else ""}


@pytest.mark.parametrize("world", [1, 2])
def test_gloo_in_the_place_of_nccl_is_said_in_one_line(tmp_path: Path, world: int) -> None:
    with lab(tmp_path, world, engine="nccl") as running:
        means(running.connect_all(), "x", [values_of(rank, 10) for rank in range(world)], "fp32")
        line = "engine = nccl: gloo carries the exchange: NCCL needs a CUDA device of its own for each member"
        assert running.told == [(0, line)][: world - 1]


def test_members_without_weight_take_part(tmp_path: Path) -> None:
    with lab(tmp_path, 3, engine="nccl") as running:
        members = running.connect_all()
        for weights in ([0.0, 2.0, 0.0], [0.0, 0.0, 0.0]):
            pending = [m.start_mean("x", values_of(m.rank, 70_000), weights[m.rank], FP32) for m in members]
            for result in (one.wait(60) for one in pending):
                assert result.weight == sum(weights)
                assert torch.equal(result.mean, values_of(1, 70_000) * (sum(weights) > 0))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec_name", ["fp32", "mxfp4"])
def test_bytes_are_what_theory_says(tmp_path: Path, world: int, codec_name: str) -> None:
    elements = 1_000_000
    theory = 2 * (world - 1) / world * codec_by_name(codec_name).max_encoded_bytes(elements)
    with lab(tmp_path, world, engine="nccl") as running:
        members = running.connect_all()
        means(members, "x", [values_of(rank, elements) for rank in range(world)], codec_name)
        for member in members:
            assert member.traffic.bytes_sent == pytest.approx(theory, rel=0.03)
            assert member.traffic.bytes_received == pytest.approx(theory, rel=0.03)


def test_shards_move_the_bytes_and_no_bit(tmp_path: Path) -> None:
    vectors = [values_of(rank, 300_000) for rank in range(3)]
    with lab(tmp_path, 3, engine="nccl") as running:
        members = running.connect_all(shards={0: 1.0, 1: 0.0, 2: 0.0})
        results = means(members, "x", vectors, "bf16")
        sent = [group_of(member).bytes_sent for member in members]
    codec = codec_by_name("bf16")
    expected = roundtrip(codec, weighted_mean([(r + 1.0, roundtrip(codec, v)) for r, v in enumerate(vectors)]))
    assert all(torch.equal(result.mean, expected) for result in results)
    assert sent[0] > 1.9 * sent[1] > 1.9 * 600_000


def test_what_is_not_finite_stays_with_its_member_and_all_are_told(tmp_path: Path) -> None:
    with lab(tmp_path, 3, engine="nccl") as running:
        pending = []
        for member in running.connect_all():
            values = torch.full((40_000,), float("nan") if member.rank == 1 else 1.0 + member.rank)
            flags = bytes([1 << member.rank])
            pending.append(member.start_mean("x", values, 1.0, codec_by_name("int8"), flags))
        for rank, result in enumerate(one.wait(60) for one in pending):
            assert (result.mean[0].item(), result.weight, result.refused, result.flags) == (2.0, 2.0, (1,), b"\x05")
            assert result.is_finite == (rank != 1) and result.left_out == (((0, 40_000),) if rank == 1 else ())


@pytest.mark.parametrize(("codec_name", "elements"), [("int8", 50_000), ("mxfp4", 900_001)])
def test_the_means_of_a_stream_are_the_meshs_also_after_a_restart(
    tmp_path: Path, codec_name: str, elements: int
) -> None:
    expected, codec = stream_means(codec_name, elements, 3, 4), codec_by_name(codec_name)
    kept: list[Residual | None] = [None] * 3
    for start in (0, 2):
        with lab(tmp_path, 3, engine="nccl") as running:
            members = running.connect_all()
            for member, residual in zip(members, kept):
                if residual is not None:
                    member.restore_residual("s", residual)
            for number in (start, start + 1):
                pending = [
                    m.start_mean("s", contribution(m.rank, number, elements), 1.0, codec, stream="s") for m in members
                ]
                assert all(torch.equal(one.wait(60).mean, expected[number]) for one in pending)
            kept = [member.residual("s") for member in members]


def test_operations_end_in_their_order(tmp_path: Path) -> None:
    """A short one goes over the links and is not done before a long one that was begun earlier."""
    with lab(tmp_path, 2, engine="nccl") as running:
        members = running.connect_all()
        for _ in range(10):
            long = [m.start_mean("long", torch.ones(2_000_000), 1.0, FP32) for m in members]
            short = [m.start_gather("short", b"") for m in members]
            for one, other in zip(short, long):
                one.wait(60)
                assert other.done()


# ----------------------------------------------------------------------------------------------------------- failures


class Broken(Int8Codec):
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        raise ValueError("this codec breaks")


def test_a_member_whose_codec_breaks_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with lab(tmp_path, 3, engine="nccl") as running:
        members = running.connect_all()
        codecs = [Int8Codec(), Broken(), Int8Codec()]
        pending = [m.start_mean("x", torch.ones(100_000), 1.0, codec) for m, codec in zip(members, codecs)]
        assert [pending[rank].wait(60).members for rank in (0, 2)] == [(0, 2)] * 2
        with pytest.raises(ExchangeError, match="this codec breaks"):
            pending[1].wait(60)


def test_members_at_different_exchanges_are_found_out(tmp_path: Path) -> None:
    with lab(tmp_path, 2, engine="nccl") as running:
        pending = [m.start_mean(f"x/{m.rank}", torch.ones(100_000), 1.0, FP32) for m in running.connect_all()]
        for one in pending:
            with pytest.raises(ExchangeError, match="the mean 'x/0:1' of 100000 .* but the mean 'x/1:1' of 100000 "):
                one.wait(60)


def test_a_frozen_member_is_left_behind_and_the_exchange_is_done_again(tmp_path: Path) -> None:
    """Nothing of torch's ends: the coordinator's lease does it."""
    with lab(tmp_path, 3, engine="nccl", lease=2.5) as running:
        members = running.connect_all()
        means(members, "x", [torch.ones(100_000)] * 3, "fp32")
        running.silence(2)
        pending = [m.start_mean("y", torch.full((500_000,), float(m.rank)), 1.0, FP32) for m in members[:2]]
        assert [(one.wait(60).mean[0].item(), one.wait(60).members) for one in pending] == [(0.5, (0, 1))] * 2


def test_a_group_is_given_up_where_one_has_gone_before_and_another_is_stopped(tmp_path: Path) -> None:
    with lab(tmp_path, 3, engine="nccl") as running:
        members = running.connect_all()
        groups = [group_of(member) for member in members]
        groups[2].close = groups[2].abandon = lambda *seconds: None  # it stands, as a stopped process leaves it
        pending = [m.start_mean("x", torch.ones(100_000), 1.0, FP32) for m in members[:2]]
        until(lambda: all(group.bytes_sent for group in groups[:2]))
        groups[0].abandon()
        until(lambda: not any(group._thread.is_alive() for group in groups[:2]))
        pending.append(members[2].start_mean("x", torch.ones(100_000), 1.0, FP32))
        assert [one.wait(60).members for one in pending] == [(0, 1, 2)] * 3
        TorchGroup.abandon(groups[2])


def test_a_newcomer_takes_part_from_the_next_exchange_on(tmp_path: Path) -> None:
    with lab(tmp_path, 2, engine="nccl", lease=100.0) as running, ThreadPoolExecutor(1) as pool:
        members = running.connect_all()
        means(members, "x", [torch.ones(100_000)] * 2, "fp32")
        cut(members[1])
        until(lambda: "lost" in running.statuses(1))
        fresh = running.connect(1)
        coming = pool.submit(fresh.fetch_state, 60)
        until(lambda: members[0].must_publish_state)
        members[0].publish_state(JoiningState({"w": torch.ones(3)}, {}))
        coming.result(60)
        results = means([members[0], fresh], "y", [torch.full((100_000,), float(rank)) for rank in range(2)], "fp32", 1)
    assert [(result.mean[0].item(), result.members) for result in results] == [(0.5, (0, 1))] * 2


TWO = TorchMesh(0, [0, 1], {0: "a", 1: "b"})


class Peer:
    """A group of two whose other member sends what it was told to."""

    device = torch.device("cpu")
    group_rank = 0

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)

    def exchange(self, frames: Any, receive: list[int]) -> Peer:
        assert [len(self.said[0])] == receive
        return self

    def wait(self) -> list[torch.Tensor]:
        return [torch.frombuffer(bytearray(self.said.pop(0)), dtype=torch.uint8)]


def attempted(weight: float, elements: int, *said: bytes) -> MeanResult:
    """Average two numbers with a peer, who gives a weight for so many, and then sends something."""
    mesh = TorchMesh(0, [0, 1], {0: "a", 1: "b"})
    tag = zlib.crc32(f"the mean 'x' of {elements} numbers as fp32 {[(0, (0, 1)), (1, (1, elements))]}".encode())
    mesh.group = cast(Any, Peer(struct.pack("<dIQ?H", weight, tag, 0, False, 0), *said))
    own = Contribution("x", torch.ones(2), 1.0, FP32)
    attempt = Attempt(mesh, lambda device: own, MeanEncoder(MeanResiduals(), own.stream, own.codec), {})
    attempt.run()
    return attempt.result()[0]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e19])
def test_a_weight_that_cannot_be_names_its_sender(weight: float) -> None:
    with pytest.raises(PeerLost, match="with b is lost: it gave its values in 'x' the weight"):
        attempted(weight, 2)


def test_what_a_peer_sends_is_looked_at() -> None:
    three, five, nan = (struct.pack("<f", value) for value in (3.0, 5.0, float("nan")))
    assert attempted(1.0, 2, three, five).mean.tolist() == [2.0, 5.0]
    with pytest.raises(PeerLost, match="it is at another exchange than the mean 'x' of 2 numbers"):
        attempted(1.0, 3)
    with pytest.raises(PeerLost, match="it sent no numbers in 'x'"):
        attempted(1.0, 2, nan, five)


@pytest.mark.parametrize(
    "said", ["[]", "{", '{"keys": {"k": "?"}}', '{"keys": {}}', '{"keys": {"k": 3}, "done": true}']
)
def test_nonsense_about_a_group_names_its_sender(said: str) -> None:
    class Links(TorchMesh):
        def gather(self, data: Any, rooms: Any, took: Any, then: Any, number: int, mark: int = 0) -> Any:
            rooms[1][: len(said)] = said.encode()
            took(1, len(said))
            return Ready()

    class Ready:
        def submit(self) -> Ready:
            return self

        def wait(self, timeout: float) -> None: ...

    with pytest.raises(PeerLost, match="with b is lost: it sent an invalid message"):
        MeshStore(Links(0, [0, 1], {0: "a", 1: "b"})).get("k")


def test_one_that_asks_for_nothing_tells_the_others_all_the_same(tmp_path: Path) -> None:
    """As with NCCL, whose first rank sets a key and waits for the others while it asks for none."""
    with lab(tmp_path, 3) as running:
        stores = [MeshStore(mesh_of(member)) for member in running.connect_all()]
        stores[0].set("id", b"\x00\xff")
        assert [store.get("id") for store in stores[1:]] == [b"\x00\xff"] * 2
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(MeshStore.settle, stores)) == [None] * 3
        with pytest.raises(ExchangeError, match="no member has set torch's key 'more'"):
            stores[1].get("more")


def test_nccl_is_for_members_with_a_gpu_each() -> None:
    def backend(*gpus: str) -> str:
        return choose_backend(TWO, {rank: {"system": "Linux", "gpu": gpu} for rank, gpu in enumerate(gpus)})

    assert [backend("a", "b"), backend("a", "a"), backend("a", "")] == ["nccl", "gloo", "gloo"]


def test_gloo_takes_the_place_of_nccl_that_does_not_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As here, where torch was built without it."""
    chosen = iter(["nccl"] * 4)
    monkeypatch.setattr(torch_group, "choose_backend", lambda mesh, said: next(chosen, "gloo"))
    with lab(tmp_path, 2, engine="nccl") as running:
        members = running.connect_all()
        results = means(members, "x", [values_of(rank, 70_000) for rank in range(2)], "fp32")
        assert torch.equal(results[0].mean, results[1].mean)
        assert {group_of(member).backend for member in members} == {"gloo"} and not list(chosen)


def test_members_that_hear_nothing_of_one_another_name_who_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a driver hangs that is asked for the GPU."""
    wedged = threading.Event()
    monkeypatch.setattr(torch_group, "_GLOO_SECONDS", 1.0)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", wedged.wait)
    with lab(tmp_path, 2) as running:
        meshes = [mesh_of(member) for member in running.connect_all()]
        groups = [TorchGroup(mesh, torch.device(kind), "lo") for mesh, kind in zip(meshes, ("cuda", "cpu"))]
        with pytest.raises(ExchangeError, match=r"did not come up within 1 s: \S+ said nothing"):
            groups[1].wait_formed()
        wedged.set()
        for group in groups:
            group.abandon()


def test_another_operating_system_is_told_to_itself_and_to_all() -> None:
    said = {0: {"system": "Linux"}, 1: {"system": "Darwin"}}
    for rank, error in enumerate((PeerLost, UnusableMember)):
        with pytest.raises(error, match="cannot join Linux and Darwin in one group; use engine = mesh"):
            choose_backend(TorchMesh(rank, [0, 1], {0: "a", 1: "b"}), said)


def test_an_interface_that_is_not_there_is_said(tmp_path: Path) -> None:
    with lab(tmp_path, 2, engine="nccl") as running, ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(running.connect, rank, interface="none0", timeout=20) for rank in (0, 1)]
        said = [str(one.exception(PATIENCE)) for one in joining]  # who hears first that the other gave up says that
    assert any("there is no network interface 'none0' on" in one for one in said), said


# ------------------------------------------------------------------------------- a network without a name server (root)

DEAD_RESOLVER = """
ip link set lo up
ip link add near type veth peer name far && ip link set near up && ip link set far up
ip address add 198.51.100.2/24 dev near && ip neighbour add 198.51.100.1 lladdr 02:00:00:00:00:01 dev near
mount -t tmpfs none {folder}
echo 'nameserver 198.51.100.1' > {folder}/resolv.conf
echo 'options timeout:30 attempts:3' >> {folder}/resolv.conf
echo 'hosts: dns' > {folder}/nsswitch.conf
for file in resolv.conf nsswitch.conf; do mount --bind {folder}/$file /etc/$file; done
exec {python} {script}
"""


def measure_in_a_namespace() -> None:
    """Body of the tests below: prints start-up seconds, and bytes on ``lo`` for one mean against theory.

    A look-up that began before the start-up and has no answer after it proves that the name server is dead.
    """
    look_up = threading.Thread(target=socket.getnameinfo, args=(("127.0.0.1", 1), 0), daemon=True)
    look_up.start()
    began = time.monotonic()
    running = Lab(Path(), 3, engine="nccl")
    members = running.connect_all()
    means(members, "x", [torch.ones(10_000)] * 3, "fp32")
    seconds = time.monotonic() - began
    assert look_up.is_alive()
    before, counted = bytes_on_loopback(), members[0].traffic.bytes_sent
    means(members, "x", [torch.ones(5_000_000)] * 3, "fp32")
    seen = bytes_on_loopback() - before
    print(seconds, 3 * (members[0].traffic.bytes_sent - counted), seen, 2 * 2 * 4 * 5_000_000, flush=True)
    os._exit(0)


def bytes_on_loopback() -> int:
    with open("/proc/net/dev") as devices:
        return next(int(line.split()[9]) for line in devices if line.strip().startswith("lo:"))


@pytest.fixture(scope="module")
def namespace_figures(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root on Linux with iproute2 for a network namespace")
    folder = tmp_path_factory.mktemp("names")
    script = folder / "script" / "measure.py"
    script.parent.mkdir()
    here = os.path.dirname(__file__)
    script.write_text(
        f"import sys; sys.path[:0] = [{here!r}, {os.getcwd()!r}]\nimport test_torch_member\n"
        "if __name__ == '__main__': test_torch_member.measure_in_a_namespace()\n"
    )
    (etc := folder / "etc").mkdir()
    commands = DEAD_RESOLVER.format(folder=etc, python=sys.executable, script=script)
    done = subprocess.run(["unshare", "-n", "-m", "sh", "-ec", commands], capture_output=True, text=True, timeout=200)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("namespaces are not allowed here")
    assert done.returncode == 0, done.stderr
    return [float(figure) for figure in done.stdout.split()]


@pytest.mark.lab
def test_start_up_does_not_wait_for_a_dead_name_server(namespace_figures: list[float]) -> None:
    assert namespace_figures[0] < 60  # one look-up takes 90


@pytest.mark.lab
def test_counted_bytes_are_those_on_the_interface(namespace_figures: list[float]) -> None:
    _, counted, seen, theory = namespace_figures
    assert counted == pytest.approx(theory, rel=0.01)
    assert seen == pytest.approx(theory, rel=0.03)
