"""Samples and batches: every sample with random generators of its own, without those that cannot be read, and the next
step's micro-batches made in the background while the current step computes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from profiles.errors import MusterError, RunFailed, counted, where_it_failed
from training.data import Cursor
from training.device import is_out_of_memory, pin
from training.exchange.staging import is_asynchronous
from training.randomness import Turns, batch_key, evaluation_key, kept, sample_key, seed_with
from training.split import Schedule
from training.tasks.base import Batch, SizedDataset, Task

V = TypeVar("V")
_CPU = torch.device("cpu")
_NAMED = 10
"""Samples that cannot be read and are named one by one."""


class Samples:
    """The samples of a task's splits, made into batches.

    A training sample is a function of ``(seed, epoch, index)`` and one of an evaluation of ``(seed, index)``, also
    where its ``__getitem__`` draws from torch's, numpy's or Python's generator: these are seeded for it, and left as
    they were found. So it is the same whoever reads it, and nobody else's draws depend on it.

    Args:
        task: prepared.
        device: the device whose generator is seeded too.
        allowed: share of a split's samples that may be unreadable, from 0 to 1.
        who: name of this machine, for messages.
    """

    def __init__(
        self, task: Task, seed: int, device: torch.device = _CPU, allowed: float = 0.0, who: str = "this machine"
    ) -> None:
        self.task = task
        self._seed = seed
        self.device = device
        self._allowed = allowed
        self._who = who
        self._broken: dict[str, dict[int, str]] = {}
        self._untold: queue.SimpleQueue[str] = queue.SimpleQueue()

    def training_batch(self, indices: Sequence[int], epoch: int) -> tuple[list[int], Batch] | None:
        """Return the batch of those that can be read, and their indices; ``None`` if there are none.

        Raises:
            RunFailed: too many cannot be read.
        """
        with self._generators():
            keys = [sample_key(self._seed, epoch, index) for index in indices]
            read = self._readable("train", self.task.train, indices, keys)
            if not read:
                return None
            found = [index for index, _ in read]
            rngs = [np.random.default_rng([self._seed, epoch, index]) for index in found]
            self._seed_with(batch_key(self._seed, epoch, indices[0]))
            return found, self.task.collate([sample for _, sample in read], rngs)

    def evaluation_batch(self, split: str, indices: Sequence[int]) -> tuple[int, Batch] | None:
        """Return the batch of those that can be read, and how many these are; ``None`` if there are none.

        Raises:
            RunFailed: too many cannot be read.
        """
        with self._generators():
            keys = [evaluation_key(self._seed, index) for index in indices]
            read = self._readable(split, self.task.evaluation[split], indices, keys)
            return (len(read), self.task.collate([sample for _, sample in read], None)) if read else None

    def probe(self, split: str, index: int, look: Callable[[Any], V]) -> V | str:
        """Return what ``look`` sees in a sample as an evaluation reads it, or the kind of error that reading raises."""
        with self._generators():
            self._seed_with(evaluation_key(self._seed, index))
            try:
                return look((self.task.train if split == "train" else self.task.evaluation[split])[index])
            except Exception as error:  # noqa: BLE001 - the user's own code may raise anything; whoever trains on it tells
                return type(error).__name__

    def news(self) -> Iterator[str]:
        """Return and forget the warnings about samples that could not be read."""
        while not self._untold.empty():
            yield self._untold.get()

    def _generators(self) -> AbstractContextManager[None]:
        return kept(self.device) if self.task.draws_globally else nullcontext()

    def _seed_with(self, key: tuple[int, ...]) -> None:
        if self.task.draws_globally:
            seed_with(key, self.device)

    def _readable(
        self, split: str, data: SizedDataset, indices: Sequence[int], keys: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, Any]]:
        read = []
        for index, key in zip(indices, keys, strict=True):
            self._seed_with(key)
            try:
                read.append((index, data[index]))
            except Exception as error:  # the user's own code may raise anything
                if isinstance(error, MusterError) or is_out_of_memory(error):
                    raise
                self._leave_out(split, len(data), index, where_it_failed(error))
        return read

    def _leave_out(self, split: str, size: int, index: int, reason: str) -> None:
        broken = self._broken.setdefault(split, {})
        if index in broken:
            return
        broken[index] = reason
        if len(broken) > self._allowed * size:
            first = ", ".join(map(str, list(broken)[:_NAMED])) + (", ..." if len(broken) > _NAMED else "")
            raise RunFailed(
                f"{self._who}: {len(broken)} of {counted(size, 'sample')} of {split} cannot be read, more than "
                f"{self._allowed:.1%}: sample {first}; the first: {next(iter(broken.values()))}",
                "repair or remove them, or raise max_broken_share",
            )
        if len(broken) <= _NAMED:
            last = "; further ones are not listed" if len(broken) == _NAMED else ""
            self._untold.put(f"sample {index} of {split} cannot be read and is left out: {reason}{last}")


@dataclass(frozen=True)
class StepBatches:
    """What one member trains on in one optimizer step."""

    micro_batches: list[Batch]
    weights: list[float]
    indices: list[list[int]]
    samples: int
    cursor: Cursor
    """Position after this step, the same on every member."""

    @property
    def weight(self) -> float:
        return sum(self.weights)


class BatchSource:
    """Makes the batches of a step, and the following step's ahead of time.

    A batch depends only on seed, cursor and membership: if the membership changes, what was made ahead is dropped.
    They are made in a thread: where samples may draw from the shared generators, while the trainer lends it the turn
    (:class:`training.randomness.Turns`).

    Args:
        ahead: whether anything is made in the background.
    """

    def __init__(self, task: Task, schedule: Schedule, rank: int, samples: Samples, ahead: bool = True) -> None:
        self._ahead_of_time = ahead
        self.turns = Turns()
        self._task = task
        self._schedule = schedule
        self._rank = rank
        self._samples = samples
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._wanted: tuple[Cursor, dict[int, int], int, int] | None = None
        self._ahead: Future[StepBatches]

    def take(
        self, cursor: Cursor, batch_sizes: Mapping[int, int], more: bool, most: int = 0, rank: int | None = None
    ) -> StepBatches:
        """Return the batches of the step at ``cursor`` and, if ``more`` follow, start making the next ones.

        No micro-batch has more than ``most`` samples; 0: as many as the member's batch size says.

        Args:
            rank: whose part of the step; ``None``: this member's.
        """
        whose = self._rank if rank is None else rank
        wanted = cursor, dict(batch_sizes), most, whose
        if not self._ahead_of_time:
            with self.turns.lent():
                return self._make(*wanted)
        if self._wanted != wanted:
            self._begin(*wanted)  # in the same thread, after what was begun in vain: never two at once
        with self.turns.lent():
            found = self._ahead.result()
        if more:
            self._begin(found.cursor, wanted[1], most, whose)
        return found

    def begin(self, cursor: Cursor, batch_sizes: Mapping[int, int], most: int, rank: int) -> None:
        """Start making batches that :meth:`take` is asked for next."""
        if self._ahead_of_time:
            self._begin(cursor, dict(batch_sizes), most, rank)

    def _begin(self, cursor: Cursor, batch_sizes: dict[int, int], most: int, rank: int) -> None:
        self._wanted = cursor, batch_sizes, most, rank
        self._ahead = self._pool.submit(self._make, *self._wanted)

    def _make(self, cursor: Cursor, batch_sizes: dict[int, int], most: int, rank: int) -> StepBatches:
        cursor = self._schedule.start(cursor, batch_sizes)
        parts, after = self._schedule.step(cursor, batch_sizes, rank)
        pieces = [part[i : i + (most or len(part))] for part in parts for i in range(0, len(part), most or len(part))]
        epoch = self._schedule.epoch_of(cursor, rank)
        made = [self._batch(piece, epoch) for piece in pieces]
        readable = [one for one in made if one is not None]
        indices, batches = [found for found, _ in readable], [batch for _, batch in readable]
        own = [index for part in parts for index in part]
        longest = self._schedule.longest(cursor, batch_sizes, rank, own)
        batches = [self._task.lengthen(batch, longest) for batch in batches] if longest else batches
        weights = [self._task.weight(batch) for batch in batches]
        batches = list(map(pin, batches)) if is_asynchronous(self._samples.device) else batches
        return StepBatches(batches, weights, indices, sum(map(len, indices)), after)

    def _batch(self, indices: list[int], epoch: int) -> tuple[list[int], Batch] | None:
        with self.turns.taken() if self._task.draws_globally else nullcontext():
            return self._samples.training_batch(indices, epoch)

    def close(self) -> None:
        self.turns.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
