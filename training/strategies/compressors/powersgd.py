"""PowerSGD: gradients of matrices travel as two thin factors, one step of a power iteration each.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv 1905.13727). For every matrix M of rows by columns, with this member's error E (algorithm 2) and the Q of the
step before (algorithm 1)::

    M   <- G + E
    P   <- mean of M Q            rank times rows values
    P   <- orthonormal columns of P
    Q   <- mean of M' P           rank times columns values
    E   <- M - P Q'               the mean gradient is P Q'

The means are weighted as without a compressor, so the members' weighted mean of E + P Q' is that of M. Convolutions are
matrices with a row for every output. Vectors go with P as they are, and so does a matrix whose factors are no smaller;
with a rank as high as that the mean is exact. For the first ``powersgd_start`` steps all goes as it is.

P Q' are the same bits on every member: the means are, and :func:`orthonormal` and :func:`product` add up in an order of
their own with operations that IEEE 754 rounds correctly. A direction that M Q does not have, as where a gradient is
zero, becomes a random one; else it would never come back.

The errors belong to their member and leave with it; Q belongs to the group. A newcomer begins with an error of zero, as
all did. A mean that is not there in time stays in the error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from profiles.declarations import Owning, Section, option
from training.exchange.base import MeanResult, Pending
from training.lazy import torch
from training.strategies.compressors.base import BucketContext, Compressor, Price, StepContext, register, unused

_DEPENDENT = 1e-10
"""Square of the part of a column that is left where it depends on those before it."""


class PowerSGDOptions(Section):
    """Options of :class:`PowerSGD`."""

    powersgd_rank: int = option(
        4, "rank of the two factors that a matrix's gradient is sent as", ge=1, le=4096, advanced=True
    )
    powersgd_start: int = option(
        100, "steps that send whole gradients before powersgd compresses any", ge=0, advanced=True
    )


def total(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of the columns of [rows, columns] with the same bits on every processor: halves are added."""
    while (rows := values.shape[0]) > 1:
        half = rows // 2
        folded = values[:half] + values[half : 2 * half]
        values = torch.cat([folded, values[2 * half :]]) if rows % 2 else folded
    return values[0]


def _random(rows: int, before: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a random unit column that is orthogonal to the columns before."""
    column = torch.rand(rows, generator=torch.Generator().manual_seed(seed)).sub_(0.5).to(before.device)
    for _ in range(2):
        for other in before.unbind(1):
            column = column - other * total((other * column)[:, None])
    return column / total((column * column)[:, None]).sqrt()


def orthonormal(matrix: torch.Tensor, seed: int) -> torch.Tensor:
    """Return an orthonormal basis of a matrix's columns by modified Gram-Schmidt, twice; the same bits everywhere.

    Args:
        matrix: fp32 [rows, columns], no more columns than rows.
        seed: of the directions that take the place of columns that depend on those before them.
    """
    rows, columns = matrix.shape
    for again in range(2):
        peak = matrix.abs().amax(0)
        matrix = matrix / torch.where(peak > 0, peak, torch.ones_like(peak))
        whole = total(matrix * matrix)
        for index in range(columns):
            column = matrix[:, index]
            square = total((column * column)[:, None])[0]
            if bool(square > _DEPENDENT * whole[index]):
                column = column / square.sqrt()
            else:
                column = _random(rows, matrix[:, :index], (2 * seed + again) * 4096 + index)
            matrix[:, index] = column
            if index + 1 < columns:
                rest = matrix[:, index + 1 :]
                matrix[:, index + 1 :] = rest - column[:, None] * total(column[:, None] * rest)
    return matrix


def product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return ``p q'`` with the same bits on every processor."""
    found = p[:, :1] * q[:, 0]
    for index in range(1, p.shape[1]):
        found += p[:, index : index + 1] * q[:, index]
    return found


@dataclass
class _Matrix:
    """A tensor of a bucket that travels as two factors."""

    number: int
    """In its bucket."""
    start: int
    rows: int
    columns: int
    rank: int
    q: torch.Tensor
    """Orthonormal, [columns, rank]; of the group."""
    p: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """Orthonormal, [rows, rank]; of a step."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the matrix in a bucket's flat values."""
        return values[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass
class _Step:
    """What a step holds from its start to its end."""

    turn: StepContext
    given: torch.Tensor
    """Gradients and errors."""
    compressed: bool
    first: Pending[MeanResult]
    first_result: MeanResult | None = None
    second: Pending[MeanResult] | None = None
    q: torch.Tensor | None = None
    """The mean, flat."""
    result: MeanResult | None = None


@register
class PowerSGD(Compressor):
    """Low-rank factors of matrices, with error feedback and warm start."""

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[str] = "low-rank factors of matrices"
    options = PowerSGDOptions

    @classmethod
    def price(cls, settings: Owning) -> Price:
        """Return the costs after the first steps, for a transformer as it usually is: as wide as 64 times its layers.

        Its ``12 d^2`` values a layer are four square matrices and two that are four times as wide: ``18 r d`` values
        of factors, and ``13 d`` of vectors. Work: three products and the sum over the ranks, which was not measured.
        """
        rank = settings.of(PowerSGDOptions).powersgd_rank

        def elements(trainable: int) -> int:
            width: float = (trainable * 64 / 12) ** (1 / 3)
            return math.ceil(trainable * min(1.0, (1.5 * rank + 1.1) / width))

        said = "PowerSGD: as without compression at rank 4, from scratch, ResNet18 and LSTM (arXiv 1905.13727)"
        return Price(("fp32", "bf16"), elements, 3, 4.0 + 1.5 * rank, 0.5, said)

    def __init__(self, place: BucketContext) -> None:
        super().__init__(place)
        own = place.settings.of(PowerSGDOptions)
        self._start = own.powersgd_start
        self._error: torch.Tensor | None = None
        self._step: _Step | None = None
        self._matrices: list[_Matrix] = []
        self._whole: list[slice] = []
        """Where the values are that travel as they are."""
        start = 0
        for number, shape in enumerate(place.shapes):
            size, rows = math.prod(shape), shape[0] if shape else 1
            columns = size // max(1, rows)
            rank = min(own.powersgd_rank, rows, columns)
            if rank * (rows + columns) < size:
                random = torch.Generator().manual_seed((place.seed * 65_537 + place.index) * 65_537 + number)
                q = orthonormal(torch.randn(columns, rank, generator=random), number)
                self._matrices.append(_Matrix(number, start, rows, columns, rank, q))
            else:
                self._whole.append(slice(start, start + size))
            start += size

    # ---------------------------------------------------------------------------------------------------------- a step

    def start(self, values: torch.Tensor, turn: StepContext) -> None:
        place, given = self.place, values if self._error is None else values.add_(self._error)
        compressed = turn.step >= self._start and bool(self._matrices)
        sent = given
        if compressed:
            for one in self._matrices:
                one.q = one.q.to(given.device)
            factors = [(one.of(given) @ one.q).reshape(-1) for one in self._matrices]
            sent = torch.cat([*factors, *(given[where] for where in self._whole)])
        name = f"grad/{turn.step}/{place.index}"
        first = place.exchange.start_mean(name, sent, turn.weight, place.codec, turn.flags)
        self._step = _Step(turn, given, compressed, first)

    def go_on(self) -> None:
        step = self._now()
        step.first_result = step.first.wait()
        if not step.compressed:
            return
        mean, offset = step.first_result.mean, 0
        for one in self._matrices:
            part = mean[offset : offset + one.rows * one.rank].view(one.rows, one.rank)
            one.p = orthonormal(part, self._seed(one))
            offset += one.rows * one.rank
        factors = [(one.of(step.given).T @ one.p).reshape(-1) for one in self._matrices]
        sent = torch.cat(factors)
        fit = step.first_result.fit
        name = f"grad/{step.turn.step}/{self.place.index}/q"
        weight = step.turn.weight if fit else 0.0
        sent = sent if fit else torch.zeros_like(sent)
        step.second = self.place.exchange.start_mean(name, sent, weight, self.place.codec)

    def wait(self) -> MeanResult:
        step = self._now()
        first = step.first_result
        assert first is not None
        step.result = first
        if step.second is not None:
            second = step.second.wait()
            step.q = second.mean if second.weight else None
            mean = torch.zeros_like(step.given)
            offset = first.mean.numel() - sum(where.stop - where.start for where in self._whole)
            left_out = self._left_out(first, second, offset)
            for where in self._whole:
                size = where.stop - where.start
                mean[where] = first.mean[offset : offset + size]
                offset += size
            for one, q in self._factors(step.q):
                one.of(mean).copy_(product(one.p, q))
            step.result = MeanResult(
                mean,
                first.weight,
                second.members,
                left_out,
                tuple(sorted({*first.refused, *second.refused})),
                first.flags,
                first.fit and second.fit,
            )
        return step.result

    def settle(self) -> None:
        step = self._now()
        result, self._step = step.result, None
        assert result is not None
        if step.compressed:
            for one, q in self._factors(step.q):
                one.q, one.p = orthonormal(q, self._seed(one, step.turn.step)), torch.empty(0)
        if not result.fit:
            return  # what was kept before stays
        self._error = step.given if step.turn.weight == 0.0 else self._lost(step, result)

    def _lost(self, step: _Step, result: MeanResult) -> torch.Tensor:
        """Return what this member gave and the mean does not have of it."""
        lost = torch.zeros_like(step.given)
        if step.compressed:
            for one in self._matrices:
                one.of(lost).copy_(one.of(step.given) - one.of(result.mean))
        for start, stop in result.left_out:
            lost[start:stop] = step.given[start:stop]
        for where in unused(self.place.shapes, result.flags):
            lost[where] = step.given[where]
        return lost

    def _factors(self, q: torch.Tensor | None) -> Sequence[tuple[_Matrix, torch.Tensor]]:
        """Return the matrices with their parts of the mean Q; none where nobody had one."""
        found, offset = [], 0
        for one in self._matrices if q is not None else ():
            size = one.columns * one.rank
            assert q is not None
            found.append((one, q[offset : offset + size].view(one.columns, one.rank)))
            offset += size
        return found

    def _left_out(self, first: MeanResult, second: MeanResult, vectors: int) -> tuple[tuple[int, int], ...]:
        """Return the parts of this member's bucket that are not in the mean: of vectors what the first mean left out,
        of a matrix the columns of which the second one did.

        Args:
            vectors: where they begin in the first mean.
        """
        found = list[tuple[int, int]]()
        for where in self._whole:
            size = where.stop - where.start
            for start, stop in first.left_out:
                begin, end = max(start, vectors), min(stop, vectors + size)
                if begin < end:
                    found.append((where.start + begin - vectors, where.start + end - vectors))
            vectors += size
        offset = 0
        for one in self._matrices:
            for start, stop in second.left_out:
                begin = max(0, start - offset) // one.rank
                end = min(one.columns, -(-(stop - offset) // one.rank))
                stride = one.columns if end - begin < one.columns else one.rows * one.columns
                for row in range(one.start, one.start + one.rows * one.columns, stride) if begin < end else ():
                    found.append((row + begin, row + (end if stride == one.columns else stride)))
            offset += one.columns * one.rank
        return tuple(found)

    def _seed(self, one: _Matrix, after: int = -1) -> int:
        """Return the seed of directions that are missing in P, or in Q after a step."""
        return (after + 1) * 1_009 + one.number

    def _now(self) -> _Step:
        assert self._step is not None
        return self._step

    # -------------------------------------------------------------------------------------------------------- snapshots

    def _name(self, one: _Matrix) -> str:
        return f"powersgd/q/{self.place.index}/{one.number}"

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {} if self._error is None else {f"powersgd/error/{self.place.index}": self._error}
        return own | self.newcomer_tensors()

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {self._name(one): one.q for one in self._matrices}

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        if (error := tensors.get(f"powersgd/error/{self.place.index}")) is not None:
            self._error = error.to(device)
        for one in self._matrices:
            if (q := tensors.get(self._name(one))) is not None and q.shape == one.q.shape:
                one.q = q.to(device)
