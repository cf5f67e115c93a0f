"""Cuts a model in place into one stage, and runs that stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from profiles.errors import BadInput, RunFailed
from training.layouts.stages.anatomy import Anatomy
from training.layouts.stages.stage import Cut, Departing, TensorSpec
from training.layouts.stages.stand_ins import (
    Arrived,
    Crossing,
    Departed,
    EncoderOutput,
    Passed,
    Shape,
    StageEnd,
    UnexpectedArrival,
)
from training.tasks.base import Batch

Loss = Callable[[nn.Module, Batch], torch.Tensor]
"""The scalar loss of a batch: a task's."""

_RECORD = "_muster_stage"
"""The attribute of a cut model that holds its :class:`StageRecord`."""


@dataclass(frozen=True)
class StageRecord:
    """What a cut model knows of its stage."""

    cut: Cut
    anatomy: Anatomy
    crossing: Crossing

    @property
    def ends_with_encoder(self) -> bool:
        """Whether the encoder's output is all that departs."""
        return not self.cut.is_last and self.cut.blocks.stop == self.anatomy.encoder_blocks

    @property
    def is_behind_encoder(self) -> bool:
        """Whether the encoder's output arrives."""
        return 0 < self.anatomy.encoder_blocks <= self.cut.blocks.start

    @property
    def takes_hidden(self) -> bool:
        """Whether a block's output arrives."""
        return not self.cut.is_first and self.cut.blocks.start != self.anatomy.encoder_blocks

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The weights that several stages hold, by their first name in the model, and these stages."""
        holders = {name: {self.cut.stage_of(block) for block in blocks} for name, blocks in self.anatomy.shared.items()}
        holders |= {name: set(range(self.cut.stages)) for name in self.anatomy.everywhere}
        return {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}


def place_stand_ins(model: nn.Module, cut: Cut, anatomy: Anatomy) -> None:
    """Put stand-ins for all modules that stage ``cut.stage`` does not compute; their weights give their memory back.

    Raises:
        BadInput: the cut is for another number of blocks, or separates blocks that use one weight.
    """
    refuse_other_count(cut.bounds, anatomy, type(model).__name__)
    record = StageRecord(cut, anatomy, Crossing())
    object.__setattr__(model, _RECORD, record)
    for name, stand_in in list(_stand_ins(model, record)):
        _replace(model, name, stand_in)
    _watch_memory(model, record)
    _draw_by_name(model, record)


def refuse_other_count(bounds: tuple[int, ...], anatomy: Anatomy, name: str) -> None:
    """Raise BadInput unless the bounds of a cut are for as many blocks as the model ``name`` has."""
    if bounds[-1] != len(anatomy.blocks):
        raise BadInput(
            f"the cut {bounds} is not for the {len(anatomy.blocks)} blocks of {name}", "plan it for this model anew"
        )


def _stand_ins(model: nn.Module, record: StageRecord) -> Iterator[tuple[str, nn.Module]]:
    cut, anatomy, crossing = record.cut, record.anatomy, record.crossing
    for index, name in enumerate(anatomy.blocks):
        if index in cut.blocks:
            continue
        if record.is_behind_encoder and name == anatomy.memory:
            yield name, EncoderOutput(model.get_submodule(name), crossing, not record.takes_hidden)
        elif index == cut.blocks.start - 1 and record.takes_hidden:
            yield name, Arrived(model.get_submodule(name), crossing, anatomy.gives_pairs)
        elif index >= cut.blocks.stop:
            yield name, Departed(model.get_submodule(name), crossing)
        else:
            yield name, Passed(model.get_submodule(name), crossing, anatomy.gives_pairs)
    held = _held_for_others(record)
    for name, home in anatomy.homes.items():
        if home in cut.blocks or any(f"{module}.".startswith(f"{name}.") for module in held):
            continue
        if record.is_behind_encoder and name == anatomy.memory:
            yield name, EncoderOutput(model.get_submodule(name), crossing, not record.takes_hidden)
        else:
            kind = Shape if home < cut.blocks.start else Departed
            yield name, kind(model.get_submodule(name), crossing)


def _held_for_others(record: StageRecord) -> set[str]:
    """Return the modules whose weight another module of this stage uses."""
    cut, anatomy = record.cut, record.anatomy
    modules = {name.rpartition(".")[0] for name, stages in record.shared.items() if cut.stage in stages}
    for name in modules:
        if any(name == block or name.startswith(block + ".") for block in anatomy.blocks):
            message = f"the cut {cut.bounds} separates blocks that use one weight, {name}"
            raise BadInput(message, "put these blocks on one stage")
    return modules


def _replace(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    stand_in.train(model.training)
    setattr(owner, leaf, stand_in)


def _draw_by_name(model: nn.Module, record: StageRecord) -> None:
    """Give what follows each block random numbers of its own, the same on every stage.

    They are set on leaving a module and not on entering the next one: a checkpoint around a block, inside of it or
    outside, then saves the very state from which the block draws, and restores it when the block is recomputed.
    """
    for name in {*record.anatomy.blocks, record.anatomy.memory} - {""}:
        model.get_submodule(name).register_forward_hook(partial(_leave, record.crossing, name))


def _leave(crossing: Crossing, name: str, *_: Any) -> None:
    crossing.reseed(name)


def _watch_memory(model: nn.Module, record: StageRecord) -> None:
    """Let the encoder's output depart from the stage that computes it."""
    anatomy, crossing = record.anatomy, record.crossing
    if not anatomy.memory or record.is_behind_encoder or record.cut.is_last:
        return
    if record.cut.blocks.stop < anatomy.encoder_blocks:
        return

    def depart(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if record.ends_with_encoder:
            raise StageEnd(output)
        crossing.memory = output

    model.get_submodule(anatomy.memory).register_forward_hook(depart)


def record_of(model: nn.Module) -> tuple[nn.Module, StageRecord]:
    """Return the cut model in ``model``, which adapters may have wrapped, and its record.

    Raises:
        BadInput: it is not cut.
    """
    for module in model.modules():
        if _RECORD in module.__dict__:
            return module, module.__dict__[_RECORD]
    raise BadInput(f"{type(model).__name__} is not cut into stages")


class CutModel:
    """A :class:`~training.layouts.stages.stage.StageModel`: a cut model and the loss that is computed with it.

    Args:
        module: a cut model, or what wraps it.
        loss: a task's, which runs unchanged on every stage; only the last one comes to its end.

    Raises:
        BadInput: the module is not cut.
    """

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._module, self._loss = module, loss
        self._base, self._record = record_of(module)
        self._arriving: dict[tuple[Any, ...], tuple[TensorSpec, ...]] = {}

    @property
    def cut(self) -> Cut:
        """Which stage of how many this is."""
        return self._record.cut

    @property
    def module(self) -> nn.Module:
        """The model with its stand-ins."""
        return self._module

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters that several stages hold, and these stages."""
        stages = {
            id(parameter): self._record.shared[name]
            for name, parameter in self._base.named_parameters()
            if self.cut.stage in self._record.shared.get(name, ())
        }
        named = self._module.named_parameters()
        return {name: stages[id(parameter)] for name, parameter in named if id(parameter) in stages}

    def arriving(self, batch: Batch) -> tuple[TensorSpec, ...]:
        """Return what the stage before sends for ``batch``; empty on the first one."""
        if self.cut.is_first:
            return ()
        tensors = [leaf for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor)]
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._arriving:
            self._arriving[key] = self._measure(batch)
        return self._arriving[key]

    def _measure(self, batch: Batch) -> tuple[TensorSpec, ...]:
        crossing = self._record.crossing
        # the model's own forward up to where something arrives: no rule for a shape that the model does not have
        with torch.no_grad(), crossing.under_way(_device_of(batch), seed=0):
            measured = crossing.measured = list[TensorSpec]()
            try:
                self._loss(self._module, batch)
            except StageEnd:
                return tuple(measured)
        raise self._missed()

    def departing_require_grad(self, arriving: Sequence[bool]) -> tuple[bool, ...]:
        """See :meth:`~training.layouts.stages.stage.StageModel.departing_require_grad`."""
        record, blocks = self._record, self.cut.blocks
        if record.cut.is_last:
            return ()
        trained = [name for name, parameter in self._base.named_parameters() if parameter.requires_grad]
        boundary = record.anatomy.encoder_blocks
        if not boundary or blocks.stop <= boundary:
            return (any(arriving) or bool(trained),)
        in_encoder = sum(name.startswith(record.anatomy.encoder) for name in trained)
        memory = arriving[-1] if record.is_behind_encoder else any(arriving) or in_encoder > 0
        return (any(arriving) or memory or len(trained) > in_encoder, memory)

    def forward(
        self, batch: Batch, arrived: Sequence[torch.Tensor] = (), seed: int | None = None
    ) -> Departing | torch.Tensor:
        """Compute the stage's share of a loss; see :meth:`~training.layouts.stages.stage.StageModel.forward`."""
        crossing, record = self._record.crossing, self._record
        if len(arrived) != record.is_behind_encoder + record.takes_hidden:
            raise UnexpectedArrival(
                [list(tensor.shape) for tensor in arrived], [list(spec.shape) for spec in self.arriving(batch)]
            )
        with crossing.under_way(_device_of(batch), seed):
            # copies: autocast casts a leaf once for all its uses, and would sum their gradients in its own precision;
            # and a block may write into what it is given, which a view of a leaf forbids
            tensors = [tensor.clone() for tensor in arrived]
            crossing.memory = tensors.pop() if record.is_behind_encoder else None
            crossing.hidden = tensors.pop() if record.takes_hidden else None
            try:
                loss = self._loss(self._module, batch)
            except StageEnd as end:
                departing: Departing | torch.Tensor = Departing(end.tensors)
            else:
                if not self.cut.is_last:
                    raise self._missed()
                departing = loss
            if crossing.hidden is not None:
                raise self._missed()
        return departing

    def _missed(self) -> RunFailed:
        name = type(self._base).__name__
        stage = f"stage {self.cut.stage + 1} of {self.cut.stages}"
        return RunFailed(
            f"{stage} of {name} did not pass through its blocks {self.cut.blocks.start} to {self.cut.blocks.stop - 1}",
            "layers that are dropped at random (layerdrop) cannot be cut into stages: set them to 0, or train it whole",
        )


def _device_of(batch: Batch) -> torch.device:
    """Return the device of a batch."""
    return next(leaf.device for leaf in tree_leaves(dict(batch)) if isinstance(leaf, torch.Tensor))
