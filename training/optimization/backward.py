"""The gradients of one step, micro-batch by micro-batch, as large as the memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from profiles.errors import RunFailed
from training.data.batches import StepBatches
from training.hardware.device import Precision, is_out_of_memory, move, release_memory, sample_too_large
from training.model.compiled import CompiledBlocks, should_compile
from training.strategies.base import Strategy
from training.tasks.base import Task

MakeBatches = Callable[[int], StepBatches]
"""Takes the largest micro-batch allowed, in samples; returns the batches of the same step."""


class Backward:
    """Accumulates the gradients of the mean loss over one member's samples of a step.

    If memory runs out, the step starts over with micro-batches of half the size, which later steps keep. The sum of
    weighted losses is the same, and so are the gradients, except for rounding and for layers that look at a whole
    batch. If compilation fails, the step starts over without it.

    Args:
        release: frees memory that is not strictly needed.
        compiling: ``auto``, ``on`` or ``off``, see :func:`training.model.compiled.should_compile`.
        steps: number of steps of the whole run.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        release: Callable[[], None] = lambda: None,
        compiling: Literal["auto", "on", "off"] = "off",
        steps: int = 0,
    ) -> None:
        self.max_micro_batch = 0
        """Largest micro-batch in samples; 0: the member's batch size."""
        self._task, self._model, self._precision, self._release = task, model, precision, release
        self._compiled: CompiledBlocks | None = None
        if should_compile(compiling, precision.device, task.gains_from_compiling, steps):
            self._compiled = CompiledBlocks(model, varies=task.lengths() is not None)

    def run(
        self, batches: StepBatches, strategy: Strategy, make_batches: MakeBatches, warn: Callable[[str], None]
    ) -> tuple[StepBatches, list[torch.Tensor]]:
        """Return the batches as they were computed, and the share of the loss that each contributes.

        Raises:
            RunFailed: a single sample does not fit into memory.
        """
        while (losses := self._passes(batches, strategy, warn)) is None:
            self._release()
            release_memory(self._precision.device)
            strategy.restart_backward()
            batches = make_batches(self.max_micro_batch)
        return batches, losses

    def _passes(
        self, batches: StepBatches, strategy: Strategy, warn: Callable[[str], None]
    ) -> list[torch.Tensor] | None:
        """Return the loss of each micro-batch; ``None`` if one did not fit into memory or could not be compiled."""
        losses: list[torch.Tensor] = []
        try:
            for index in range(len(batches.micro_batches)):
                if index == len(batches.micro_batches) - 1:
                    strategy.last_backward()
                losses.append(self._pass(batches, index))
            return losses
        except Exception as error:  # running out of memory, or a compiler that fails; all else is raised
            if is_out_of_memory(error):
                if not strategy.release_memory():
                    self._halve(len(batches.indices[len(losses)]), error, warn)
            elif self._compiled is None or not self._compiled.give_up(error, warn):
                raise
        self._model.zero_grad(set_to_none=True)  # and the traceback, which held the activations, is gone
        return None

    def _pass(self, batches: StepBatches, index: int) -> torch.Tensor:
        with self._precision.autocast():
            loss = self._task.loss(self._model, move(batches.micro_batches[index], self._precision.device))
        refuse_untrained(loss)
        share = batches.weights[index] / batches.weight if batches.weight else 0.0
        self._precision.scaler.scale(loss * share).backward()  # type: ignore[no-untyped-call]  # torch has no types
        return loss.detach() * share

    def _halve(self, size: int, error: Exception, warn: Callable[[str], None]) -> None:
        if size == 1:
            raise sample_too_large(error, self._precision.device, self._task.name) from error
        self.max_micro_batch = -(-size // 2)
        warn(
            f"{size} samples in one pass do not fit into memory: from now on {self.max_micro_batch} in a pass, "
            "in more passes; the batch of a step stays the same"
        )


def refuse_untrained(loss: object) -> None:
    """Raise :class:`RunFailed` if nothing can be learned from a loss."""
    if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
        raise RunFailed(
            "the loss depends on no weight that is trained, so nothing can be learned from it",
            "compute it from the model's output, without detach(), item(), numpy() or no_grad()",
        )


def loss_problem(total: float, losses: list[torch.Tensor], batches: StepBatches, member_name: str, step: int) -> str:
    """Return what is wrong with the mean loss over a member's samples if it is not finite; empty: it is."""
    if math.isfinite(total):
        return ""
    bad = next((i for i, loss in enumerate(losses) if not torch.isfinite(loss)), 0)
    indices = ", ".join(map(str, batches.indices[bad][:8]))
    where = f"in step {step}, micro-batch {bad + 1} (training samples {indices})"
    return f"the loss of {member_name} is {float(losses[bad])} {where}"
