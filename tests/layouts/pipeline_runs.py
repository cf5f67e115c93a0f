"""Trainings of a few steps: a pipeline's stages as threads of this process, and one process that holds the whole."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from tests.layouts.toy_stages import ToyModel, ToyStage, toy_step, toy_weight
from training.hardware.device import Precision
from training.layouts.carrier import Carrier, PendingSend
from training.layouts.pipeline import Pipeline
from training.layouts.stage import Cut

V = TypeVar("V")
Queues = dict[tuple[int, int], "queue.SimpleQueue[torch.Tensor]"]
STEPS = 5
PRECISION = Precision(None, torch.device("cpu"))


class _Sent:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class QueueCarrier(Carrier):
    """Messages through queues of this process."""

    def __init__(self, stage: int, queues: Queues, stages: int) -> None:
        super().__init__(stage, [f"machine-{number}" for number in range(stages)])
        self._queues = queues

    def _send(self, stage: int, data: torch.Tensor) -> PendingSend:
        self._queues[self.stage, stage].put(data.clone())
        return _Sent()

    def _receive(self, stage: int, data: torch.Tensor) -> None:
        data.copy_(self._queues[stage, self.stage].get(timeout=60))


def queue_carriers(stages: int) -> list[QueueCarrier]:
    """Return the carriers of all stages."""
    queues: Queues = {(a, b): queue.SimpleQueue() for a in range(stages) for b in range(stages)}
    return [QueueCarrier(stage, queues, stages) for stage in range(stages)]


def side_by_side(works: Sequence[Callable[[], V]]) -> list[V]:
    """Return what each function returns; they run at once."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def adam(module: nn.Module) -> torch.optim.Optimizer | None:
    """Return AdamW over what is trained; ``None`` if that is nothing."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, eps=1e-4, foreach=False) if trained else None


def whole_run(model: ToyModel, step_batches: Callable[[int], list[Any]] = toy_step) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of one process."""
    optimizer, figures = adam(model), []
    assert optimizer is not None
    for step in range(STEPS):
        batches = step_batches(step)
        total = sum(map(toy_weight, batches))
        losses = []
        optimizer.zero_grad()
        for batch in batches:
            loss = model.run(range(len(model.blocks)), batch, ())[0] * (toy_weight(batch) / total)
            loss.backward()
            losses.append(float(loss.detach()))
        norm = PRECISION.clip(optimizer, [*model.parameters()], 1.0)
        optimizer.step()
        figures.append((sum(losses), float(norm or 0)))
    return figures


def stage_run(pipeline: Pipeline, module: nn.Module, calls: int = 1) -> list[tuple[float, float]]:
    """Return the same of one stage of a pipeline; ``calls``: parts in which it gets the micro-batches of a step."""
    optimizer, figures = adam(module), []
    for step in range(STEPS):
        batches = toy_step(step)
        weights = [toy_weight(batch) for batch in batches]
        module.zero_grad()
        size = len(batches) // calls
        parts = [slice(start, start + size) for start in range(0, len(batches), size)]
        losses = [loss for part in parts for loss in pipeline.passes(batches[part], weights[part], sum(weights))]
        norm = pipeline.norm()
        if optimizer is not None:
            PRECISION.clip(optimizer, [*module.parameters()], 1.0, norm)
            optimizer.step()
        figures.append((float(sum(losses)), norm))
    return figures


def pipeline_run(
    model: ToyModel, bounds: tuple[int, ...], calls: int = 1, **options: Any
) -> tuple[list[list[tuple[float, float]]], list[QueueCarrier], list[ToyStage]]:
    """Return every stage's figures, its carrier and its part of the model."""
    stages = [ToyStage(model, Cut(bounds, stage)) for stage in range(len(bounds) - 1)]
    carriers = queue_carriers(len(stages))

    def run(stage: ToyStage, carrier: Carrier) -> list[tuple[float, float]]:
        return stage_run(Pipeline(stage, carrier, PRECISION, **options), stage.module, calls)

    figures = side_by_side([lambda s=s, c=c: run(s, c) for s, c in zip(stages, carriers)])  # type: ignore[misc]
    return figures, carriers, stages
