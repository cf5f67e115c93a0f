"""Measures a model block by block, where no machine could hold the whole of it.

One block at a time is read, trained for a few micro-batches and freed, as the very stage that a pipeline would have
there. Blocks in the middle of an encoder or of a decoder are alike, so one of each kind is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from profiles.errors import RunFailed
from profiles.schema import Profile
from training.data.batches import Samples
from training.hardware.device import Precision, move, read, release_memory, select_precision
from training.layouts.staged import StageBuilder
from training.layouts.stages.bounds import kinds_of_blocks, micro_batch_size
from training.layouts.stages.cut import CutModel, record_of
from training.layouts.stages.stage import Cut, Departing
from training.model.model_building import prepare_model
from training.tasks.base import Batch, Task

LEAST_PASSES, LEAST_SECONDS = 3, 1.0
"""Passes through a block that count, and their seconds together; the first pass warms up."""


@dataclass(frozen=True)
class BlockTimes:
    """What one device takes for each block of a model."""

    seconds: tuple[float, ...]
    """Of forward and backward of one sample. The embedding counts with the block behind it, the head with the last
    one."""
    trainable: int
    """Parameters of the whole model that are trained."""
    total: int
    """All of its parameters."""


@dataclass(frozen=True)
class _OneBlock:
    seconds: float
    """Of a micro-batch."""
    trainable: int
    total: int


class _Boundary:
    """What crosses from the blocks measured so far to the next one."""

    tensors: tuple[torch.Tensor, ...] = ()
    require_grad: tuple[bool, ...] = ()

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors as they arrive at a stage."""
        pairs = zip(self.tensors, self.require_grad, strict=True)
        return [tensor.detach().requires_grad_(required) for tensor, required in pairs]


class _BlockBuilder(StageBuilder):
    """Makes the stage that has one block only."""

    def __init__(self, block: int, seed: int) -> None:
        super().__init__((), 0, seed)
        self._block = block

    def _cut(self, blocks: int) -> Cut:
        bounds = sorted({0, self._block, self._block + 1, blocks})
        return Cut(tuple(bounds), bounds.index(self._block))


def block_times(task: Task, profile: Profile, device: torch.device) -> BlockTimes:
    """Measure the blocks of a prepared task's model on a device.

    Raises:
        BadInput: the model cannot be cut into stages.
        RunFailed: no sample of the first ones can be read.
    """
    training = profile.training
    precision = Precision(select_precision(training.mixed_precision, device, task.bf16_is_faster), device)
    samples = micro_batch_size(training.batch_size, training.gradient_accumulation, 2)
    batch = _first_batch(task, profile, device, samples)
    boundary, measured = _Boundary(), dict[int, _OneBlock]()

    def measure(block: int) -> CutModel:
        stage = CutModel(
            prepare_model(task.build_stage(_BlockBuilder(block, training.seed)), profile.model, precision), task.loss
        )
        measured[block] = _measured(stage, batch, boundary, precision)
        return stage

    record = record_of(measure(0).module)[1]
    kinds = kinds_of_blocks(record.cut.bounds[-1], record.anatomy.encoder_blocks)
    for block in sorted(set(kinds) - {0}):
        release_memory(device)
        measure(block)
    figures = [measured[kind] for kind in kinds]
    return BlockTimes(
        seconds=tuple(each.seconds / samples for each in figures),
        trainable=sum(each.trainable for each in figures),
        total=sum(each.total for each in figures),
    )


def _first_batch(task: Task, profile: Profile, device: torch.device, count: int) -> Batch:
    """Return a micro-batch of the first samples that can be read."""
    samples = Samples(task, profile.training.seed, device, max_broken_share=1.0)
    read_batch = samples.training_batch(range(min(count, len(task.train))), 0)
    if read_batch is None:
        raise RunFailed(f"none of the first {count} samples can be read", "repair or remove them")
    batch: Batch = move(read_batch[1], device)
    return batch


def _measured(stage: CutModel, batch: Batch, boundary: _Boundary, precision: Precision) -> _OneBlock:
    """Train a stage for some passes, and let ``boundary`` be what it hands on."""
    seconds, begun = list[float](), time.monotonic()
    while len(seconds) <= LEAST_PASSES or time.monotonic() - begun < LEAST_SECONDS:
        started = time.monotonic()
        tensors = _pass(stage, batch, boundary.leaves(), precision)
        seconds.append(time.monotonic() - started)
    boundary.tensors = tensors
    boundary.require_grad = stage.departing_require_grad(boundary.require_grad)
    parameters = [
        parameter
        for name, parameter in stage.module.named_parameters()
        if min(stage.shared.get(name, (stage.cut.stage,))) == stage.cut.stage  # a tied one counts once
    ]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return _OneBlock(median(seconds[1:]), trained, sum(parameter.numel() for parameter in parameters))


def _pass(
    stage: CutModel, batch: Batch, arrived: Sequence[torch.Tensor], precision: Precision
) -> tuple[torch.Tensor, ...]:
    """Compute forward and backward of a micro-batch; return what departs."""
    with precision.autocast():
        output = stage.forward(batch, arrived, seed=0)
    tensors = output.tensors if isinstance(output, Departing) else (output,)
    if wanted := [tensor for tensor in tensors if tensor.requires_grad]:
        torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
    read(tensors[-1].sum())  # waits for the device
    return tuple(tensor.detach() for tensor in tensors)
