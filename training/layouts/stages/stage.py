"""The seam between a pipeline's stages and what moves tensors between them.

A pipeline gives each of its devices one stage: a contiguous range of the model's blocks, with the modules before or
after them where they belong. A stage takes what arrived from the stage before and returns what departs to the next one;
the last stage returns the loss. Who carries the tensors (a relay over the mesh, a loop in one process) needs no more
than :class:`StageModel`::

    requires_grad = ()                                   # once, handed on from stage to stage
    for stage in stages:
        requires_grad = stage.departing_require_grad(requires_grad)

    arriving = stage.arriving(batch)                     # shapes to receive, known before anything is computed
    result = stage.forward(batch, arrived, seed)         # arrived: leaves, with the requires_grad of the stage before
    torch.autograd.backward(result.tensors, gradients)   # those that require gradients; then send arrived[i].grad
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import nn

from profiles.errors import BadInput
from training.tasks.base import Batch


class TensorSpec(NamedTuple):
    """Shape and precision of a tensor that crosses from one stage to the next, for one micro-batch."""

    shape: torch.Size
    dtype: torch.dtype
    """The precision in which the receiving stage computes it, whatever it has on the wire."""


class Departing(NamedTuple):
    """What a stage hands to the next one: the hidden state [batch, length, width], then what all later stages read.

    Only stages behind an encoder have the latter (the encoder's output). A stage that ends with the encoder hands on
    nothing else.
    """

    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Cut:
    """Which blocks a stage computes. Blocks are numbered through the model; an encoder's come before its decoder's.

    Raises:
        BadInput: the bounds do not rise from 0, or there is no such stage.
    """

    bounds: tuple[int, ...]
    """Stage ``k`` computes the blocks from ``bounds[k]`` to ``bounds[k + 1]``, exclusive; the last is their number."""
    stage: int
    """Number of the stage, from 0."""

    def __post_init__(self) -> None:
        rises = all(first < last for first, last in pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rises:
            raise BadInput(f"the cut {self.bounds} leaves a stage without blocks", "give bounds that rise from 0")
        if not 0 <= self.stage < self.stages:
            raise BadInput(
                f"there is no stage {self.stage} in the cut {self.bounds}", f"stages: 0 to {self.stages - 1}"
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def blocks(self) -> range:
        """The blocks of this stage."""
        return range(self.bounds[self.stage], self.bounds[self.stage + 1])

    @property
    def is_first(self) -> bool:
        """Whether nothing arrives here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.stages - 1

    def stage_of(self, block: int) -> int:
        """Return the stage that computes a block."""
        return bisect_right(self.bounds, block) - 1


class StageModel(Protocol):
    """One stage of a model. Its parameters have the names of the whole model."""

    @property
    def cut(self) -> Cut:
        """Which stage of how many this is."""

    @property
    def module(self) -> nn.Module:
        """The model, in which stand-ins without parameters take the place of what other stages compute.

        It is trained, frozen, adapted, checkpointed and moved to a device as a whole model would be.
        """

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters that several stages hold, and these stages, this one among them.

        Such a weight's gradient is the sum of those of its holders; in a norm, and in a file, it counts once. Names are
        those of ``module.named_parameters()``.
        """

    def arriving(self, batch: Batch) -> tuple[TensorSpec, ...]:
        """Return what the stage before sends for ``batch``; empty on the first one.

        Nothing is computed but shapes, and once for all batches of one shape.
        """

    def departing_require_grad(self, arriving: Sequence[bool]) -> tuple[bool, ...]:
        """Return which departing tensors require a gradient from the next stage, given those that arrive.

        The same for every batch, for as long as the same parameters are trained. Empty on the last stage.
        """

    def forward(
        self, batch: Batch, arrived: Sequence[torch.Tensor] = (), seed: int | None = None
    ) -> Departing | torch.Tensor:
        """Compute the stage's part of the loss of one micro-batch.

        Args:
            batch: the micro-batch, the same on all stages, on the device of the module.
            arrived: one tensor for each of :meth:`arriving`, on that device.
            seed: of this micro-batch's dropout, the same on all stages. Each block draws from a generator of its own,
                so stages draw what one process would. ``None``: dropout draws from the process's generators.

        Returns:
            What departs; on the last stage the scalar loss.

        Raises:
            RunFailed: the model did not pass through the stage's blocks.
            UnexpectedArrival: what arrived is not :meth:`arriving`.
        """
