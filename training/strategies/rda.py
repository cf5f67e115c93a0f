"""Radial-directional averaging: norm and direction of the members' deltas are averaged apart.

Decoupled DiLoCo (arXiv 2604.21428): for the deltas ``v_m`` of one tensor, with weights ``w_m`` and
``phi(x) = x / |x|``, ``phi(0) = 0``::

    RDA = (sum w_m |v_m| / sum w_m) phi(sum w_m phi(v_m) / sum w_m)

The deltas of many members are almost orthogonal to each other, so that their mean is shorter the more members there
are; this one keeps their length. Embeddings take the plain mean, as in the paper.

Each member knows its own norms, so two means are enough: that of the directions, in the codec of the deltas, and that
of the norms, one fp32 number a tensor. All members compute the norm of the mean direction from the same bits, and by
sums in one order, so they get the same scale. A direction travels with the root of its elements as its length, which
cancels out: all tensors have elements of about one, and lossy codecs share scales among neighbours. Where directions
cancel out, nothing is merged. A delta that came too late counts with its norm where that came in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from training.exchange.base import Exchange, MeanResult, Pending
from training.exchange.codecs import Codec, codec_by_name
from training.lazy import torch
from training.strategies.merged_part import MeanOfDeltas

_APART = 32
"""Elements that share a scale in a block format: directions and plain deltas, which are much smaller, share none."""


class RadialDirectional(MeanOfDeltas):
    """Merges the deltas of each tensor by norm and direction.

    Args:
        sizes: elements of the tensors that are merged so; what follows them takes the plain mean.
    """

    def __init__(self, exchange: Exchange, codec: Codec, stream: str, sizes: Sequence[int]) -> None:
        super().__init__(exchange, codec, stream)
        self._sizes, self._directed = tuple(sizes), sum(sizes)
        self._norms: Pending[MeanResult] | None = None
        self._own_norms = torch.empty(0)

    @property
    def takes_coded(self) -> bool:
        return False

    def start(self, name: str, delta: torch.Tensor, weight: float, flags: bytes) -> None:
        delta = self.feedback.compensate(delta)
        residual, self.feedback.residual = self.feedback.residual, None  # it is in the delta
        norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in self._tensors(delta)]
        self._own_norms = torch.tensor(norms, dtype=torch.float32)
        for tensor, norm in zip(self._tensors(delta), norms, strict=True):
            if norm != 0.0:
                tensor.mul_(math.sqrt(tensor.numel()) / norm)
        super().start(name, self._on_the_wire(delta), weight, flags)
        self.feedback.residual = residual
        exact = codec_by_name("fp32")
        self._norms = self.exchange.start_mean(f"{name}/norms", self._own_norms, weight, exact)

    def wait(self) -> tuple[MeanResult, torch.Tensor]:
        assert self._norms is not None
        result, sent = super().wait()
        norms = self._norms.wait().mean.tolist()
        if result.fit and (lost := self.feedback.residual) is not None:
            self.feedback.residual = self._scaled_back(lost)
        mean = self._off_the_wire(result.mean)
        for tensor, norm in zip(self._tensors(mean), norms, strict=True):
            length = same_norm(tensor)
            tensor.mul_(norm / length if length else 0.0)
        return replace(result, mean=mean), self._off_the_wire(sent)

    def _tensors(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a view of each tensor that is merged by norm and direction."""
        return iter(torch.split(values[: self._directed], list(self._sizes)))

    def _on_the_wire(self, values: torch.Tensor) -> torch.Tensor:
        gap = values.new_zeros(-self._directed % _APART)
        return torch.cat([values[: self._directed], gap, values[self._directed :]])

    def _off_the_wire(self, values: torch.Tensor) -> torch.Tensor:
        behind = self._directed + -self._directed % _APART
        return torch.cat([values[: self._directed], values[behind:]])

    def _scaled_back(self, lost: torch.Tensor) -> torch.Tensor:
        """Return what was lost of the directions as deltas: it travels with the next one."""
        lost = self._off_the_wire(lost)
        for tensor, norm in zip(self._tensors(lost), self._own_norms.tolist(), strict=True):
            tensor.mul_(norm / math.sqrt(tensor.numel()))
        return lost


def same_norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm of a flat fp32 vector, the same bits on every machine: halves are added to each other
    in fp64, element by element, until one number is left."""
    squares = values.to(torch.float64).square_()
    while squares.numel() > 1:
        half = (squares.numel() + 1) // 2
        squares[: squares.numel() - half].add_(squares[half:])
        squares = squares[:half]
    return math.sqrt(float(squares)) if squares.numel() else 0.0
