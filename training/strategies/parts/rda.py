"""Radial-directional averaging: norm and direction of the members' deltas are averaged separately.

Decoupled DiLoCo (arXiv 2604.21428): for the deltas ``v_m`` of one tensor, with weights ``w_m`` and
``phi(x) = x / |x|``, ``phi(0) = 0``::

    RDA = (sum w_m |v_m| / sum w_m) phi(sum w_m phi(v_m) / sum w_m)

The deltas of many members are almost orthogonal to each other, so their mean gets shorter with the number of
members; this average keeps their length. Embeddings take the plain mean, as in the paper.

Two means are enough: that of the directions, in the codec of the deltas, and that of the norms, one fp32 number a
tensor. All members compute the norm of the mean direction from the same bits in the same order, so they get the same
scale. A direction is sent with the square root of its size as its length, so that elements of all tensors are about one
and lossy codecs can share scales among neighbours; the factor cancels out. If the directions cancel out, nothing is
merged. A delta that came too late still counts with its norm, if that came in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from training.exchange.base import Exchange, MeanResult, Pending
from training.exchange.codecs import Codec, EncodedVector, codec_by_name
from training.lazy import torch
from training.strategies.parts.outer_fragment import PseudoGradientMean

_BLOCK = 32
"""Elements that share a scale in a block format. Padding keeps directions and plain deltas, which are much smaller,
in different blocks."""


class RadialDirectional(PseudoGradientMean):
    """Averages norm and direction of each tensor's deltas separately.

    Args:
        sizes: elements of the leading tensors that are averaged so; the rest of the vector takes the plain mean.
    """

    means_on_device: ClassVar[bool] = False  # where each norm would be waited for

    def __init__(self, exchange: Exchange, codec: Codec, stream: str, sizes: Sequence[int]) -> None:
        super().__init__(exchange, codec, stream)
        self._sizes, self._directed = tuple(sizes), sum(sizes)
        self._norms: Pending[MeanResult] | None = None
        self._local_norms = torch.empty(0)

    def start(self, name: str, delta: torch.Tensor, weight: float, flags: bytes) -> None:
        delta = self.feedback.compensate(delta)
        residual, self.feedback.residual = self.feedback.residual, None  # compensate has added it to the delta
        tensors = self._tensors(delta)
        norms: list[float] = torch.stack(torch._foreach_norm(tensors, dtype=torch.float64)).tolist()
        self._local_norms = torch.tensor(norms, dtype=torch.float32)
        factors = [math.sqrt(tensor.numel()) / norm if norm else 1.0 for tensor, norm in zip(tensors, norms)]
        torch._foreach_mul_(tensors, factors)
        super().start(name, self._on_the_wire(delta), weight, flags)
        self.feedback.residual = residual
        exact = codec_by_name("fp32")
        self._norms = self.exchange.start_mean(f"{name}/norms", self._local_norms, weight, exact)

    def wait(self) -> tuple[MeanResult, torch.Tensor | EncodedVector]:
        assert self._norms is not None
        result, sent = super().wait()
        norms = self._norms.wait().mean.tolist()
        if result.is_finite and (lost := self.feedback.residual) is not None:
            self.feedback.residual = self._as_deltas(lost)
        mean = self._off_the_wire(result.mean)
        for tensor, norm in zip(self._tensors(mean), norms, strict=True):
            length = same_norm(tensor)
            tensor.mul_(norm / length if length else 0.0)
        return replace(result, mean=mean), self._off_the_wire(sent) if isinstance(sent, torch.Tensor) else sent

    def _tensors(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each tensor that is averaged by norm and direction."""
        return list(torch.split(values[: self._directed], list(self._sizes)))

    def _on_the_wire(self, values: torch.Tensor) -> torch.Tensor:
        gap = values.new_zeros(-self._directed % _BLOCK)
        return torch.cat([values[: self._directed], gap, values[self._directed :]])

    def _off_the_wire(self, values: torch.Tensor) -> torch.Tensor:
        rest_start = self._directed + -self._directed % _BLOCK
        return torch.cat([values[: self._directed], values[rest_start:]])

    def _as_deltas(self, lost: torch.Tensor) -> torch.Tensor:
        """Return the encoding loss of the directions in units of deltas, to be added to the next one."""
        lost = self._off_the_wire(lost)
        tensors, norms = self._tensors(lost), self._local_norms.tolist()
        torch._foreach_mul_(tensors, [norm / math.sqrt(one.numel()) for one, norm in zip(tensors, norms)])
        return lost


def same_norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm of a flat fp32 vector, with the same bits on every machine.

    The squares are summed in fp64 by adding one half of the vector to the other until one number is left.
    """
    squares = values.to(torch.float64).square_()
    while squares.numel() > 1:
        half = (squares.numel() + 1) // 2
        squares[: squares.numel() - half].add_(squares[half:])
        squares = squares[:half]
    return math.sqrt(float(squares)) if squares.numel() else 0.0
