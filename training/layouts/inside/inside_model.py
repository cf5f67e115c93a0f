"""What the layouts inside one machine have in common: steps, evaluations and saving, by all devices together."""

from __future__ import annotations

import math
import tempfile
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import nn

from profiles.errors import BadInput, RunFailed
from profiles.options import memory_saving_settings
from profiles.schema import Profile
from training.data.batches import StepBatches
from training.exchange.base import ExchangeError
from training.hardware.device import Precision, is_out_of_memory, move, total_norm
from training.layouts.base import Layout, StepBackward
from training.layouts.carrier import gather_among, sum_among
from training.layouts.inside.world import World
from training.model.saved_model import save_model
from training.numerics.randomness import preserved_generators, seed_with
from training.optimization.backward import MakeBatches, refuse_untrained
from training.strategies.base import Strategy
from training.tasks.base import Answer, Batch, Task
from training.tasks.file_mapping import map_to_file
from training.tasks.outputs.showcase import SampleOutput

T = TypeVar("T")


class InsideModel(Layout):
    """What one device holds of a model that all devices compute together.

    Args:
        batch_size: of the member.
    """

    part_name: ClassVar[str]
    """Of what a device holds, for messages."""
    divides_samples: ClassVar[bool]
    """Whether each device computes some of the micro-batches, or all of them compute each together."""
    _task: Task
    _profile: Profile
    _precision: Precision

    def __init__(self, world: World, batch_size: int) -> None:
        self._world, self._batch_size = world, batch_size
        self.carrier = self._carrier = world.carrier
        self.names, self.traffic = self._carrier.names, self._carrier.traffic
        self.part = (self._carrier.stage, self._carrier.stages)

    @abstractmethod
    def compute(self, function: Callable[[nn.Module], T]) -> T:
        """Return what a function computes with the whole model; all devices call it together."""

    @abstractmethod
    def end_passes(self, losses: torch.Tensor) -> torch.Tensor:
        """Make the gradients of a step those of all devices; return the losses of all micro-batches on each.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: the devices have computed different things.
        """

    @abstractmethod
    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        """Give the model whole weights, by name; it is not trained any more."""

    @abstractmethod
    def squares(self) -> float:
        """Return the sum of the squares of those elements of the gradient that count on this device."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._precision.device

    def backward(self, release: Callable[[], None], total_steps: int) -> StepBackward:
        return StepOfAll(self, self._carrier.stages if self.divides_samples else 1, self._batch_size)

    def loss(self, batch: Batch, share: float) -> torch.Tensor:
        """Return a micro-batch's share of the loss of a step."""
        moved = move(batch, self._precision.device)
        with self._precision.autocast():
            return self._computed(lambda model: self._task.loss(model, moved) * share)

    def norm(self) -> float | None:
        return math.sqrt(float(self.sum_over_devices(torch.tensor([self.squares()], dtype=torch.float64))))

    def sum_over_devices(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values of all devices, the same bits on each."""
        return sum_among(self._carrier, range(self._carrier.stages), values)

    def answer(self, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        return self._in_memory(lambda model: self._task.answer(model, batch, generate))

    def sample_output(self, batch: Batch) -> SampleOutput:
        self._task.on_any_device = self.any
        return self._in_memory(lambda model: self._task.sample_output(model, batch))

    def gather(self, payload: bytes) -> list[bytes]:
        return gather_among(self._carrier, payload)

    def save(self, run_dir: Path) -> None:
        is_lead, weights = self._carrier.stage == 0, dict[str, torch.Tensor]()
        with tempfile.TemporaryDirectory(dir=run_dir) as folder:
            for name, weight in self.weights():
                if is_lead:
                    weights[name] = map_to_file(weight.detach().cpu(), Path(folder))
            if is_lead:
                self.replace(weights)
                save_model(self._task, self.module, run_dir)
        self.gather(b"saved")

    def close(self) -> None:
        self._carrier.close()

    def _computed(self, function: Callable[[nn.Module], T]) -> T:
        try:
            return self.compute(function)
        except RuntimeError as error:
            raise cause_of(error) from error

    def _in_memory(self, function: Callable[[nn.Module], T]) -> T:
        try:
            return self._computed(function)
        except Exception as error:  # devices say in their own classes that memory ran out; all else is raised
            if is_out_of_memory(error):
                raise self.too_large(error, "eval_batch_size") from error
            raise

    def too_large(self, error: Exception, setting: str) -> RunFailed:
        """Return the error of a device that runs out of memory."""
        name, reason = self.names[self._carrier.stage], " ".join(str(error).split())[:200]
        changes = [f"set a smaller {setting}", *(f"set {change}" for change in memory_saving_settings(self._task.name))]
        return RunFailed(f"ran out of memory with its {self.part_name}: {reason}", ", ".join(changes), machine=name)


class StepOfAll:
    """The gradients of a step, which the devices compute together: in each pass a micro-batch each, or one of all.

    All of them would have to begin a step anew where one runs out of memory, so the run fails instead.

    Args:
        width: micro-batches in a pass: one for each device, or 1.
        batch_size: of the member.
    """

    def __init__(self, layout: InsideModel, width: int, batch_size: int) -> None:
        self._layout, self._width = layout, width
        self.max_micro_batch = -(-batch_size // width)
        """Largest micro-batch in samples."""

    def run(
        self, batches: StepBatches, strategy: Strategy, make_batches: MakeBatches, warn: Callable[[str], None]
    ) -> tuple[StepBatches, list[torch.Tensor]]:
        """Return the batches, and the share of the loss that each contributes.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: this one ran out of memory, or the devices have computed different things.
        """
        count = len(batches.micro_batches)
        losses = torch.zeros(count, dtype=torch.float64)
        # all devices draw the same: their generators began alike and are used alike
        seeds = torch.randint(1 << 31, (count,)).tolist()
        for first in range(0, count, self._width):
            index = first + self._layout.part[0] % self._width
            is_idle = index >= count  # the others need what it holds: it computes with them, for nothing
            index = first if is_idle else index
            share = 0.0 if is_idle else batches.weights[index] / batches.weight
            losses[index] += self._pass(batches.micro_batches[index], share, seeds[index])
        return batches, [*self._layout.end_passes(losses)]

    def _pass(self, batch: Batch, share: float, seed: int) -> float:
        try:
            with preserved_generators(self._layout.device):
                seed_with((seed,), self._layout.device)
                loss = self._layout.loss(batch, share)
                refuse_untrained(loss)
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # devices say in their own classes that memory ran out; all else is raised
            if is_out_of_memory(error):
                raise self._layout.too_large(error, "batch_size") from error
            raise cause_of(error) from error
        return float(loss.detach())


def cause_of(error: Exception) -> Exception:
    """Return the loss of a device, or that a weight was not gathered, where that is the cause: torch knows both as a
    RuntimeError only."""
    if isinstance(error.__cause__, ExchangeError):
        return ExchangeError(str(error))
    if isinstance(error, RuntimeError) and "DTensor" in str(error):
        message = "layout = shard: weights of a block are read outside of its forward, where each device has a part"
        return BadInput(message, "call blocks as modules and read their weights there, or set layout = replicate")
    return error


def sum_of_squares(gradients: list[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    return float(total_norm(filled)) ** 2
