"""Partitions of one data set, one for each member: the option ``split``, for experiments with non-IID data.

Every member computes the same partitions from the labels of all samples and the seed, so nothing has to be sent. They
hold each sample once. With the usual names:

* ``label:K``: samples sorted by label and cut into K shards of equal size for each member, which are dealt at random
  (McMahan et al. 2017, arXiv 1602.05629, section 3, with K = 2); ``label`` is K = 1.
* ``dirichlet:ALPHA``: of each label, members have shares drawn from a symmetric Dirichlet distribution (Yurochkin et
  al. 2019, arXiv 1905.12022; Li et al. 2021, arXiv 2102.02079): the smaller ALPHA, the fewer have most of it.
* ``speaker``: all samples of one speaker are one member's, and members have about equally many.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from profiles.errors import BadInput, counted
from profiles.quantities import setting_text
from profiles.split import DataSplit, split_of
from training.data.sample_order import Cursor, SampleSchedule
from training.data.stream_schedule import StreamSchedule
from training.records.plan import RunPlan
from training.tasks.base import Task
from training.tasks.own_code.streams import Stream

Partition = NDArray[np.int64]
"""Numbers of samples, ascending."""
_DEAL, _ORDER = 7, 8
"""Tags that keep these random streams apart from others of the seed."""
_DRAWS = 1000
"""Attempts to draw shares such that every member has a sample."""


def schedule_of(plan: RunPlan, task: Task) -> SampleSchedule | SplitSchedule:
    """Return the schedule of the samples of a plan.

    Raises:
        BadInput: there are no samples, or none can be split in this way.
    """
    order, lengths, chosen = plan.profile.training, task.lengths(), split_of(plan.profile.data.split)
    if isinstance(task.train, Stream):
        if chosen.kind != "global":
            raise BadInput(f"split = {plan.profile.data.split} needs data with an index", "set split = global")
        return StreamSchedule(task.train, order.seed, order.gradient_accumulation)
    samples, accumulation = len(task.train), order.gradient_accumulation
    if chosen.kind == "global" or plan.world_size == 1:
        return SampleSchedule(samples, order.seed, accumulation, order.drop_last, lengths, plan.global_batch)
    partitions = deal_samples(chosen, task.labels(chosen.labels), plan.world_size, order.seed)
    streams = [
        SampleSchedule(
            len(partitions[member.rank]),
            stream_seed(order.seed, member.rank),
            accumulation,
            order.drop_last,
            None if lengths is None else lengths[partitions[member.rank]],
            accumulation * member.batch_size,
        )
        for member in plan.members
    ]
    return SplitSchedule(partitions, streams, lengths)


class SplitSchedule:
    """Members that train on their own partitions.

    Each partition has its own order and is passed through repeatedly, as fast as its holder takes samples; the last
    step of a pass takes the remaining samples. An epoch ends when every member has passed through its partition at
    least once; members with less data have started again by then. The partition of a lost member is not trained on
    until the member is back, and continues where it stopped. The planned members hold one partition each. A member that
    joins later shares that of one of them, as members share all samples without a split.

    Args:
        partitions: of the samples, by rank.
        streams: order of each partition.
        lengths: of all samples, where a step costs as much as its longest one.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        streams: Sequence[SampleSchedule],
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self.partitions = list(partitions)
        self._streams = dict(enumerate(streams))
        self._drop_last = any(stream.drop_last for stream in streams)
        self._lengths = lengths

    @property
    def fingerprint(self) -> str:
        """Hash of the partitions."""
        hashed = hashlib.blake2b(digest_size=8)
        for partition in self.partitions:
            hashed.update(np.asarray([len(partition), *partition], dtype="<i8").tobytes())
        return hashed.hexdigest()

    def start(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> Cursor:
        """Return where the step at ``cursor`` begins in every partition: see :meth:`SampleSchedule.start`."""
        if cursor.parts and not self._drop_last:
            return cursor
        cursors = [self._partition_cursor(cursor, partition) for partition in range(self._partition_count)]
        for partition, holders in self._holders(batch_sizes).items():
            cursors[partition] = self._streams[partition].start(cursors[partition], holders)
        return self._joint_cursor(cursors, batch_sizes)

    def step(self, cursor: Cursor, batch_sizes: Mapping[int, int], rank: int) -> tuple[list[list[int]], Cursor]:
        """Return the micro-batches of ``rank`` and the cursor of the next step: see :meth:`SampleSchedule.step`."""
        begin, own_partition, held = (
            self.start(cursor, batch_sizes),
            self._partition_of(rank),
            self._holders(batch_sizes),
        )
        stream, own_cursor = self._streams[own_partition], self._partition_cursor(begin, own_partition)
        if rank in batch_sizes:
            batches, _ = stream.step(own_cursor, held[own_partition], rank)
        else:
            batches = stream.draw_step(own_cursor, min(batch_sizes.values()), rank)
        cursors = [self._partition_cursor(begin, partition) for partition in range(self._partition_count)]
        for partition, holders in held.items():
            cursors[partition] = self._streams[partition].after(cursors[partition], holders)
        return [self._sample_indices(own_partition, batch) for batch in batches], self._joint_cursor(
            cursors, batch_sizes
        )

    def give_back(
        self, cursor: Cursor, since: Cursor, steps: int, batch_sizes: Mapping[int, int], lost: Collection[int]
    ) -> Cursor:
        """Return ``cursor`` with what lost members had in hand of their partitions: see
        :meth:`SampleSchedule.give_back`."""
        cursors = [self._partition_cursor(cursor, partition) for partition in range(self._partition_count)]
        for partition, holders in self._holders(batch_sizes).items():
            begin, stream = self._partition_cursor(since, partition), self._streams[partition]
            cursors[partition] = stream.give_back(cursors[partition], begin, steps, holders, lost)
        return self._joint_cursor(cursors, batch_sizes)

    def epoch_of(self, cursor: Cursor, rank: int) -> int:
        """Return the number of completed passes through the partition of ``rank``."""
        partition = self._partition_of(rank)
        return self._streams[partition].epoch_of(self._partition_cursor(cursor, partition), rank)

    def longest(self, cursor: Cursor, batch_sizes: Mapping[int, int], rank: int, own_indices: Sequence[int]) -> int:
        """Return the length of the longest sample of the step in the partition of ``rank``, and of ``own_indices``; 0
        where all samples have the same length."""
        if self._lengths is None:
            return 0
        partition, held = self._partition_of(rank), self._holders(batch_sizes)
        own_longest = int(self._lengths[list(own_indices)].max(initial=0))
        if partition not in held:
            return own_longest
        return max(
            own_longest,
            self._streams[partition].longest(self._partition_cursor(cursor, partition), held[partition], rank, []),
        )

    def total_steps(self, batch_sizes: Mapping[int, int], epochs: float) -> int:
        """Return the steps until the last member has passed through its partition ``epochs`` times."""
        held = self._holders(batch_sizes).items()
        return max(self._streams[partition].total_steps(holders, epochs) for partition, holders in held)

    def epoch_fraction(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> float:
        """Return the passes through that live partition which is furthest behind."""
        return min(
            self._passes(self._partition_cursor(cursor, number), number) for number in self._holders(batch_sizes)
        )

    @property
    def _partition_count(self) -> int:
        return len(self.partitions)

    def _partition_of(self, rank: int) -> int:
        return rank % len(self.partitions)

    def _sample_indices(self, partition: int, batch: list[int]) -> list[int]:
        """Return the task's indices of samples of a partition."""
        indices: list[int] = self.partitions[partition][batch].tolist()
        return indices

    def _holders(self, batch_sizes: Mapping[int, int]) -> dict[int, dict[int, int]]:
        """Return the batch sizes of the live members by rank, for each partition that they hold."""
        held: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, size in batch_sizes.items():
            held[self._partition_of(rank)][rank] = size
        return dict(held)

    def _partition_cursor(self, cursor: Cursor, partition: int) -> Cursor:
        return cursor.parts[partition] if partition < len(cursor.parts) else Cursor()

    def _passes(self, cursor: Cursor, partition: int) -> float:
        return self._streams[partition].epoch_fraction(cursor, {})

    def _joint_cursor(self, cursors: Sequence[Cursor], batch_sizes: Mapping[int, int]) -> Cursor:
        slowest = min(self._holders(batch_sizes), key=lambda number: (self._passes(cursors[number], number), number))
        return Cursor(cursors[slowest].epoch, cursors[slowest].offset, tuple(cursors))


Schedule = SampleSchedule | SplitSchedule
"""Assigns samples to members and steps."""


def deal_samples(split: DataSplit, labels: Sequence[str], members: int, seed: int) -> list[Partition]:
    """Return each member's samples: every sample is one member's, and every member has some.

    Args:
        labels: of each sample; empty where unknown.

    Raises:
        BadInput: there are too few samples, labels or speakers.
    """
    names, numbers = np.unique(np.asarray(labels, dtype=np.str_), return_inverse=True)
    if len(names) < 2:
        quantifier = "the same" if any(names) else "no"
        message = f"the training data cannot be split by {split.labels}: their samples have {quantifier} {split.labels}"
        raise BadInput(message, "set split = global")
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, _DEAL))))
    shuffled = rng.permutation(len(labels))
    by_label = [shuffled[numbers[shuffled] == label] for label in rng.permutation(len(names))]
    if split.kind == "label":
        partitions = _shards(by_label, members, split.shards, rng)
    elif split.kind == "dirichlet":
        partitions = _shares(by_label, members, split.alpha, rng)
    else:
        partitions = _whole_groups(by_label, members)
    return [np.sort(partition).astype(np.int64) for partition in partitions]


def _shards(
    by_label: Sequence[Partition], members: int, shards_per_member: int, rng: np.random.Generator
) -> list[Partition]:
    samples = sum(map(len, by_label))
    if samples < members * shards_per_member:
        message = f"{counted(samples, 'training sample')} do not suffice for {shards_per_member} x {members} shards"
        raise BadInput(message, "take fewer shards or fewer workers")
    shards = np.array_split(np.concatenate(by_label), members * shards_per_member)
    dealt = rng.permutation(members * shards_per_member).reshape(members, shards_per_member)
    return [np.concatenate([shards[shard] for shard in numbers]) for numbers in dealt]


def _shares(by_label: Sequence[Partition], members: int, alpha: float, rng: np.random.Generator) -> list[Partition]:
    for _ in range(_DRAWS):
        pieces: list[list[Partition]] = [[] for _ in range(members)]
        for samples in by_label:
            shares = rng.dirichlet(np.full(members, alpha))
            ends = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
            for member_pieces, piece in zip(pieces, np.split(samples, ends), strict=True):
                member_pieces.append(piece)
        partitions = [np.concatenate(member_pieces) for member_pieces in pieces]
        if min(map(len, partitions)):
            return partitions
    without = f"leaves one of {members} workers without a sample in each of {_DRAWS} draws"
    message = f"split = dirichlet:{setting_text(alpha)} {without}"
    raise BadInput(message, "take a larger ALPHA, fewer workers, or split = label")


def _whole_groups(groups: Sequence[Partition], members: int) -> list[Partition]:
    """Assign the groups, the largest first, each to the member with the fewest samples."""
    if len(groups) < members:
        message = f"the training data have {counted(len(groups), 'speaker')}, fewer than the {members} workers"
        raise BadInput(message, "take fewer workers, or another split")
    assigned: list[list[Partition]] = [[] for _ in range(members)]
    sizes = [0] * members
    for group in sorted(groups, key=len, reverse=True):
        smallest = sizes.index(min(sizes))
        assigned[smallest].append(group)
        sizes[smallest] += len(group)
    return [np.concatenate(groups_of_member) for groups_of_member in assigned]


def stream_seed(seed: int, partition: int) -> int:
    """Return the seed of the order of a partition."""
    return int(np.random.SeedSequence((seed, _ORDER, partition)).generate_state(1, np.uint64)[0])
