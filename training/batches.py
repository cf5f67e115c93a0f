"""The next step's micro-batches, made in the background while the current step computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from training.data import Cursor, SampleSchedule
from training.randomness import Turns
from training.samples import Samples
from training.tasks.base import Batch, Task


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


def move(value: Any, device: torch.device) -> Any:
    """Move what can be moved in ``value`` to ``device``: tensors, whatever has ``.to()``, and these in containers."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [move(item, device) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: move(getattr(value, name), device) for name in names})
    return value


class BatchSource:
    """Makes the batches of a step, and the following step's ahead of time.

    A batch depends only on seed, cursor and membership: if the membership changes, what was made ahead is dropped.
    They are made in a thread: where samples may draw from the shared generators, while the trainer lends it the turn
    (:class:`training.randomness.Turns`).
    """

    def __init__(self, task: Task, schedule: SampleSchedule, rank: int, samples: Samples) -> None:
        self.turns = Turns()
        self._task = task
        self._schedule = schedule
        self._rank = rank
        self._samples = samples
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[_Wanted, Future[StepBatches]] | None = None

    def take(self, cursor: Cursor, batch_sizes: Mapping[int, int], more: bool, most: int = 0) -> StepBatches:
        """Return the batches of the step at ``cursor`` and, if ``more`` follow, start making the next ones.

        No micro-batch has more than ``most`` samples; 0: as many as the member's batch size says.
        """
        wanted = _Wanted(cursor, dict(batch_sizes), most)
        if self._ahead is None or self._ahead[0] != wanted:
            self._begin(wanted)  # by the same thread, after what was begun in vain: no task need bear two at once
        assert self._ahead is not None
        with self.turns.lent():
            found = self._ahead[1].result()
        if more:
            self._begin(_Wanted(found.cursor, wanted.batch_sizes, most))
        return found

    def _begin(self, wanted: _Wanted) -> None:
        self._ahead = (wanted, self._pool.submit(self._make, wanted))

    def _make(self, wanted: _Wanted) -> StepBatches:
        cursor = self._schedule.start(wanted.cursor, wanted.batch_sizes)
        parts, after = self._schedule.step(cursor, wanted.batch_sizes, self._rank)
        made = [self._batch(piece, cursor.epoch) for part in parts for piece in _cut(part, wanted.most)]
        readable = [one for one in made if one is not None]
        indices, batches = [found for found, _ in readable], [batch for _, batch in readable]
        longest = self._schedule.longest(cursor, wanted.batch_sizes, [index for part in parts for index in part])
        batches = [self._task.lengthen(batch, longest) for batch in batches] if longest else batches
        weights = [self._task.weight(batch) for batch in batches]
        return StepBatches(batches, weights, indices, sum(map(len, indices)), after)

    def _batch(self, indices: list[int], epoch: int) -> tuple[list[int], Batch] | None:
        with self.turns.taken() if self._task.draws_globally else nullcontext():
            return self._samples.training_batch(indices, epoch)

    def close(self) -> None:
        self.turns.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class _Wanted:
    """What decides a step's batches."""

    cursor: Cursor
    batch_sizes: dict[int, int]
    most: int


def _cut(indices: list[int], most: int) -> list[list[int]]:
    size = most or len(indices)
    return [indices[i : i + size] for i in range(0, len(indices), size)]
