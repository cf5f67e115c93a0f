"""The next step's micro-batches, made in the background while the current step computes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from training.data import Cursor, SampleSchedule
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
    """Move the tensors in ``value`` to ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(move(item, device) for item in value)
    return value


class BatchSource:
    """Makes the batches of a step, and the following step's ahead of time.

    A batch depends only on seed, cursor and membership: if the membership changes, what was made ahead is dropped.
    """

    def __init__(self, task: Task, schedule: SampleSchedule, rank: int, seed: int) -> None:
        self._task = task
        self._schedule = schedule
        self._rank = rank
        self._seed = seed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[tuple[Cursor, dict[int, int]], Future[StepBatches]] | None = None

    def take(self, cursor: Cursor, batch_sizes: Mapping[int, int], more: bool) -> StepBatches:
        """Return the batches of the step at ``cursor`` and, if ``more`` follow, start making the next ones."""
        key = (cursor, dict(batch_sizes))
        if self._ahead is None or self._ahead[0] != key:
            self._begin(*key)  # by the same thread, after what was begun in vain: no task need bear two at once
        assert self._ahead is not None
        found = self._ahead[1].result()
        if more:
            self._begin(found.cursor, key[1])
        return found

    def _begin(self, cursor: Cursor, batch_sizes: dict[int, int]) -> None:
        self._ahead = ((cursor, batch_sizes), self._pool.submit(self._make, cursor, batch_sizes))

    def _make(self, cursor: Cursor, batch_sizes: dict[int, int]) -> StepBatches:
        indices, after = self._schedule.step(cursor, batch_sizes, self._rank)
        batches = [self._collate(part, cursor.epoch) for part in indices]
        weights = [self._task.weight(batch) for batch in batches]
        return StepBatches(batches, weights, indices, sum(map(len, indices)), after)

    def _collate(self, indices: list[int], epoch: int) -> Batch:
        # Seeded by sample, not by member: the same sample is augmented alike however the work is shared.
        rngs = [np.random.default_rng([self._seed, epoch, index]) for index in indices]
        return self._task.collate([self._task.train[index] for index in indices], rngs)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
