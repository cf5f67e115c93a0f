"""The layout of a member whose devices compute each micro-batch together, each a slice of every matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from profiles.errors import RunFailed
from profiles.schema import Profile
from training.hardware.device import Precision, start_training
from training.layouts.inside.agreement import refuse_gradient_hooks
from training.layouts.inside.inside_model import InsideModel, sum_of_squares
from training.layouts.inside.slices import SlicedWeights
from training.layouts.inside.slices_probe import probe_slices
from training.layouts.inside.tensor_plans import styles_of
from training.snapshots.pieces import Rows
from training.tasks.base import Task
from training.tasks.frozen_base import with_frozen_base

T = TypeVar("T")
_DIFFERENCE = 1e-5
"""Between two devices' losses of one micro-batch, from which on they have computed different things."""


class TensorParallelModel(InsideModel):
    """One device's slices of the member's model."""

    part_name = "slice"
    divides_samples = False

    def build(self, task: Task, profile: Profile, precision: Precision) -> nn.Module:
        self._task, self._profile, self._precision = task, profile, precision
        self.model = with_frozen_base(task.build_for_shards(), profile.model, precision)
        start_training(self.model)
        refuse_gradient_hooks(self.model, "tensor")
        transformer: Any = getattr(self.model, "get_base_model", lambda: self.model)()
        styles = styles_of(transformer, self._world.mesh.size())
        probe_slices(transformer, self._world, precision.device)
        prefix = next(
            f"{name}." if name else "" for name, module in self.model.named_modules() if module is transformer
        )
        named = {prefix + name: style for name, style in styles.items()}
        self._slices = SlicedWeights(self.model, named, self._world.mesh.get_group(), precision.device)
        return self.model

    @property
    def rows(self) -> Mapping[str, Rows]:
        return self._slices.rows

    def weights(self, values: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if values or not parameter.requires_grad:
                yield name, self._slices.gathered(name)
            else:
                yield name, torch.empty(self._slices.shape(name), device="meta", requires_grad=True)

    def compute(self, function: Callable[[nn.Module], T]) -> T:
        self._slices.begin()
        return function(self.model)

    def end_passes(self, losses: torch.Tensor) -> torch.Tensor:
        firsts = self._slices.sum_gradients(losses)
        if not torch.allclose(losses, firsts, rtol=_DIFFERENCE, atol=_DIFFERENCE, equal_nan=True):
            message = (
                "the devices have computed different losses, as where a loss reads weights of which each has a slice"
            )
            raise RunFailed(message, "set layout = shard", machine=self.names[self.part[0]])
        return firsts

    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        self._slices.replace(weights)

    def trained_weights(self) -> int:
        return sum(self._slices.shape(name).numel() for name, weight in self.model.named_parameters()
                   if weight.requires_grad)  # fmt: skip

    def squares(self) -> float:
        return sum_of_squares(self._slices.counted_gradients())
