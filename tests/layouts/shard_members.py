"""Devices of one member as processes that meet over the mesh, each with a shard of every weight of small models, or
a slice of every matrix."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from profiles.schema import Profile
from tests.layouts.families import batch, loss, plain_model, shallow
from tests.layouts.pipeline_runs import PRECISION, Figures, weight_of
from training.data.batches import StepBatches
from training.data.sample_order import Cursor
from training.exchange.links.certificates import issue_run_certificates
from training.hardware.device import Precision
from training.layouts.base import StepBackward
from training.layouts.inside.inside_model import StepOfAll
from training.layouts.whole import WholeModel
from training.strategies.weights import trainable
from training.tasks.base import Batch, Progress, Task

multiprocessing.set_forkserver_preload(["torch", "transformers", "peft", "tests.layouts.shard_members"])
STEPS, MICRO_BATCHES = 3, (12, 9, 14)
"""Steps, and the lengths of their micro-batches: as two devices compute them, one has nothing in the last pass."""
_adam = partial(torch.optim.AdamW, lr=3e-3, eps=1e-4)


def as_it_is(model: nn.Module) -> None: ...


class Case(NamedTuple):
    """A model, and how it is trained."""

    family: str
    prepare: Callable[[Any], object] = as_it_is
    optimizer: Callable[..., torch.optim.Optimizer] = _adam
    dtype: torch.dtype | None = None
    offloads: bool = False
    """Whether shards go the way that they go between a GPU and main memory."""
    blocks: int = 4
    is_sliced: bool = False
    """Whether devices hold a slice of every matrix, instead of a shard of every weight."""
    dropout: float = 0.0

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype, PRECISION.device)


class Trained(NamedTuple):
    """What a training gives."""

    figures: Figures
    weights: dict[str, Any]
    evaluated: float


class FamilyTask(Task):
    """Trains a small model of a family."""

    def __init__(self, case: Case) -> None:
        self.name, self._case, self._settings = case.family, case, shallow(case.family, case.blocks)
        self._settings.dropout = case.dropout

    def prepare(self, progress: Progress) -> None: ...

    def build_model(self) -> nn.Module:
        model = plain_model(self._settings)
        self._case.prepare(model)
        return model

    def step(self, number: int) -> StepBatches:
        batches = [batch(self._settings, 10 * number + i, 2, length) for i, length in enumerate(MICRO_BATCHES)]
        return StepBatches([*batches], [*map(weight_of, batches)], [[0, 1]] * len(batches), 6, Cursor())

    def collate(self, samples: Sequence[Any], rngs: Any) -> Batch:
        raise NotImplementedError  # batches are whole already

    def weight(self, batch: Batch) -> float:
        return weight_of(batch)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss(model, batch)

    def save(self, model: nn.Module, directory: Path) -> None:
        torch.save(model.state_dict(), directory / "weights")


class OneProcess(WholeModel):
    """A whole model that draws random numbers as devices do."""

    device = PRECISION.device

    def backward(self, release: Callable[[], None], total_steps: int) -> StepBackward:
        return StepOfAll(cast(Any, self), 1, 2)

    def loss(self, batch: Batch, share: float) -> torch.Tensor:
        with self._precision.autocast():
            return self._task.loss(self.model, batch) * share

    def end_passes(self, losses: torch.Tensor) -> torch.Tensor:
        return losses


def trained(layout: Any, case: Case) -> Trained:
    """Train in the layout, and evaluate a batch."""
    task, precision = FamilyTask(case), case.precision
    torch.manual_seed(0)
    parameters = trainable(layout.build(task, Profile(name="p"), precision))
    optimizer, backward, figures = case.optimizer(parameters), layout.backward(lambda: None, STEPS), []
    for number in range(STEPS):
        _, losses = backward.run(task.step(number), _NoStrategy(), None, None)
        norm = precision.clip(optimizer, parameters, 1.0, layout.norm())
        optimizer.step()
        optimizer.zero_grad()
        figures.append((float(torch.stack(losses).sum()), float(norm or 0)))
    with torch.no_grad(), precision.autocast():
        sums, _ = layout.answer(task.step(9).micro_batches[0], False)
    weights = {name: weight.detach().clone().float().numpy() for name, weight in layout.weights(values=True)}
    return Trained(figures, weights, sums["loss_sum"])


class _NoStrategy:
    def last_backward(self) -> None: ...


def _device(pipe: Connection, rank: int, devices: int, folder: Path, cases: Sequence[Case]) -> None:
    from training.layouts.inside import sharded as layouts
    from training.layouts.inside.tensor_parallel import TensorParallelModel
    from training.layouts.inside.world import join_world

    torch.set_num_threads(1)
    names = [f"box-shard-{number + 1}" for number in range(devices)]
    store, certificates = dist.FileStore(f"{folder}/store", devices), folder / "certificates" / f"member-{rank}"
    world = join_world(store, rank, names, PRECISION.device, "run", certificates)
    for case in cases:
        policy = CPUOffloadPolicy(pin_memory=False) if case.offloads else OffloadPolicy()
        layouts.offload = lambda *_, policy=policy: policy
        try:
            layout = TensorParallelModel(world, 2) if case.is_sliced else layouts.ShardedModel(world, 2)
            pipe.send(trained(layout, case))
        except Exception:  # noqa: BLE001 - the test looks at it
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


def sharded(cases: Sequence[Case], folder: Path, devices: int = 2) -> list[list[Any]]:
    """Return what each device has trained, or its error, by case."""
    issue_run_certificates(folder / "certificates", "run", range(devices), ["127.0.0.1"])
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    pipes, processes = [], []
    for rank in range(devices):
        pipe, far_end = context.Pipe()
        processes.append(context.Process(target=_device, args=(far_end, rank, devices, folder, [*cases])))
        processes[-1].start()
        far_end.close()
        pipes.append(pipe)
    answers = [[_answer(pipe) for pipe in pipes] for _ in cases]
    for process in processes:
        process.join(60)
    return answers


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(300), "a device gave no answer"
    return pipe.recv()
