"""A model of which each device holds a shard of every weight (FSDP2: Zhao et al. 2023, arXiv:2304.11277).

The blocks of the model are units: the weights of one are gathered before it computes, and freed afterwards; its
gradients are summed over the devices, and each keeps its shard of the sum. What is outside of the blocks is the last
unit. Weights are divided by rows, the elements of their first dimension.

torch holds the shards as tensors of its own kind. Everything else sees plain parameters that share their memory
(:attr:`ShardedWeights.local`): an optimizer or a strategy would gather the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from training.layouts.inside.agreement import ForwardRecord
from training.model.compiled import blocks_of
from training.snapshots.pieces import Rows

T = TypeVar("T")


class _Root(nn.Module):
    """The unit around all others: every computation with the model goes through its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        return compute(self.model)


class ShardedWeights:
    """Shards the weights of a model in place.

    Args:
        model: whole, on the host; each unit is moved to the device as a whole, and its other shards are freed there.
        mixed: how units compute.
        offload: where shards are while no unit needs them.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, mixed: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed, "offload_policy": offload}
        units = _units(model)
        for block in units:
            fully_shard(block, **options)
        self.record = ForwardRecord(model, units)
        """What this device computes in training."""
        self._root = cast(Any, fully_shard(_Root(model), **options))
        for unit in self._root.modules():
            if isinstance(unit, FSDPModule):  # gradients are summed: losses are divided by the weight of the step
                unit.set_force_sum_reduction_for_comms(True)
                unit.set_gradient_divide_factor(1.0)
        self._shards = {name: cast(DTensor, weight) for name, weight in model.named_parameters()}
        self._device = torch.device(mesh.device_type)
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()
        self.local = _plain_copy(model, {name: shard.to_local() for name, shard in self._shards.items()})
        """Parameters that are the rows of this device, and the buffers, under their names in the model."""

    @property
    def rows(self) -> dict[str, Rows]:
        """Which rows of each weight this device has."""
        return {name: rows_of(shard.shape[0], self._rank, self._ranks) for name, shard in self._shards.items()}

    def compute(self, function: Callable[[nn.Module], T]) -> T:
        """Return what a function computes with the model; all devices call it together, with the same blocks.

        Without gradients the weights outside of the blocks are freed again; else ``backward`` of the result does it.
        """
        self.record.begin_pass()
        result = self._root(function)
        if not torch.is_grad_enabled():
            self._root.reshard()
        return cast(T, result)

    def take_gradients(self) -> None:
        """Move the gradients of all passes since the last call to ``grad`` of :attr:`local`."""
        for name, parameter in self.local.named_parameters():
            gradient = cast(DTensor | None, self._shards[name].grad)
            parameter.grad, self._shards[name].grad = None if gradient is None else gradient.to_local(), None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each whole weight."""
        return {name: shard.shape for name, shard in self._shards.items()}

    def gathered(self, name: str) -> torch.Tensor:
        """Return a whole weight, on the device; all devices call it together."""
        whole: torch.Tensor = cast(DTensor, self._shards[name].detach().to(self._device)).full_tensor()
        return whole

    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        """Give the model whole weights by name, as ordinary parameters; it is not trained any more."""
        whole = {id(self._shards[name]): nn.Parameter(weight, False) for name, weight in weights.items()}
        for module in self._root.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[leaf] = whole[id(parameter)]


def rows_of(total: int, rank: int, ranks: int) -> Rows:
    """Return the rows of one device, as ``torch.chunk`` divides them: the last devices may have fewer, or none."""
    size = -(-total // ranks)
    return Rows(min(rank * size, total), min((rank + 1) * size, total), total)


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks but those that share a weight with another module: it can be in one unit only."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    blocks = [*blocks_of(model)]
    holders = Counter(id(parameter) for block in blocks for parameter in block.parameters())

    def is_unit(block: nn.Module) -> bool:
        inside, weights = set(block.modules()), [id(weight) for weight in block.parameters()]
        are_own = all(owner in inside for weight in weights for owner in owners[weight])
        return are_own and all(holders[weight] == 1 for weight in weights) and not isinstance(block, nn.ModuleList)

    return [block for block in blocks if is_unit(block)]


def _plain_copy(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """Return empty modules of the same names with these parameters, and the buffers of ``model``."""
    copies = {name: nn.Module() for name, _ in model.named_modules()}
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if leaf:
            copies[parent].add_module(leaf, copies[name])
        for buffer_name, buffer in module.named_buffers(recurse=False):
            is_saved = buffer_name not in module._non_persistent_buffers_set
            copies[name].register_buffer(buffer_name, buffer, is_saved)
    for name, weight in weights.items():
        parent, _, leaf = name.rpartition(".")
        is_trained = model.get_parameter(name).requires_grad
        copies[parent].register_parameter(leaf, nn.Parameter(weight, is_trained))
    return copies[""]
