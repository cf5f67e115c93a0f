"""The torch engine with real processes on loopback."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import pytest
import torch
from stream_reference import contribution, stream_means
from torch import Tensor

from training.exchange import torch_liveness
from training.exchange.base import ExchangeError, ExchangeTimeout, MeanResult, Pending, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name, roundtrip
from training.exchange.codecs.microscaling import Int8Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.operations import Meter
from training.exchange.store_client import StoreClient
from training.exchange.store_server import StoreServer
from training.exchange.torch_group import TorchGroup
from training.exchange.torch_mean import Wire, slice_bounds

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CODECS = ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.05"]
Result = tuple[str, Any]
Job = Callable[..., Any]


# ----------------------------------------------------------------------------------- worker processes and their jobs


multiprocessing.set_forkserver_preload(["torch"])


class Worker:
    """A process that carries out one job after the other."""

    def __init__(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        self.pipe: Connection
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def result(self, seconds: float = 100.0) -> Result:
        assert self.pipe.poll(seconds), "the worker gave no answer"
        answer: Result = self.pipe.recv()
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        job, arguments = pipe.recv()
        try:
            pipe.send(("ok", job(*arguments)))
        except ExchangeError as error:
            pipe.send((type(error).__name__, str(error)))


Door = tuple[int, str]
"""Port and token of a store."""


def door_of(store: StoreServer) -> Door:
    return store.port, store.token


def connect(door: Door, rank: int, world: int, run: str, seconds: float = 30.0) -> TorchGroup:
    port, token = door
    return TorchGroup(f"127.0.0.1:{port}", token, rank, world, CPU, "", seconds, run)


def values_of(rank: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank + 1))


def job_means(door: Door, rank: int, world: int, run: str, cases: list[tuple[str, int, list[float]]]) -> Any:
    """Start all means at once, then collect them; the contributions are spoilt right after the start."""
    group = connect(door, rank, world, run)
    pending: list[Pending[MeanResult]] = []
    for number, (codec, elements, weights) in enumerate(cases):
        values = values_of(rank, elements)
        pending.append(group.start_mean(f"mean/{number}", values, weights[rank], codec_by_name(codec)))
        values.fill_(float("nan"))
    results = [one.wait() for one in pending]
    group.close()
    return [(r.mean.numpy(), r.weight, r.members, r.included) for r in results]


def job_gather(door: Door, rank: int, world: int, run: str, sizes: list[list[int]]) -> Any:
    group = connect(door, rank, world, run)
    gathered = [group.gather(f"gather/{i}", bytes([rank + 1]) * size[rank]) for i, size in enumerate(sizes)]
    group.close()
    return gathered


def job_traffic(door: Door, rank: int, world: int, run: str, codec: str, elements: int) -> Any:
    group = connect(door, rank, world, run)
    before = group.traffic.copy()
    group.mean("mean", values_of(rank, elements), 1.0, codec_by_name(codec))
    spent = group.traffic.since(before)
    group.close()
    return spent.bytes_sent, spent.bytes_received, spent.wait_seconds, spent.transfer_seconds


def job_lose_a_member(door: Door, rank: int, world: int, run: str, fate: str, victim: int, lease: float) -> Any:
    """Exchange until a member is gone; return what was said."""
    torch_liveness.LEASE = lease
    group = connect(door, rank, world, run)
    group.mean("before", torch.ones(10), 1.0, codec_by_name("fp32"))
    if rank == victim:
        if fate == "closes":
            group.close()
            return None
        os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    pending = [group.start_mean(f"{i}", torch.ones(500_000), 1.0, codec_by_name("fp32")) for i in range(3)]
    said = []
    for one in pending:
        try:
            one.wait(60)
        except ExchangeError as error:
            said.append(str(error))
    group.close()
    group.close()
    return said


def job_nan(door: Door, rank: int, world: int, run: str) -> Any:
    group = connect(door, rank, world, run)
    values = torch.full((100,), float("nan") if rank == 1 else 1.0 + rank)
    result = group.mean("nan", values, 1.0, codec_by_name("int8"), bytes([1 << rank]))
    group.close()
    return result.mean[0].item(), result.weight, result.refused, result.left_out, result.flags


class Broken(Int8Codec):
    def encode(self, values: Tensor) -> Tensor:
        raise ValueError("this codec breaks")


def job_break(door: Door, rank: int, world: int, run: str) -> Any:
    group = connect(door, rank, world, run)
    try:
        group.mean("x", torch.ones(100), 1.0, Broken() if rank == 1 else Int8Codec())
    finally:
        group.close()


def job_stream(door: Door, rank: int, world: int, run: str, cases: list[tuple[str, int]], rounds: int) -> Any:
    """The means of several streams; half-way everything that the group keeps is handed out and given back."""
    group, found = connect(door, rank, world, run), []
    for codec, elements in cases:
        means = []
        for number in range(rounds):
            if number == rounds // 2:
                kept = group.residual(codec, elements)
                assert kept is not None
                group._residuals = MeanResiduals()
                group.restore_residual(codec, kept)
            values = contribution(rank, number, elements)
            means.append(group.mean("s", values, 1.0, codec_by_name(codec), stream=codec).mean.numpy())
        found.append(means)
    group.close()
    return found


def job_names(door: Door, rank: int, world: int, run: str) -> Any:
    group = connect(door, rank, world, run)
    try:
        group.gather(f"name/{rank}", b"")
    finally:
        group.close()


def job_properties(door: Door, rank: int, world: int, run: str) -> Any:
    group = connect(door, rank, world, run)
    facts = (group.engine, group.rank, group.members, group.is_newcomer, group.anchor_wanted, group.backend)
    refused = []
    anchor: Any = None
    for call in (group.fetch_anchor, lambda: group.publish_anchor(anchor), lambda: group.gather("big", bytes(5 << 20))):
        try:
            call()
        except ExchangeError as error:
            refused.append(str(error))
    if rank == 0:
        group.gather("late", b"")
    else:
        late = group.start_gather("late", b"")
        late.wait()
        assert late.done()
    group.close()
    try:
        group.gather("closed", b"")
    except ExchangeError as error:
        refused.append(str(error))
    return facts, refused


def job_deadline(door: Door, rank: int, world: int, run: str) -> Any:
    """Rank 0 waits with a deadline for an exchange that rank 1 starts later."""
    group = connect(door, rank, world, run)
    if rank == 0:
        pending = group.start_gather("slow", b"")
        try:
            pending.wait(0.05)
        except ExchangeTimeout:
            group._store.set("go", "1")
            gathered = pending.wait()
    else:
        group._store.get("go")
        gathered = group.gather("slow", b"")
    group.close()
    return sorted(gathered)


# ----------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    started = [Worker() for _ in range(3)]
    yield started
    for worker in started:
        worker.stop()


@pytest.fixture
def store() -> Iterator[StoreServer]:
    server = StoreServer()
    yield server
    server.close()


def run_jobs(store: StoreServer, workers: list[Worker], job: Job, *arguments: Any) -> list[Any]:
    """Run ``job`` as one group of all ``workers``; all must succeed."""
    results = try_jobs(store, workers, job, *arguments)
    assert [kind for kind, _ in results] == ["ok"] * len(workers), results
    return [value for _, value in results]


def try_jobs(store: StoreServer, workers: list[Worker], job: Job, *arguments: Any) -> list[Result]:
    start_jobs(store, workers, job, *arguments)
    return [worker.result() for worker in workers]


def start_jobs(store: StoreServer, workers: list[Worker], job: Job, *arguments: Any) -> None:
    for rank, worker in enumerate(workers):
        worker.pipe.send((job, (door_of(store), rank, len(workers), "run", *arguments)))


def expected_mean(codec_name: str, elements: int, weights: list[float]) -> Tensor:
    """What the hub's rule says: decode, mean in rank order, encode for the way back."""
    codec = codec_by_name(codec_name)
    decoded = [(w, roundtrip(codec, values_of(rank, elements))) for rank, w in enumerate(weights)]
    return roundtrip(codec.reply, weighted_mean(decoded))


# -------------------------------------------------------------------------------------------------------------- means

SIZES = [1, 37, 5_000, 300_000, 900_001]
"""One round and two, parts of blocks, several pieces, and slices of unequal size."""


@pytest.mark.parametrize("world", [2, 3])
def test_every_codec_gives_the_bits_of_the_rank_order_mean(
    store: StoreServer, workers: list[Worker], world: int
) -> None:
    weights = [3.0, 1.5, 7.0][:world]
    cases = [(codec, elements, weights) for codec in CODECS for elements in SIZES]
    results = run_jobs(store, workers[:world], job_means, cases)
    for number, case in enumerate(cases):
        expected = expected_mean(*case).numpy()
        for rank in range(world):
            mean, weight, members, included = results[rank][number]
            assert np.array_equal(mean.view(np.uint32), expected.view(np.uint32)), (case, rank)
            assert (weight, members, included) == (sum(weights), tuple(range(world)), True)


def test_members_without_weight_take_part(store: StoreServer, workers: list[Worker]) -> None:
    cases = [("fp32", 70_000, [0.0, 2.0, 0.0]), ("bf16", 70_000, [0.0, 0.0, 0.0]), ("fp32", 0, [1.0, 1.0, 1.0])]
    for results in run_jobs(store, workers, job_means, cases):
        assert np.array_equal(results[0][0], values_of(1, 70_000).numpy())
        assert not results[1][0].any()
        assert [result[1] for result in results] == [2.0, 0.0, 3.0]
        assert results[2][0].size == 0


@pytest.mark.parametrize(("elements", "parts", "block"), [(0, 3, 32), (1, 3, 1), (100, 3, 32), (96, 3, 32), (7, 2, 1)])
def test_slices_are_whole_blocks_and_cover_the_vector(elements: int, parts: int, block: int) -> None:
    bounds = slice_bounds(elements, parts, block)
    assert bounds[0] == 0
    assert bounds[-1] == elements
    assert sorted(bounds) == bounds
    assert all(bound % block == 0 or bound == elements for bound in bounds)


def test_frames_are_smaller_between_more_than_two_and_never_cut_a_block() -> None:
    def frame(members: int, codec: str) -> int:
        return Wire(0, members, CPU, Meter()).piece_elements(codec_by_name(codec))

    assert [frame(members, "bf16") for members in (2, 3, 4)] == [
        CHUNK_ELEMENTS,
        CHUNK_ELEMENTS // 2,
        CHUNK_ELEMENTS // 2,
    ]
    assert frame(3, "topk:0.05") == CHUNK_ELEMENTS
    assert frame(3, "mxfp4") % codec_by_name("mxfp4").block == 0


def test_gather_collects_payloads_of_any_size(store: StoreServer, workers: list[Worker]) -> None:
    sizes = [[0, 0, 0], [3, 0, 500], [501, 0, 100_000]]
    expected = [{rank: bytes([rank + 1]) * size[rank] for rank in range(3)} for size in sizes]
    assert run_jobs(store, workers, job_gather, sizes) == [expected] * 3


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec", ["fp32", "mxfp4"])
def test_bytes_are_what_theory_says(store: StoreServer, workers: list[Worker], world: int, codec: str) -> None:
    elements = 1_000_000
    theory = 2 * (world - 1) / world * codec_by_name(codec).max_encoded_bytes(elements)
    for sent, received, wait, transfer in run_jobs(store, workers[:world], job_traffic, codec, elements):
        assert sent == pytest.approx(theory, rel=0.03)
        assert received == pytest.approx(theory, rel=0.03)
        assert min(wait, transfer) > 0


def test_facts_about_the_group(store: StoreServer, workers: list[Worker]) -> None:
    for rank, (facts, refused) in enumerate(run_jobs(store, workers[:2], job_properties)):
        assert facts == ("torch", rank, (0, 1), False, False, "gloo")
        assert ["engine = mesh" in text for text in refused] == [True, True, False, False]
        assert "may be gathered" in refused[2]
        assert "closed" in refused[3]


def test_a_deadline_does_not_end_the_exchange(store: StoreServer, workers: list[Worker]) -> None:
    assert run_jobs(store, workers[:2], job_deadline) == [[0, 1], [0, 1]]


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(("fate", "words"), [("killed", "does not respond"), ("frozen", "does not respond")])
def test_a_lost_member_is_named(store: StoreServer, workers: list[Worker], fate: str, words: str) -> None:
    victim = Worker()
    try:
        start_jobs(store, [workers[0], victim, workers[1]], job_lose_a_member, fate, 1, 2.0)
        for survivor in workers[:2]:
            kind, said = survivor.result()
            assert kind == "ok"
            assert len(said) == 3
            assert all(f"rank 1 on {os.uname().nodename} {words}" in text and "\n" not in text for text in said)
    finally:
        victim.stop()


def test_a_member_that_leaves_is_named(store: StoreServer, workers: list[Worker]) -> None:
    results = run_jobs(store, workers, job_lose_a_member, "closes", 2, 15.0)
    for said in results[:2]:
        assert all("rank 2 on" in text and "has left the group" in text for text in said)


def test_one_members_fault_is_told_to_all(store: StoreServer, workers: list[Worker]) -> None:
    for kind, text in try_jobs(store, workers, job_break):
        assert kind == "ExchangeError"
        assert "rank 1 on" in text and "this codec breaks" in text and "without a member" not in text


def test_what_is_not_finite_stays_with_its_member_and_all_are_told(store: StoreServer, workers: list[Worker]) -> None:
    found = run_jobs(store, workers, job_nan)
    assert found == [(2.0, 2.0, (1,), ((0, 100),) if rank == 1 else (), b"\x05") for rank in range(3)]


def test_the_means_of_a_stream_are_the_hubs_also_after_a_restart(store: StoreServer, workers: list[Worker]) -> None:
    cases = [("int8", 5_000), ("mxfp4", 900_001), ("mxfp4", 37), ("topk:0.05", 300_000)]
    expected = [stream_means(codec, elements, 3, 4) for codec, elements in cases]
    for means in run_jobs(store, workers, job_stream, cases, 4):
        for theirs, ours in zip(means, expected):
            assert all(np.array_equal(one, other.numpy()) for one, other in zip(theirs, ours))


def test_members_at_different_exchanges_are_found_out(store: StoreServer, workers: list[Worker]) -> None:
    for kind, text in try_jobs(store, workers[:2], job_names):
        assert kind == "ExchangeError"
        assert "is at another exchange" in text


def test_a_member_that_never_comes_is_named(store: StoreServer, workers: list[Worker]) -> None:
    workers[0].pipe.send((connect, (door_of(store), 0, 2, "run", 0.2)))
    kind, text = workers[0].result()
    assert (kind, text) == ("ExchangeError", "rank 1 did not come within 0.2 s; see the log of that machine")


def test_a_missing_store_is_one_line() -> None:
    with pytest.raises(ExchangeError, match="store at 127.0.0.1:1 cannot be reached"):
        connect((1, ""), 0, 2, "run", 0.1)


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
    server = StoreServer()
    started = [Worker() for _ in range(3)]
    for worker in started:
        worker.pipe.send((abs, (1,)))
        worker.result()
    look_up.start()
    began = time.monotonic()
    run_jobs(server, started, job_gather, [[1, 1, 1]])
    seconds = time.monotonic() - began
    assert look_up.is_alive()
    before = bytes_on_loopback()
    counted = sum(result[0] for result in run_jobs(StoreServer(), started, job_traffic, "fp32", 5_000_000))
    seen = bytes_on_loopback() - before
    for worker in started:
        worker.stop()
    server.close()
    print(seconds, counted, seen, 2 * 2 * 4 * 5_000_000)


def bytes_on_loopback() -> int:
    with open("/proc/net/dev") as devices:
        return next(int(line.split()[9]) for line in devices if line.strip().startswith("lo:"))


@pytest.fixture(scope="module")
def namespace_figures(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root on Linux with iproute2 for a network namespace")
    folder = tmp_path_factory.mktemp("names")
    script = folder.parent / "measure.py"
    here = os.path.dirname(__file__)
    script.write_text(
        f"import sys; sys.path[:0] = [{here!r}, {os.getcwd()!r}]\nimport test_torch_group\n"
        "if __name__ == '__main__': test_torch_group.measure_in_a_namespace()\n"
    )
    commands = DEAD_RESOLVER.format(folder=folder, python=sys.executable, script=script)
    done = subprocess.run(["unshare", "-n", "-m", "sh", "-ec", commands], capture_output=True, text=True, timeout=100)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("namespaces are not allowed here")
    assert done.returncode == 0, done.stderr
    return [float(figure) for figure in done.stdout.split()]


@pytest.mark.lab
def test_start_up_does_not_wait_for_a_dead_name_server(namespace_figures: list[float]) -> None:
    assert namespace_figures[0] < 25  # one look-up takes 90


@pytest.mark.lab
def test_counted_bytes_are_those_on_the_interface(namespace_figures: list[float]) -> None:
    _, counted, seen, theory = namespace_figures
    assert counted == pytest.approx(theory, rel=0.01)
    assert seen == pytest.approx(theory, rel=0.03)


def test_a_member_beside_this_one_may_be_late_with_its_signs_of_life() -> None:
    liveness = torch_liveness.Liveness(cast(StoreClient, None), ["a", "b", "c"], 0, lambda text: None, beside=[1])
    liveness._silence.update(dict.fromkeys((1, 2), int(20 / torch_liveness.BEAT)))
    assert [other for other in (1, 2) if liveness._is_silent(other)] == [2]
