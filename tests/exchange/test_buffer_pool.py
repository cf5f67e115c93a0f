"""What an operation has taken is free again as soon as it is needed no more."""

from __future__ import annotations

import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinated_lab import lab
from test_mesh import PATIENCE, Group
from waiting import until

from distributed.planning.memory.memory_model import exchange_bytes, mesh_bytes
from training.exchange.base import Contribution
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.mean.mesh_operations import MeshMean, Meter
from training.exchange.mean.outcomes import OperationResult
from training.exchange.mean.reduction import AT_ONCE, BufferPool
from training.exchange.residuals import MeanResiduals

pytestmark = pytest.mark.slow

FP32 = codec_by_name("fp32")


class Watched(BufferPool):
    """Knows how much of what was taken is looked at by anybody."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: list[weakref.ref[Any]] = []
        self.most = 0

    def take(self, size: int) -> memoryview:
        room = super().take(size)
        self._taken.append(weakref.ref(room.obj))
        self.most = max(self.most, self.held())
        return room

    def held(self) -> int:
        there = [one() for one in self._taken]
        return sum(len(memoryview(one)) for one in there if one is not None)


@pytest.mark.parametrize(("members", "elements"), [(2, 300_001), (3, 300_001), (2, 17_000_000)])
def test_a_mean_holds_what_it_needs_and_then_its_result_and_what_is_handed_on(
    tmp_path: Path, members: int, elements: int
) -> None:
    number, all_begun = 1, threading.Event()
    issue_run_certificates(tmp_path, "run", range(members), ["127.0.0.1"])
    group = Group(members, tmp_path)
    meshes, watched, transfers = group.form(), [], []
    ended: dict[int, tuple[int, OperationResult]] = {}
    vectors = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(members)]
    for mesh, vector in zip(meshes, vectors):
        mesh.buffer_pool = rooms = Watched()
        mean = MeshMean(number, Contribution("x", vector, 1.0, FP32), Meter(), MeanResiduals(), {}, rooms)

        def over(error: Exception | None, mean: MeshMean = mean, rank: int = mesh.rank, rooms: Watched = rooms) -> None:
            assert error is None and all_begun.wait(PATIENCE)  # the test's own thread is out of it, too
            outcome = mean.complete()
            ended[rank] = rooms.held(), outcome

        watched.append(rooms)
        transfers.append(mean.begin(mesh, over).submit())
    all_begun.set()
    for transfer in transfers:
        transfer.wait(PATIENCE)
    for rooms, (held, outcome) in zip(watched, (ended[rank] for rank in range(members))):
        assert 0 <= held - (4 * elements + outcome.size) < 64 * len(outcome.pieces)  # pieces are aligned
        piece = 4 * CHUNK_ELEMENTS + 64
        assert rooms.most <= 4 * elements + exchange_bytes("diloco", elements) + piece
        if members == 2:  # contributions come one after another, each is averaged when it is there
            assert rooms.most <= (3 if 4 * elements <= AT_ONCE else 2) * 4 * elements + 2 * piece
    group.close()


def test_before_the_next_mean_has_an_outcome_the_last_one_is_gone(tmp_path: Path) -> None:
    elements, members = AT_ONCE // 4 + 1_000_000, 2
    vector, peaks = torch.zeros(elements), list[int]()

    def note() -> None:
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    both = threading.Barrier(members, note)
    tracemalloc.start()  # it sees the memory for what is exchanged, and no tensor besides
    try:
        with lab(tmp_path, members, elements=elements) as running, ThreadPoolExecutor(members) as pool:
            begun = tracemalloc.get_traced_memory()[0]

            def work(member: MeshMember) -> None:
                for _ in range(4):
                    result = weakref.ref(member.mean("x", vector, 1.0, FP32).mean)
                    until(lambda result=result: result() is None)  # the thread that brought it lets go of it
                    both.wait(PATIENCE)

            list(pool.map(work, running.connect_all()))
    finally:
        tracemalloc.stop()
    # That all have the last one may be heard late; the first mean has none before it.
    assert min(peaks[1:]) - begun <= members * (4 * elements + mesh_bytes("diloco", elements) + (16 << 20))
