"""Exchanges inside a forward and its backward, by which devices compute parts of one matrix product together.

The pairs of Shoeybi et al. 2019 (arXiv:1909.08053, section 3): what is copied in one direction is summed in the other,
and what is gathered in one is divided in the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from training.snapshots.pieces import Rows


class DividedDimension(NamedTuple):
    """How a dimension is divided over the devices of a group."""

    group: dist.ProcessGroup
    pieces: tuple[Rows, ...]
    """By device."""
    dimension: int
    rank: int

    def slice(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece of this device, in the memory of ``whole``."""
        start, end = self.pieces[self.rank][:2]
        return whole.narrow(self.dimension, start, end - start)

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Return the pieces of all devices as one tensor, the same on each."""
        sizes = [end - start for start, end, *_ in self.pieces]
        if missing := max(sizes) - sizes[self.rank]:  # all send the same number of elements
            shape = [*piece.shape]
            shape[self.dimension] = missing
            piece = torch.cat([piece, piece.new_zeros(shape)], self.dimension)
        piece = piece.contiguous()
        pieces = [torch.empty_like(piece) for _ in sizes]
        dist.all_gather(pieces, piece, group=self.group)
        whole = [each.narrow(self.dimension, 0, size) for each, size in zip(pieces, sizes, strict=True)]
        return torch.cat(whole, self.dimension)


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the tensors of all devices, the same bits on each."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def copied(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what all devices have as the input of what each computes in part; its gradients are summed."""
    return _applied(_Copied, tensor, group)


def total_of(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of what the devices have computed in part; all get the whole gradient."""
    return _applied(_Summed, tensor, group)


def gathered(tensor: torch.Tensor, division: DividedDimension) -> torch.Tensor:
    """Return the pieces that the devices have computed as one tensor; each gets the gradient of its piece."""
    return _applied(_Gathered, tensor, division)


def divided(tensor: torch.Tensor, division: DividedDimension) -> torch.Tensor:
    """Return this device's piece of what all devices have; the gradients of all pieces are gathered."""
    return _applied(_Divided, tensor, division)


def _applied(function: Any, tensor: torch.Tensor, division: object) -> torch.Tensor:
    """Call a function of autograd, whose ``apply`` torch does not annotate."""
    return cast(torch.Tensor, function.apply(tensor, division))


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, division: DividedDimension) -> torch.Tensor:
        ctx.division = division
        return division.gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.division.slice(gradient).contiguous(), None


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, division: DividedDimension) -> torch.Tensor:
        ctx.division = division
        return division.slice(tensor).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.division.gather(gradient), None
