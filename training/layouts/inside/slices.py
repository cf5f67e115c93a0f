"""A model of which each device computes a slice of every matrix (Shoeybi et al. 2019, arXiv:1909.08053).

A layer divided by columns computes some of its outputs, as the heads of an attention, from the whole input; one divided
by rows, which comes after it, takes these as a part of its inputs, and the sum over the devices is its output. What is
between such a pair is a region: each device computes other numbers there, and draws other random ones. All else is done
alike on all devices, with the same random numbers.

Parameters are plain tensors under their names in the whole model; adapters are divided like the layer that they are in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from training.layouts.inside.collectives import DividedDimension, copied, divided, gathered, total_of
from training.layouts.inside.shards import rows_of
from training.numerics.randomness import generator_resetter, seed_with
from training.snapshots.pieces import Rows

_LARGE = 1 << 20
"""Elements of a gradient that is summed by itself; smaller ones are summed together."""


class _Role(NamedTuple):
    """What a device has of a weight."""

    dimension: int | None = None
    """That is divided; ``None``: it has all."""
    is_partial: bool = False
    """Whether its gradient is that of this device's slices only, although it has all of the weight."""


class SlicedWeights:
    """Divides the matrices of a model in place.

    Args:
        model: whole, on the host.
        styles: of its layers by name, see :func:`~training.layouts.inside.tensor_plans.styles_of`.
    """

    def __init__(
        self, model: nn.Module, styles: Mapping[str, str], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._model, self._group, self._device = model, group, device
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._undo: list[Callable[[], object]] = []
        roles = {
            id(weight): role for name in styles for weight, role in _roles(model.get_submodule(name), styles[name])
        }
        self._divisions: dict[str, DividedDimension] = {}
        self._partial: set[str] = set()
        self._region = _Region(group, self._rank, device, _draws(model))
        for name, style in styles.items():
            self._connect(name, model.get_submodule(name), style)
        slices: dict[int, nn.Parameter] = {}
        for name, weight in [*model.named_parameters()]:
            slices[id(weight)] = self._slice(name, weight, roles.get(id(weight), _Role()))
        _replace(model, slices)
        model.to(device)  # the buffers

    @property
    def rows(self) -> dict[str, Rows]:
        """Which rows or columns of each divided weight this device has."""
        return {
            name: division.pieces[self._rank]._replace(dimension=division.dimension)
            for name, division in self._divisions.items()
        }

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole weight."""
        shape = [*self._model.get_parameter(name).shape]
        if division := self._divisions.get(name):
            shape[division.dimension] = division.pieces[0].total
        return torch.Size(shape)

    def gathered(self, name: str) -> torch.Tensor:
        """Return a whole weight, on the device; all devices call it together."""
        weight, division = self._model.get_parameter(name).detach(), self._divisions.get(name)
        return weight if division is None else division.gather(weight)

    def replace(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the model whole weights by name, as an ordinary model; it is not trained any more."""
        for undo in self._undo:
            undo()
        _replace(self._model, {id(self._model.get_parameter(name)): nn.Parameter(weight, False)
                               for name, weight in weights.items()})  # fmt: skip

    def begin(self) -> None:
        """Forget what a computation that was broken off has left."""
        self._region.reset()

    def counted_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that this device counts: its slices; the first device also what all have."""
        weights = self._model.named_parameters()
        trained = [(name, weight.grad) for name, weight in weights if weight.grad is not None]
        return [gradient for name, gradient in trained if self._rank == 0 or name in self._divisions]

    def sum_gradients(self, figures: torch.Tensor) -> torch.Tensor:
        """Make the gradients of what all devices have the same bits on each; return the first device's ``figures``.

        Those of weights inside a region are summed; of the others, the first device's are taken.
        """
        gradients = list[torch.Tensor]()
        for name, weight in self._model.named_parameters():
            if weight.grad is not None and name not in self._divisions:
                if self._rank and name not in self._partial:
                    weight.grad.zero_()
                gradients.append(weight.grad)
        small = [gradient for gradient in gradients if gradient.numel() < _LARGE]
        flat = [figures.to(self._device) * (self._rank == 0), *(gradient.double().flatten() for gradient in small)]
        together = torch.cat(flat)
        dist.all_reduce(together, group=self._group)
        first, *sums = torch.split(together, [len(each) for each in flat])
        for gradient, total in zip(small, sums, strict=True):
            gradient.copy_(total.view(gradient.shape))
        for gradient in gradients:
            if gradient.numel() >= _LARGE:
                dist.all_reduce(gradient, group=self._group)
        return first.cpu()

    def _slice(self, name: str, weight: nn.Parameter, role: _Role) -> nn.Parameter:
        values = weight.detach()
        if role.dimension is not None:
            division = self._divisions[name] = self._division(weight.shape[role.dimension], role.dimension)
            values = division.slice(values)
        elif role.is_partial:
            self._partial.add(name)
        # a copy, or the whole stays in memory
        values = torch.empty_like(values, device=self._device, memory_format=torch.contiguous_format).copy_(values)
        return nn.Parameter(values, weight.requires_grad)

    def _division(self, total: int, dimension: int) -> DividedDimension:
        pieces = tuple(rows_of(total, rank, self._ranks) for rank in range(self._ranks))
        return DividedDimension(self._group, pieces, dimension, self._rank)

    def _connect(self, name: str, module: nn.Module, style: str) -> None:
        """Put the exchanges before and behind a layer."""
        if style == "heads":
            self._undo.append(partial(setattr, module, "num_heads", module.num_heads))
            cast(Any, module).num_heads //= self._ranks
            return
        linear: Any = getattr(module, "base_layer", module)
        before: Any = None
        after: Any = None
        if style in ("colwise", "colwise_gather_output"):
            is_region = style == "colwise"
            before = partial(self._region.enter, name.rpartition(".")[0] if is_region else "")
            if not is_region:
                after = partial(_gather_output, self._division(linear.weight.shape[0], -1))
        elif style in ("rowwise", "rowwise_split_input"):
            if style == "rowwise_split_input":
                before = partial(_split_input, self._division(linear.weight.shape[1], -1))
            after = partial(self._leave, linear)
            if linear.bias is not None:  # which is added once, to the sum
                linear.forward = partial(_without_bias, linear)
                self._undo.append(partial(linear.__dict__.pop, "forward"))
        elif style == "embedding_rowwise":
            lookup = _RowsOfEmbedding(self._division(linear.weight.shape[0], 0))
            before, after = lookup.before, lookup.after
            padding, linear.padding_idx = linear.padding_idx, lookup.local(linear.padding_idx)
            self._undo.append(partial(setattr, linear, "padding_idx", padding))
        if before is not None:
            self._undo.append(module.register_forward_pre_hook(before).remove)
        if after is not None:
            self._undo.append(module.register_forward_hook(after).remove)

    def _leave(self, linear: Any, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self._region.leave()
        total = total_of(output, self._group)
        return total if linear.bias is None else total + linear.bias.to(total.dtype)


class _Region:
    """What the layers of one region have in common: the input, whose gradients are summed once, and random numbers.

    Args:
        draws: whether the model has dropout.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, device: torch.device, draws: bool) -> None:
        self._group, self._rank, self._device, self._draws = group, rank, device, draws
        self.reset()

    def reset(self) -> None:
        self._input: tuple[torch.Tensor, torch.Tensor] | None = None
        self._name, self._take_back = "", cast(Callable[[], None] | None, None)

    def enter(self, name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the inputs of a layer divided by columns; ``name``: of its region, empty: it is none."""
        if name != self._name:  # what another one has left was broken off, as recomputed blocks are
            self.reset()
        if name and self._draws and module.training and self._take_back is None:
            self._take_back = generator_resetter(self._device)
            # not drawn, so that all else has the numbers of one process; the same where a block is recomputed
            key = zlib.crc32(torch.get_rng_state().numpy().tobytes()), zlib.crc32(name.encode()), self._rank
            seed_with(key, self._device)
        self._name = name
        tensor, *others = inputs
        return (self._copied(tensor), *others)

    def leave(self) -> None:
        if self._take_back is not None:
            self._take_back()
        self.reset()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._input is None or self._input[0] is not tensor:
            self._input = tensor, copied(tensor, self._group)
        return self._input[1]


class _RowsOfEmbedding:
    """The rows of an embedding that a device has; those of others are zeros, until they are summed."""

    def __init__(self, division: DividedDimension) -> None:
        self._division, self._rows = division, division.pieces[division.rank]

    def local(self, index: int | None) -> int | None:
        """Return the number of a row among those of this device; ``None``: another device has it."""
        is_here = index is not None and self._rows.start <= index < self._rows.end
        return cast(int, index) - self._rows.start if is_here else None

    def before(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids, *others = inputs
        self._elsewhere = (ids < self._rows.start) | (ids >= self._rows.end)
        return ((ids - self._rows.start).masked_fill(self._elsewhere, 0), *others)

    def after(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return total_of(output.masked_fill(self._elsewhere.unsqueeze(-1), 0), self._division.group)


def _gather_output(division: DividedDimension, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return gathered(output, division)


def _split_input(
    division: DividedDimension, module: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    tensor, *others = inputs
    return (divided(tensor, division), *others)


def _without_bias(linear: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return F.linear(inputs, linear.weight)


def _roles(module: Any, style: str) -> Iterator[tuple[nn.Parameter, _Role]]:
    """Yield what a device has of the weights of a layer and of its adapters."""
    whole, in_region = _Role(), _Role(is_partial=True)
    if style == "replicated_with_grad_allreduce":
        yield from ((weight, in_region) for weight in module.parameters())
        return
    if style == "heads":
        return
    by_columns = style in ("colwise", "colwise_gather_output", "embedding_rowwise")
    divided_role = _Role(0 if by_columns else 1)
    layer = getattr(module, "base_layer", module)
    yield layer.weight, divided_role
    if getattr(layer, "bias", None) is not None:
        yield layer.bias, divided_role if by_columns else whole
    for down, up in zip(*(getattr(module, name, {}).values() for name in ("lora_A", "lora_B")), strict=True):
        yield down.weight, in_region if by_columns else divided_role
        yield up.weight, divided_role if by_columns else in_region


def _draws(model: nn.Module) -> bool:
    """Whether a model has dropout, as its modules or its configuration say."""
    settings = vars(getattr(model, "config", None) or nn.Module())
    is_set = any(isinstance(value, float) and value > 0 for name, value in settings.items()
                 if name.endswith(("dropout", "pdrop", "drop")))  # fmt: skip
    return is_set or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _replace(model: nn.Module, weights: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters into a model, by the identity of the present ones, also where they are tied."""
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = weights[id(parameter)]
