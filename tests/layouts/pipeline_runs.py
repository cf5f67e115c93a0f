"""Trainings of a few steps: a pipeline's stages as threads of this process, and one process that holds the whole."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from tests.layouts.toy_stages import toy_loss, toy_step, weight_of
from training.hardware.device import Precision
from training.layouts.carrier import Carrier, PendingSend
from training.layouts.pipeline import Pipeline
from training.layouts.stages.stage import StageModel

V = TypeVar("V")
Figures = list[tuple[float, float]]
"""Loss and gradient norm of each step."""
Loss = Callable[[Any, Any], torch.Tensor]
MakeStep = Callable[[int], list[Any]]
"""Takes the number of a step; returns its micro-batches."""
Queues = dict[tuple[int, int], "queue.SimpleQueue[torch.Tensor]"]
STEPS = 3
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


def whole_run(model: nn.Module, loss_of: Loss = toy_loss, make_step: MakeStep = toy_step) -> Figures:
    """Return loss and gradient norm of each step of one process."""
    optimizer, figures = adam(model), []
    assert optimizer is not None
    for step in range(STEPS):
        batches = make_step(step)
        total = sum(map(weight_of, batches))
        losses = []
        optimizer.zero_grad()
        for batch in batches:
            loss = loss_of(model, batch) * (weight_of(batch) / total)
            loss.backward()
            losses.append(float(loss.detach()))
        norm = PRECISION.clip(optimizer, [*model.parameters()], 1.0)
        optimizer.step()
        figures.append((sum(losses), float(norm or 0)))
    return figures


def stage_run(pipeline: Pipeline, module: nn.Module, make_step: MakeStep = toy_step, calls: int = 1) -> Figures:
    """Return the same of one stage of a pipeline; ``calls``: parts in which it gets the micro-batches of a step."""
    optimizer, figures = adam(module), []
    for step in range(STEPS):
        batches = make_step(step)
        weights, seeds = [weight_of(batch) for batch in batches], [100 * step + index for index in range(len(batches))]
        module.zero_grad()
        size = len(batches) // calls
        parts = [slice(start, start + size) for start in range(0, len(batches), size)]
        losses = [
            loss for part in parts for loss in pipeline.passes(batches[part], weights[part], sum(weights), seeds[part])
        ]
        norm = pipeline.norm()
        if optimizer is not None:
            PRECISION.clip(optimizer, [*module.parameters()], 1.0, norm)
            optimizer.step()
        figures.append((float(sum(losses)), norm))
    return figures


def pipeline_run(
    stages: Sequence[StageModel],
    make_step: MakeStep = toy_step,
    calls: int = 1,
    precision: Precision = PRECISION,
    **options: Any,
) -> tuple[list[Figures], list[QueueCarrier]]:
    """Return every stage's figures and its carrier."""
    carriers = queue_carriers(len(stages))

    def run(stage: StageModel, carrier: Carrier) -> Figures:
        return stage_run(Pipeline(stage, carrier, precision, **options), stage.module, make_step, calls)

    return side_by_side([partial(run, stage, carrier) for stage, carrier in zip(stages, carriers)]), carriers


def agree(figures: list[Figures], expected: Figures) -> None:
    """Check that all stages have the figures of one process: losses within 1e-6, norms within 1e-6 of their size."""
    losses, norms = zip(*expected)
    for stage_losses, stage_norms in (zip(*stage) for stage in figures):
        assert stage_losses == pytest.approx(losses, abs=1e-6)
        assert stage_norms == pytest.approx(norms, rel=1e-6)
