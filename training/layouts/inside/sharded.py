"""The layout of a member whose devices each hold a shard of every weight, and compute some of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from profiles.errors import BadInput
from profiles.schema import Profile
from training.hardware.device import Precision, start_training
from training.layouts.inside.agreement import different_passes, refuse_gradient_hooks
from training.layouts.inside.inside_model import InsideModel, sum_of_squares
from training.layouts.inside.shards import ShardedWeights
from training.snapshots.pieces import Rows
from training.strategies.weights import trainable
from training.tasks.base import Task
from training.tasks.frozen_base import with_frozen_base

T = TypeVar("T")


class ShardedModel(InsideModel):
    """One device's shard of the member's model."""

    part_name = "shard"
    divides_samples = True

    def build(self, task: Task, profile: Profile, precision: Precision) -> nn.Module:
        self._task, self._profile, self._precision = task, profile, precision
        whole = with_frozen_base(task.build_for_shards(), profile.model, precision)
        start_training(whole)
        _refuse_batch_statistics(whole)
        refuse_gradient_hooks(whole, "shard")
        try:
            self._weights = ShardedWeights(whole, self._world.mesh, mixed(precision), offload(profile, precision))
        except (ValueError, NotImplementedError) as error:  # a scalar, a weight that is not contiguous
            reason = " ".join(str(error).split())[:200]
            raise BadInput(f"layout = shard: the model cannot be sharded: {reason}", "set layout = pipeline") from error
        self._whole, self.model = whole, self._weights.local
        return self.model

    @property
    def module(self) -> nn.Module:
        return self._whole

    @property
    def rows(self) -> Mapping[str, Rows]:
        return self._weights.rows

    def weights(self, values: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            if values or not parameter.requires_grad:
                yield name, self._weights.gathered(name)
            else:
                yield name, torch.empty(self._weights.shapes[name], device="meta", requires_grad=True)

    def compute(self, function: Callable[[nn.Module], T]) -> T:
        return self._weights.compute(function)

    def end_passes(self, losses: torch.Tensor) -> torch.Tensor:
        self._weights.take_gradients()
        computed = float(self._weights.record.checksum())
        *sums, total = self.sum_over_devices(torch.cat([losses, torch.tensor([computed], dtype=torch.float64)]))
        if total != computed * self._carrier.stages:
            raise different_passes()
        return torch.stack(sums) if sums else losses

    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights.replace(weights)

    def trained_weights(self) -> int:
        return sum(
            self._weights.shapes[name].numel() for name, weight in self.model.named_parameters() if weight.requires_grad
        )

    def squares(self) -> float:
        return sum_of_squares([weight.grad for weight in trainable(self.model) if weight.grad is not None])


def mixed(precision: Precision) -> MixedPrecisionPolicy:
    """Return how units compute: on a GPU in bf16, weights travel as autocast would cast them at each use.

    On a CPU, layers that autocast leaves in float32 take no weights of another type.
    """
    if precision.dtype is torch.bfloat16 and precision.device.type == "cuda":
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def offload(profile: Profile, precision: Precision) -> OffloadPolicy:
    """Return where shards are while no unit needs them.

    Raises:
        BadInput: they are to be in main memory, and the device has no other.
    """
    if profile.run.offload and precision.device.type != "cuda":
        raise BadInput(f"offload = true: {precision.device.type} computes in main memory anyway", "leave it out")
    return CPUOffloadPolicy() if profile.run.offload else OffloadPolicy()


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Raise BadInput for layers that look at a whole batch, of which each device has some samples only."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            message = f"layout = shard: {name} takes the statistics of a batch, which is divided over devices"
            raise BadInput(message, "set layout = replicate")
