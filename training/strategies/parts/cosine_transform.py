"""Tensors in chunks, the cosine transform of these, and signs of the inverse transform that all processors agree on."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from training.lazy import torch

_BITS = 20
"""Precision of the integers for coefficients and for the transform."""


@functools.cache
def transform(size: int) -> torch.Tensor:
    """Return the orthonormal DCT-II of ``size`` values as a matrix of fp64, a row for each coefficient."""
    position, frequency = torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    matrix = torch.cos(math.pi / (2 * size) * (2 * position + 1) * frequency) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix


@functools.cache
def _matrix(size: int, device: torch.device) -> torch.Tensor:
    return transform(size).float().to(device)


@functools.cache
def _integer_matrix(size: int, device: torch.device) -> torch.Tensor:
    """Return :func:`transform` in integers of 20 bits, as fp64."""
    return (transform(size) * 2.0**_BITS).round_().to(device)


@dataclass(frozen=True)
class Chunks:
    """Division of a tensor into chunks."""

    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: Sequence[int], chunk: int) -> Chunks:
        """Return the division of a tensor into chunks of at most ``chunk`` by ``chunk``."""
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape[1:] if len(shape) > 1 else shape)
        return cls(rows, columns, min(chunk, rows), min(chunk, columns))

    @property
    def size(self) -> int:
        """Elements of a chunk."""
        return self.height * self.width

    @property
    def number(self) -> int:
        """Number of chunks; 0 for an empty tensor."""
        return -(-self.rows // self.height) * -(-self.columns // self.width) if self.size else 0

    def cut(self, tensors: torch.Tensor) -> torch.Tensor:
        """Return the chunks of stacked tensors, one tensor's after the other's: [tensors * number, height, width]."""
        down, right = -self.rows % self.height, -self.columns % self.width
        filled = tensors.reshape(-1, self.rows, self.columns)
        if down or right:
            filled = torch.nn.functional.pad(filled, (0, right, 0, down))
        blocks = filled.view(-1, self.height, filled.shape[2] // self.width, self.width)
        return blocks.transpose(1, 2).reshape(-1, self.height, self.width)

    def joined(self, chunks: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`cut`: return matrices of the tensors' rows and columns, [tensors, rows, columns]."""
        down, across = -(-self.rows // self.height), -(-self.columns // self.width)
        blocks = chunks.view(-1, across, self.height, self.width).transpose(1, 2)
        matrices = blocks.reshape(-1, down * self.height, across * self.width)
        return matrices[:, : self.rows, : self.columns]

    def encoded(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return the DCT coefficients of chunks, a row for each chunk."""
        left, right = (_matrix(size, chunks.device) for size in (self.height, self.width))
        return (left @ chunks @ right.T).flatten(1)

    def decoded(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`encoded`."""
        left, right = (_matrix(size, coefficients.device) for size in (self.height, self.width))
        return left.T @ coefficients.view(-1, self.height, self.width) @ right


def signs(coefficients: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the signs of the inverse transform as int8 [number, height, width]; the same bits on every machine.

    Coefficients and transform are rounded to integers of 20 bits. All sums of their products are integers below 2^53,
    exact in fp64, so that neither their order nor the processor matters.

    Args:
        coefficients: fp32 or fp64, a row for each chunk. The scale of a row does not matter.
    """
    peak = coefficients.abs().amax(1, keepdim=True)
    power = torch.where(peak > 0, peak / torch.frexp(peak).mantissa, torch.ones_like(peak))
    integers = (coefficients.double() / power.double() * 2.0**_BITS).round_()
    left, right = (_integer_matrix(size, coefficients.device) for size in (height, width))
    half_transformed = (left.T @ integers.view(-1, height, width)).mul_(2.0**-_BITS).round_()
    return (half_transformed @ right).sign_().to(torch.int8)
