"""Seconds of a pipeline's step over shaped links: real tensors over the mesh between network namespaces.

    .venv/bin/python benchmarks/pipeline_links.py [--mbit 1000 100] [--repeats 3] [--json FILE]

Needs root. Three stages; forward and backward are pauses of known length (a backward takes twice as long as a forward),
so a busy machine does not blur the figures. A micro-batch is a hidden state of 1 x 512 x 768. *Share* is the throughput
as a share of the sum of the machines' speeds; the bubble allows ``M / (M + S - 1)`` of equal stages. *Predicted* is
the time of a step that the planner computes, *without links* that with links of no cost. Two minutes a rate.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed.planning.layouts.pipeline_step import pipeline_step
from tests.lab.lab import Lab
from training.exchange.links.certificates import issue_run_certificates
from training.layouts.orders import extra_micro_batches, micro_batches_under_way

NAMES = ("a", "b", "c")
SHAPE = (1, 512, 768)
WIRE_BYTES = {"float32": 4, "bfloat16": 2}
BACKWARD = 2.0
"""Length of a backward, in forwards."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Case:
    """A pipeline that is measured."""

    name: str
    forward: tuple[float, ...]
    """Seconds of a micro-batch's forward by stage."""
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Of the machines; the fastest has 1."""
    micro_batches: int = 16
    wire: str = "bfloat16"
    extra: int | None = None
    """Micro-batches further ahead than in 1F1B; ``None``: as many as hide the link."""

    def extra_at(self, mbit: float) -> int:
        """Return the micro-batches further ahead on links of this rate."""
        transfer = SHAPE[0] * SHAPE[1] * SHAPE[2] * WIRE_BYTES[self.wire] * 8e-6 / mbit
        seconds = max(self.forward) * (1 + BACKWARD)
        return extra_micro_batches(transfer, seconds) if self.extra is None else self.extra

    @property
    def without_links(self) -> float:
        """Seconds of a step with links of no cost."""
        slowest = max(self.forward)
        return (1 + BACKWARD) * (self.micro_batches * slowest + sum(self.forward) - slowest)

    def predicted(self, mbit: float) -> float:
        """Return the seconds of a step on links of this rate as the planner predicts them."""
        compute = [(1 + BACKWARD) * forward for forward in self.forward]
        transfer = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2] * WIRE_BYTES[self.wire] * 8e-6 / mbit
        stages, extra = len(compute), self.extra_at(mbit)
        under_way = [micro_batches_under_way(stage, stages, self.micro_batches, extra) for stage in range(stages)]
        return pipeline_step(compute, [transfer] * (stages - 1), under_way, self.micro_batches).seconds

    def share(self, seconds: float) -> float:
        """Return the throughput of a step of ``seconds`` as a share of the sum of the speeds."""
        work = sum(forward * speed for forward, speed in zip(self.forward, self.speeds))
        return (1 + BACKWARD) * self.micro_batches * work / sum(self.speeds) / seconds


def cut_cases(name: str, blocks: tuple[int, ...], micro_batches: int = 16) -> Case:
    """Return a case of machines with speeds 1 : 0.5 : 0.25 that hold so many blocks each."""
    speeds = (1.0, 0.5, 0.25)
    block_seconds = 0.1 * sum(speeds) / sum(blocks)
    forward = tuple(block_seconds * count / speed for count, speed in zip(blocks, speeds))
    return Case(name, forward, speeds, micro_batches)


CASES = (
    Case("equal stages, bf16", (0.1, 0.1, 0.1)),
    Case("equal stages, bf16, 1F1B", (0.1, 0.1, 0.1), extra=0),
    Case("equal stages, bf16, GPipe", (0.1, 0.1, 0.1), extra=16),
    Case("equal stages, fp32", (0.1, 0.1, 0.1), wire="float32"),
    Case("equal short stages, bf16", (0.02, 0.02, 0.02)),
    cut_cases("speeds 1 : 0.5 : 0.25, blocks 16:8:4", (16, 8, 4)),
    cut_cases("speeds 1 : 0.5 : 0.25, blocks 9:5:2, 32 micro-batches", (9, 5, 2), 32),
    cut_cases("speeds 1 : 0.5 : 0.25, even blocks", (4, 4, 4)),
)
WARM_UP = Case("links are made", (0.001, 0.001, 0.001), micro_batches=8)


@dataclass(frozen=True)
class StageFigures:
    """What one stage measured in the best of its steps."""

    seconds: float
    waited: float
    processor: float
    megabytes_sent: float


def stage_process(rank: int, host: tuple[int, str], folder: str, mbit: float, repeats: int) -> list[StageFigures]:
    """Return the best step of each case as one stage, in the network namespace of the process ``host[0]``."""
    with open(f"/proc/{host[0]}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    certificates = f"{folder}/certificates/member-{rank}"
    os.environ.update(MUSTER_LISTEN=host[1], MUSTER_CERTIFICATES=certificates, MUSTER_RUN_ID="run")
    import torch
    import torch.distributed as dist

    import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    path, timeout = f"{folder}/store-{mbit:g}", timedelta(seconds=300)
    store = dist.FileStore(path, len(NAMES))  # type: ignore[attr-defined]  # not in its list of names
    dist.init_process_group("muster", store=store, rank=rank, world_size=len(NAMES), timeout=timeout)
    best = [min(steps(case, rank, mbit, repeats), key=lambda figures: figures.seconds) for case in (WARM_UP, *CASES)]
    dist.destroy_process_group()
    return best[1:]


def steps(case: Case, rank: int, mbit: float, repeats: int) -> Iterator[StageFigures]:
    """Make the steps of one case as one stage."""
    import torch
    import torch.distributed as dist

    from training.layouts.carrier import GroupCarrier
    from training.layouts.messages import Tensors
    from training.layouts.relay import StageRelay

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            time.sleep(case.forward[rank])
            return hidden * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD * case.forward[rank])
            return gradients[0] * 1.0

    first = torch.randn(SHAPE, requires_grad=True)

    def forward(_: int, arrived: Tensors) -> Tensors | torch.Tensor:
        hidden = Pause.apply(arrived[0] if arrived else first)
        return hidden.sum() if rank == len(NAMES) - 1 else (hidden,)

    group = dist.group.WORLD
    assert group is not None
    carrier = GroupCarrier(group, range(len(NAMES)), NAMES)
    relay = StageRelay(carrier, getattr(torch, case.wire), case.extra_at(mbit))
    for _ in range(repeats):
        before = carrier.traffic.copy()
        dist.barrier()
        begin, processor = time.perf_counter(), time.process_time()
        relay.train(case.micro_batches, forward)
        dist.barrier()
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        sent = carrier.traffic.since(before).bytes_sent / 1e6
        yield StageFigures(seconds, relay.times.wait, processor, sent)


def measure(lab: Lab, mbit: float, repeats: int, folder: str) -> list[list[StageFigures]]:
    """Return the figures of the best step of each case, by stage."""
    hosts = [lab[name] for name in NAMES]
    for host in hosts:
        host.set_rate(mbit)
    with ProcessPoolExecutor(len(hosts), mp_context=multiprocessing.get_context("spawn")) as pool:
        stages = [
            pool.submit(stage_process, rank, (host.pid, host.address), folder, mbit, repeats)
            for rank, host in enumerate(hosts)
        ]
        return [list(figures) for figures in zip(*(stage.result() for stage in stages))]


def main() -> None:
    """Measure, and print a row for every rate and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000.0, 100.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "| Mbit/s | case | ahead | step, s | predicted, s | without links, s | share | sent by b, MB | waited, s "
        "| processor, s |"
    )
    print("|" + " ---: | --- |" + " ---: |" * 8)
    with tempfile.TemporaryDirectory() as folder, Lab(*NAMES) as lab:
        issue_run_certificates(Path(folder) / "certificates", "run", range(3), [lab[name].address for name in NAMES])
        for mbit in arguments.mbit:
            for case, stages in zip(CASES, measure(lab, mbit, arguments.repeats, folder)):
                seconds = max(figures.seconds for figures in stages)
                waited, processor = (max(getattr(f, field) for f in stages) for field in ("waited", "processor"))
                print(
                    f"| {mbit:g} | {case.name} | {case.extra_at(mbit)} | {seconds:.2f} "
                    f"| {case.predicted(mbit):.2f} | {case.without_links:.2f} "
                    f"| {case.share(seconds):.2f} | {stages[1].megabytes_sent:.1f} | {waited:.2f} | {processor:.2f} |",
                    flush=True,
                )
                rows.append({"mbit": mbit, "case": case.name, "stages": [asdict(figures) for figures in stages]})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
