"""The order of the training samples: which member takes which sample in which step, the same on every machine.

The order is a function of ``(seed, epoch, offset)`` alone, so nothing of it has to be sent: every member computes the
whole step and takes its own slice, and a resumed run goes on from a :class:`Cursor`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from profiles.errors import BadInput
from training.lazy import np
from training.numerics.schedule import steps_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ORDER, _NEWCOMER, _GROUPS = range(3)
"""Tags that keep the random streams of one seed apart."""
_POOL = 50
"""Blocks that are sorted by length together, as in the length-grouped sampler of transformers: enough for blocks of
like samples, few enough that each epoch has other blocks."""


class SampleRange(NamedTuple):
    """Consecutive samples of the permutation of an epoch."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cursor:
    """Position in the training data: ``offset`` samples of ``epoch`` (from 0) have been taken, but for ``returned``."""

    epoch: int = 0
    offset: int = 0
    parts: tuple[Cursor, ...] = ()
    """The position in each partition, if members train on their own partitions; ``epoch`` and ``offset`` are then those
    of the partition that is furthest behind."""
    returned: tuple[SampleRange, ...] = ()
    """Samples before this position that lost members had in hand, ascending: they come before all others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(_cursor(part) for part in self.parts))
        object.__setattr__(self, "returned", tuple(SampleRange(*piece) for piece in self.returned))


def _cursor(document: Any) -> Cursor:
    """Return a part of a cursor, also from JSON, where earlier versions wrote its epoch and offset."""
    if isinstance(document, Cursor):
        return document
    return Cursor(**document) if isinstance(document, Mapping) else Cursor(*document)


class SampleSchedule:
    """Assigns the samples of each epoch's permutation to the members, step by step.

    One optimizer step of the group takes ``accumulation * sum(batch sizes)`` consecutive samples of the epoch's
    permutation. Every member takes its own contiguous slice, in rank order, and cuts it into micro-batches. So the
    group sees in each step exactly what one worker with the joint batch would see, and an epoch holds each sample
    once whatever the shares. The last step of an epoch takes what is left, in proportion to the batch sizes; a member
    may then have fewer micro-batches, or none; with ``drop_last`` there is no such step. What a lost member had in hand
    goes back (:meth:`give_back`): the next steps take it first, and no step takes samples of two epochs.

    Args:
        samples: size of the training data.
        accumulation: micro-batches in a full step.
        drop_last: leave out the samples that an epoch has left for a last, smaller step.
        lengths: of each sample, where a step costs as much as its longest one; then samples of like length come
            together (:func:`group_by_length`).
        block: samples that are kept together: those of a step as planned. It depends on the plan, not on the live
            members, so the order does not change with the membership.

    Raises:
        BadInput: there are no samples.
    """

    def __init__(
        self,
        samples: int,
        seed: int,
        accumulation: int,
        drop_last: bool = False,
        lengths: NDArray[np.int64] | None = None,
        block: int = 1,
    ) -> None:
        if samples < 1:
            raise BadInput("the training data holds no samples", "check dataset_path and max_train_samples")
        if accumulation < 1:
            raise ValueError(f"accumulation must be at least 1, not {accumulation}")
        self.samples = samples
        self.seed = seed
        self.accumulation = accumulation
        self.drop_last = drop_last
        self._lengths = lengths
        self._block = block
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    fingerprint = ""

    def start(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> Cursor:
        """Return where the step at ``cursor`` begins: in the next epoch if what is left of this one is dropped.

        Raises:
            BadInput: a step takes more samples than there are, and such steps are dropped.
        """
        needed = self._group_batch(batch_sizes)
        while self.drop_last and _size(left := self._left(cursor)) < needed:
            if left[0].epoch < cursor.epoch:
                later = tuple(piece for piece in cursor.returned if piece.epoch > left[0].epoch)
                cursor = replace(cursor, returned=later)
                continue
            if needed > self.samples:
                message = (
                    f"a step takes {needed} samples, but there are {self.samples}, and drop_last leaves none of them"
                )
                raise BadInput(message, "set drop_last = false, or a smaller batch_size")
            cursor = Cursor(cursor.epoch + 1, 0)
        return cursor

    def step(self, cursor: Cursor, batch_sizes: Mapping[int, int], rank: int) -> tuple[list[list[int]], Cursor]:
        """Return the micro-batches of ``rank`` at ``cursor`` and the cursor of the next step (equal on all members).

        Args:
            batch_sizes: samples in one micro-batch of each live member, by rank.
            rank: the member that asks. One that is not in ``batch_sizes`` (a newcomer that the others do not count
                yet) draws a full step from its own random stream, so it takes no samples away; its micro-batches have
                the size of the smallest in the group.
        """
        cursor = self.start(cursor, batch_sizes)
        after = self.after(cursor, batch_sizes)
        if rank not in batch_sizes:
            return self.draw_step(cursor, max(1, min(batch_sizes.values())), rank), after
        own_indices = self._indices(self._shares(cursor, batch_sizes)[rank]).tolist()
        return _cut(own_indices, max(1, batch_sizes[rank])), after

    def after(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> Cursor:
        """Return the cursor of the step after the one that begins at ``cursor``."""
        taken, left = _divide(self._left(cursor), self._group_batch(batch_sizes))
        if (epoch := taken[0].epoch) < cursor.epoch:
            return replace(cursor, returned=(*left, *(piece for piece in cursor.returned if piece.epoch > epoch)))
        if not left:
            return Cursor(cursor.epoch + 1, 0)
        return Cursor(cursor.epoch, left[-1].start, returned=tuple(left[:-1]))

    def give_back(
        self, cursor: Cursor, since: Cursor, steps: int, batch_sizes: Mapping[int, int], lost: Collection[int]
    ) -> Cursor:
        """Return ``cursor`` with the samples that members had in hand when they were lost.

        Args:
            since: position after the last synchronisation that holds what they did.
            steps: that led from there to ``cursor``.
            batch_sizes: of the members of these steps, by rank.
            lost: ranks.
        """
        pieces = list(cursor.returned)
        for _ in range(steps):
            since = self.start(since, batch_sizes)
            shares = self._shares(since, batch_sizes)
            pieces += (piece for rank in lost if rank in shares for piece in shares[rank])
            since = self.after(since, batch_sizes)
        returned = _joined(pieces)
        ends = (cursor.epoch, cursor.offset) if cursor.offset else (cursor.epoch - 1, self.samples)
        if returned and (returned[-1].epoch, returned[-1].stop) == ends:  # nothing was taken since
            return Cursor(*returned[-1][:2], returned=returned[:-1])
        return replace(cursor, returned=returned)

    def _left(self, cursor: Cursor) -> list[SampleRange]:
        """Return what is left of the epoch of the step at ``cursor``, in the order in which steps take it; the last
        piece ends where the epoch does, unless that is one before the cursor's."""
        epoch = cursor.returned[0].epoch if cursor.returned else cursor.epoch
        returned = [piece for piece in cursor.returned if piece.epoch == epoch]
        return returned if epoch < cursor.epoch else [*returned, SampleRange(epoch, cursor.offset, self.samples)]

    def _shares(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> dict[int, list[SampleRange]]:
        """Return what each member takes in the step that begins at ``cursor``, by rank."""
        ranks, shares = sorted(batch_sizes), {}
        taken, _ = _divide(self._left(cursor), self._group_batch(batch_sizes))
        for rank, count in zip(ranks, apportion(_size(taken), [batch_sizes[r] for r in ranks]), strict=True):
            shares[rank], taken = _divide(taken, count)
        return shares

    def _indices(self, pieces: Sequence[SampleRange]) -> NDArray[np.int64]:
        slices = [self._permutation(piece.epoch)[piece.start : piece.stop] for piece in pieces]
        return np.concatenate(slices) if slices else np.empty(0, dtype=np.int64)

    def samples_per_step(self, batch_sizes: Mapping[int, int]) -> int:
        """Return the number of samples of a full step, at most all there are."""
        return min(self._group_batch(batch_sizes), self.samples)

    def steps_per_pass(self, batch_sizes: Mapping[int, int]) -> int:
        """Return the number of steps of one pass over the data."""
        full_steps, left = divmod(self.samples, self.samples_per_step(batch_sizes))
        return full_steps if self.drop_last else full_steps + bool(left)

    def draw_step(self, cursor: Cursor, size: int, rank: int) -> list[list[int]]:
        """Return a full step of micro-batches of ``size`` samples that a newcomer draws for itself."""
        rng = _generator(self.seed, _NEWCOMER, cursor.epoch, cursor.offset, rank)
        return _cut(rng.integers(self.samples, size=self.accumulation * size).tolist(), size)

    def epoch_of(self, cursor: Cursor, rank: int) -> int:
        """Return the epoch of the samples of ``rank``: the same for all members."""
        return self._left(cursor)[0].epoch

    def longest(self, cursor: Cursor, batch_sizes: Mapping[int, int], rank: int, own_indices: Sequence[int]) -> int:
        """Return the length of the longest sample of the whole group's step at ``cursor``, and of
        ``own_indices``, which a newcomer has drawn by itself; 0 where all samples have the same length."""
        if self._lengths is None:
            return 0
        step = self._indices(_divide(self._left(self.start(cursor, batch_sizes)), self._group_batch(batch_sizes))[0])
        return int(max(self._lengths[step].max(), self._lengths[list(own_indices)].max(initial=0)))

    def total_steps(self, batch_sizes: Mapping[int, int], epochs: float) -> int:
        """Return the steps of ``epochs`` passes: see :func:`~training.numerics.schedule.steps_in`."""
        return steps_in(self.samples / self._group_batch(batch_sizes), epochs, self.drop_last)

    def epoch_fraction(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> float:
        """Return the number of passes over the data before ``cursor``."""
        return cursor.epoch + (cursor.offset - _size(cursor.returned)) / self.samples

    def _group_batch(self, batch_sizes: Mapping[int, int]) -> int:
        if min(batch_sizes.values(), default=0) < 0 or not any(batch_sizes.values()):
            raise ValueError(f"batch sizes must be at least 1 for at least one member, not {dict(batch_sizes)}")
        return self.accumulation * sum(batch_sizes.values())

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._order = _generator(self.seed, _ORDER, epoch).permutation(self.samples)
            if self._lengths is not None:
                rng = _generator(self.seed, _GROUPS, epoch)
                self._order = group_by_length(self._order, self._lengths, self._block, rng)
            self._epoch = epoch
        return self._order


def _size(pieces: Sequence[SampleRange]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _divide(pieces: Sequence[SampleRange], count: int) -> tuple[list[SampleRange], list[SampleRange]]:
    """Return the first ``count`` samples of ``pieces``, and the others."""
    first, rest = list[SampleRange](), list[SampleRange]()
    for piece in pieces:
        middle = piece.start + min(count, piece.stop - piece.start)
        count -= middle - piece.start
        first += [piece._replace(stop=middle)] if middle > piece.start else []
        rest += [piece._replace(start=middle)] if middle < piece.stop else []
    return first, rest


def _joined(pieces: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    """Return pieces in ascending order, neighbours as one."""
    joined = list[SampleRange]()
    for piece in sorted(pieces):
        if joined and (joined[-1].epoch, joined[-1].stop) == (piece.epoch, piece.start):
            joined[-1] = joined[-1]._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def _cut(indices: list[int], size: int) -> list[list[int]]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def group_by_length(
    order: NDArray[np.int64], lengths: NDArray[np.int64], block: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return ``order`` with samples of like length beside each other.

    Of every :data:`_POOL` blocks the samples are sorted by length, those of one length as they were, and cut into
    blocks. These come in random order, the longest first, so that memory runs out at once or not at all. The
    remainder, less than a block, stays at the end.
    """
    grouped_size = len(order) // block * block
    if not grouped_size:
        return order
    pools = [order[start : min(start + _POOL * block, grouped_size)] for start in range(0, grouped_size, _POOL * block)]
    ranked = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    blocks = rng.permutation(ranked.reshape(-1, block))
    longest = int(lengths[blocks].max(axis=1).argmax())
    blocks[[0, longest]] = blocks[[longest, 0]]
    return np.concatenate([blocks.ravel(), order[grouped_size:]])


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split ``total`` into whole parts in proportion to ``weights`` (largest remainder; ties to the first)."""
    total_weight = sum(weights)
    counts = [total * weight // total_weight for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % total_weight), i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def shares_to_batch_sizes(shares: Sequence[float], batch_size: int) -> list[int]:
    """Return whole batch sizes in proportion to ``shares``, each at least 1, with the sum ``n * batch_size``.

    Raises:
        BadInput: a share is not a positive number, or there are none.
    """
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise BadInput(f"shares must be positive numbers, not {list(shares)}", "for example shares = 2,1")
    if batch_size < 1:
        raise BadInput(f"batch_size must be at least 1, not {batch_size}")
    total, scale = len(shares) * batch_size, math.fsum(shares)
    ideal = [total * (share / scale) for share in shares]
    sizes = [max(1, math.floor(value)) for value in ideal]
    while sum(sizes) < total:
        sizes[max(range(len(sizes)), key=lambda i: ideal[i] - sizes[i])] += 1
    while sum(sizes) > total:
        large = [i for i in range(len(sizes)) if sizes[i] > 1]
        sizes[max(large, key=lambda i: sizes[i] - ideal[i])] -= 1
    return sizes


def evaluation_slice(n: int, batch_sizes: Mapping[int, int], rank: int) -> range:
    """Return the indices of an evaluation set of ``n`` samples that ``rank`` evaluates.

    Contiguous slices in the order of ranks, in proportion to the members' batch sizes: a slow member has less to do.
    """
    before = sum(size for member, size in batch_sizes.items() if member < rank)
    total = sum(batch_sizes.values())
    return range(n * before // total, n * (before + batch_sizes[rank]) // total)
