"""Stages of the toy pipeline as processes that meet over the mesh, and one of them that is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.layouts.pipeline_runs import PRECISION, stage_run
from tests.layouts.toy_stages import ToyModel, ToyStage
from training.exchange.links.certificates import issue_run_certificates
from training.layouts.carrier import GroupCarrier
from training.layouts.pipeline import Pipeline
from training.layouts.stages.stage import Cut

multiprocessing.set_forkserver_preload(["torch", "tests.layouts.pipeline_runs"])


class KilledStage(ToyStage):
    """Its process is killed at the third micro-batch."""

    calls = 0

    def forward(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(*arguments)


def _member(pipe: Connection, rank: int, bounds: tuple[int, ...], killed: int | None, folder: Path) -> None:
    os.environ.update(MUSTER_CERTIFICATES=f"{folder}/certificates/member-{rank}", MUSTER_RUN_ID="run")
    os.environ["MUSTER_NAMES"] = "anna,berta,carla"
    import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    stages = len(bounds) - 1
    store = dist.FileStore(f"{folder}/store", stages)
    dist.init_process_group("muster", store=store, rank=rank, world_size=stages, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    stage = (KilledStage if rank == killed else ToyStage)(ToyModel(encoder_blocks=2), Cut(bounds, rank))
    carrier = GroupCarrier(group, range(stages), ("anna", "berta", "carla"))
    try:
        pipe.send(stage_run(Pipeline(stage, carrier, PRECISION), stage.module))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        pipe.send(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def member_runs(bounds: tuple[int, ...], folder: Path, killed: int | None = None) -> list[Any]:
    """Return each stage's figures, or its error; ``None`` of one that was killed."""
    stages = len(bounds) - 1
    issue_run_certificates(folder / "certificates", "run", range(stages), ["127.0.0.1"])
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    pipes, processes = [], []
    for rank in range(stages):
        pipe, far_end = context.Pipe()
        process = context.Process(target=_member, args=(far_end, rank, bounds, killed, folder))
        process.start()
        far_end.close()
        pipes.append(pipe)
        processes.append(process)
    answers = [_answer(pipe) for pipe in pipes]
    for process in processes:
        process.join(60)
    return answers


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(100), "a stage gave no answer"
    try:
        return pipe.recv()
    except EOFError:
        return None
