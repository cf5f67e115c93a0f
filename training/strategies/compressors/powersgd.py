"""PowerSGD: gradients of matrices are sent as two low-rank factors, by one step of power iteration.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv 1905.13727). For every matrix M of rows by columns, with this member's error E (algorithm 2) and the Q of the
step before (algorithm 1)::

    M   <- G + E
    P   <- mean of M Q            rank times rows values
    P   <- orthonormal columns of P
    Q   <- mean of M' P           rank times columns values
    E   <- M - P Q'               the mean gradient is P Q'

The means are weighted as without compression, so the weighted mean of the members' E + P Q' is that of M. Convolutions
are matrices with a row for every output. Vectors are sent uncompressed together with P, and so are matrices whose
factors would not be smaller; with a rank that high the mean is exact. In the first ``powersgd_start`` steps all is sent
uncompressed.

P Q' has the same bits on every member: the means have, and :func:`orthonormal` and :func:`product` sum in a fixed order
with operations that IEEE 754 rounds correctly. A direction that is missing in M Q, as with a zero gradient, is replaced
by a random one; otherwise it would never come back.

The errors belong to their member and leave with it; Q belongs to the group. A newcomer starts with an error of zero, as
all did. A contribution that was too late stays in the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from profiles.declarations import OptionsByOwner, Section, option
from training.exchange.base import MeanResult, Pending
from training.lazy import torch
from training.strategies.compressors.base import BucketContext, Compressor, Price, StepContext, register, unused

_DEPENDENT = 1e-10
"""Squared norm left of a column, relative to before, below which it depends on the columns before it."""


class PowerSGDOptions(Section):
    """Options of :class:`PowerSGD`."""

    powersgd_rank: int = option(
        4, "rank of the two factors that a matrix's gradient is sent as", ge=1, le=4096, advanced=True
    )
    powersgd_start: int = option(
        100, "steps that send whole gradients before powersgd compresses any", ge=0, advanced=True
    )


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the column sums of [rows, columns] by pairwise halving, with the same bits on every processor."""
    while (rows := values.shape[0]) > 1:
        half = rows // 2
        folded = values[:half] + values[half : 2 * half]
        values = torch.cat([folded, values[2 * half :]]) if rows % 2 else folded
    return values[0]


def _random_column(rows: int, earlier: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random unit column orthogonal to the ``earlier`` columns."""
    column = torch.rand(rows, generator=torch.Generator().manual_seed(seed)).sub_(0.5).to(earlier.device)
    for _ in range(2):
        for earlier_column in earlier.unbind(1):
            column = column - earlier_column * total((earlier_column * column)[:, None])
    return column / total((column * column)[:, None]).sqrt()


def orthonormal(matrix: torch.Tensor, seed: int) -> torch.Tensor:
    """Return an orthonormal basis of a matrix's columns by modified Gram-Schmidt, twice; the same bits everywhere.

    Args:
        matrix: fp32 [rows, columns], no more columns than rows.
        seed: of the random directions that replace dependent columns.
    """
    rows, columns = matrix.shape
    for pass_index in range(2):
        peak = matrix.abs().amax(0)
        matrix = matrix / torch.where(peak > 0, peak, torch.ones_like(peak))
        squares = total(matrix * matrix)
        for index in range(columns):
            column = matrix[:, index]
            square = total((column * column)[:, None])[0]
            if bool(square > _DEPENDENT * squares[index]):
                column = column / square.sqrt()
            else:
                column = _random_column(rows, matrix[:, :index], (2 * seed + pass_index) * 4096 + index)
            matrix[:, index] = column
            if index + 1 < columns:
                remaining = matrix[:, index + 1 :]
                matrix[:, index + 1 :] = remaining - column[:, None] * total(column[:, None] * remaining)
    return matrix


def product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return ``p q'`` with the same bits on every processor."""
    result = p[:, :1] * q[:, 0]
    for index in range(1, p.shape[1]):
        result += p[:, index : index + 1] * q[:, index]
    return result


@dataclass
class _Matrix:
    """A tensor of a bucket that is sent as two factors."""

    number: int
    """Index in its bucket."""
    start: int
    rows: int
    columns: int
    rank: int
    q: torch.Tensor
    """Orthonormal [columns, rank]; state of the group."""
    p: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Orthonormal [rows, rank]; of the current step."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the view of this matrix in a bucket's flat values."""
        return values[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass
class _Step:
    """State of the current step."""

    step_context: StepContext
    contribution: torch.Tensor
    """Gradients plus errors."""
    compressed: bool
    first_mean: Pending[MeanResult]
    first_result: MeanResult | None = None
    second_mean: Pending[MeanResult] | None = None
    q: torch.Tensor | None = None
    """The mean of Q, flat; ``None``: no member sent one."""
    result: MeanResult | None = None


@register
class PowerSGD(Compressor):
    """Low-rank factors of matrices, with error feedback and warm start."""

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[str] = "low-rank factors of matrices"
    options = PowerSGDOptions

    @classmethod
    def price(cls, settings: OptionsByOwner) -> Price:
        """Return the costs after the first steps, for a typical transformer: 64 times as wide as it has layers.

        Its ``12 d^2`` values a layer are four square matrices and two that are four times as wide: ``18 r d`` values
        of factors, and ``13 d`` of vectors. The work of three products and a sum over the ranks is estimated.
        """
        rank = settings.of(PowerSGDOptions).powersgd_rank

        def elements(trainable: int) -> int:
            width: float = (trainable * 64 / 12) ** (1 / 3)
            return math.ceil(trainable * min(1.0, (1.5 * rank + 1.1) / width))

        source = "PowerSGD: as without compression at rank 4, from scratch, ResNet18 and LSTM (arXiv 1905.13727)"
        return Price(("fp32", "bf16"), elements, 3, 4.0 + 1.5 * rank, 0.5, source)

    def __init__(self, context: BucketContext) -> None:
        super().__init__(context)
        options = context.settings.of(PowerSGDOptions)
        self._start = options.powersgd_start
        self._error: torch.Tensor | None = None
        self._step: _Step | None = None
        self._matrices: list[_Matrix] = []
        self._uncompressed_spans: list[slice] = []
        """Slices of the values that are sent uncompressed."""
        start = 0
        for number, shape in enumerate(context.shapes):
            size, rows = math.prod(shape), shape[0] if shape else 1
            columns = size // max(1, rows)
            rank = min(options.powersgd_rank, rows, columns)
            if rank * (rows + columns) < size:
                random = torch.Generator().manual_seed((context.seed * 65_537 + context.index) * 65_537 + number)
                q = orthonormal(torch.randn(columns, rank, generator=random), number)
                self._matrices.append(_Matrix(number, start, rows, columns, rank, q))
            else:
                self._uncompressed_spans.append(slice(start, start + size))
            start += size

    # ---------------------------------------------------------------------------------------------------------- a step

    def start(self, values: torch.Tensor, step_context: StepContext) -> None:
        context, contribution = self.context, values if self._error is None else values.add_(self._error)
        compressed = step_context.step >= self._start and bool(self._matrices)
        sent = contribution
        if compressed:
            for matrix in self._matrices:
                matrix.q = matrix.q.to(contribution.device)
            factors = [(matrix.of(contribution) @ matrix.q).reshape(-1) for matrix in self._matrices]
            sent = torch.cat([*factors, *(contribution[span] for span in self._uncompressed_spans)])
        name = f"grad/{step_context.step}/{context.index}"
        first_mean = context.exchange.start_mean(name, sent, step_context.weight, context.codec, step_context.flags)
        self._step = _Step(step_context, contribution, compressed, first_mean)

    def continue_after_first_mean(self) -> None:
        step = self._current_step()
        step.first_result = step.first_mean.wait()
        if not step.compressed:
            return
        mean, offset = step.first_result.mean, 0
        for matrix in self._matrices:
            mean_factor = mean[offset : offset + matrix.rows * matrix.rank].view(matrix.rows, matrix.rank)
            matrix.p = orthonormal(mean_factor, self._seed(matrix))
            offset += matrix.rows * matrix.rank
        factors = [(matrix.of(step.contribution).T @ matrix.p).reshape(-1) for matrix in self._matrices]
        sent = torch.cat(factors)
        is_finite = step.first_result.is_finite
        name = f"grad/{step.step_context.step}/{self.context.index}/q"
        weight = step.step_context.weight if is_finite else 0.0
        sent = sent if is_finite else torch.zeros_like(sent)
        step.second_mean = self.context.exchange.start_mean(name, sent, weight, self.context.codec)

    def wait(self) -> MeanResult:
        step = self._current_step()
        first_result = step.first_result
        assert first_result is not None
        step.result = first_result
        if step.second_mean is not None:
            second_result = step.second_mean.wait()
            step.q = second_result.mean if second_result.weight else None
            mean = torch.zeros_like(step.contribution)
            offset = first_result.mean.numel() - sum(span.stop - span.start for span in self._uncompressed_spans)
            left_out = self._left_out(first_result, second_result, offset)
            for span in self._uncompressed_spans:
                size = span.stop - span.start
                mean[span] = first_result.mean[offset : offset + size]
                offset += size
            for matrix, q in self._factors(step.q):
                matrix.of(mean).copy_(product(matrix.p, q))
            step.result = MeanResult(
                mean,
                first_result.weight,
                second_result.members,
                left_out,
                tuple(sorted({*first_result.refused, *second_result.refused})),
                first_result.flags,
                first_result.is_finite and second_result.is_finite,
            )
        return step.result

    def settle(self) -> None:
        step = self._current_step()
        result, self._step = step.result, None
        assert result is not None
        if step.compressed:
            for matrix, q in self._factors(step.q):
                matrix.q, matrix.p = orthonormal(q, self._seed(matrix, step.step_context.step)), torch.empty(0)
        if not result.is_finite:
            return  # the error before the step stays
        self._error = step.contribution if step.step_context.weight == 0.0 else self._missing_in_mean(step, result)

    def _missing_in_mean(self, step: _Step, result: MeanResult) -> torch.Tensor:
        """Return what of this member's contribution is not in the mean."""
        lost = torch.zeros_like(step.contribution)
        if step.compressed:
            for matrix in self._matrices:
                matrix.of(lost).copy_(matrix.of(step.contribution) - matrix.of(result.mean))
        for start, stop in result.left_out:
            lost[start:stop] = step.contribution[start:stop]
        for span in unused(self.context.shapes, result.flags):
            lost[span] = step.contribution[span]
        return lost

    def _factors(self, q: torch.Tensor | None) -> Sequence[tuple[_Matrix, torch.Tensor]]:
        """Return the matrices with their slices of the mean Q; empty if no member sent one."""
        factors, offset = [], 0
        for matrix in self._matrices if q is not None else ():
            size = matrix.columns * matrix.rank
            assert q is not None
            factors.append((matrix, q[offset : offset + size].view(matrix.columns, matrix.rank)))
            offset += size
        return factors

    def _left_out(
        self, first_result: MeanResult, second_result: MeanResult, vectors: int
    ) -> tuple[tuple[int, int], ...]:
        """Return the spans of this member's bucket that are missing in the mean: of vectors those missing in the first
        mean, of matrices the columns missing in the second one.

        Args:
            vectors: offset of the uncompressed values in the first mean.
        """
        spans = list[tuple[int, int]]()
        for span in self._uncompressed_spans:
            size = span.stop - span.start
            for start, stop in first_result.left_out:
                begin, end = max(start, vectors), min(stop, vectors + size)
                if begin < end:
                    spans.append((span.start + begin - vectors, span.start + end - vectors))
            vectors += size
        offset = 0
        for matrix in self._matrices:
            for start, stop in second_result.left_out:
                begin = max(0, start - offset) // matrix.rank
                end = min(matrix.columns, -(-(stop - offset) // matrix.rank))
                stride = matrix.columns if end - begin < matrix.columns else matrix.rows * matrix.columns
                for row in (
                    range(matrix.start, matrix.start + matrix.rows * matrix.columns, stride) if begin < end else ()
                ):
                    spans.append((row + begin, row + (end if stride == matrix.columns else stride)))
            offset += matrix.columns * matrix.rank
        return tuple(spans)

    def _seed(self, matrix: _Matrix, after: int = -1) -> int:
        """Return the seed of random directions for P, or for Q after a step."""
        return (after + 1) * 1_009 + matrix.number

    def _current_step(self) -> _Step:
        assert self._step is not None
        return self._step

    # -------------------------------------------------------------------------------------------------------- snapshots

    def _name(self, matrix: _Matrix) -> str:
        return f"powersgd/q/{self.context.index}/{matrix.number}"

    def tensors(self) -> dict[str, torch.Tensor]:
        error = {} if self._error is None else {f"powersgd/error/{self.context.index}": self._error}
        return error | self.newcomer_tensors()

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {self._name(matrix): matrix.q for matrix in self._matrices}

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        if (error := tensors.get(f"powersgd/error/{self.context.index}")) is not None:
            self._error = error.to(device)
        for matrix in self._matrices:
            if (q := tensors.get(self._name(matrix))) is not None and q.shape == matrix.q.shape:
                matrix.q = q.to(device)
