"""Reading samples: every one with random generators of its own, and without those that cannot be read."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from profiles.counts import counted
from profiles.errors import MusterError, RunFailed
from training.memory import is_out_of_memory
from training.randomness import batch_key, evaluation_key, kept, sample_key, seed_with
from training.tasks.base import Batch, SizedDataset, Task
from training.tasks.custom_job import where_it_failed

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
        seed: seed of the run.
        device: the device whose generator is seeded too.
        allowed: share of a split's samples that may be unreadable, from 0 to 1.
        who: name of this machine, for messages.
    """

    def __init__(
        self, task: Task, seed: int, device: torch.device = _CPU, allowed: float = 0.0, who: str = "this machine"
    ) -> None:
        self._task = task
        self._seed = seed
        self._device = device
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
            read = self._readable("train", self._task.train, indices, keys)
            if not read:
                return None
            found = [index for index, _ in read]
            rngs = [np.random.default_rng([self._seed, epoch, index]) for index in found]
            self._seed_with(batch_key(self._seed, epoch, indices[0]))
            return found, self._task.collate([sample for _, sample in read], rngs)

    def evaluation_batch(self, split: str, indices: Sequence[int]) -> tuple[int, Batch] | None:
        """Return the batch of those that can be read, and how many these are; ``None`` if there are none.

        Raises:
            RunFailed: too many cannot be read.
        """
        with self._generators():
            keys = [evaluation_key(self._seed, index) for index in indices]
            read = self._readable(split, self._task.evaluation[split], indices, keys)
            return (len(read), self._task.collate([sample for _, sample in read], None)) if read else None

    def probe(self, split: str, index: int, look: Callable[[Any], V]) -> V | str:
        """Return what ``look`` sees in a sample as an evaluation reads it, or the kind of error that reading raises."""
        with self._generators():
            self._seed_with(evaluation_key(self._seed, index))
            try:
                return look((self._task.train if split == "train" else self._task.evaluation[split])[index])
            except Exception as error:  # noqa: BLE001 - the user's own code may raise anything; whoever trains on it tells
                return type(error).__name__

    def news(self) -> Iterator[str]:
        """Take what is to be told about samples that cannot be read."""
        while not self._untold.empty():
            yield self._untold.get()

    def _generators(self) -> AbstractContextManager[None]:
        return kept(self._device) if self._task.draws_globally else nullcontext()

    def _seed_with(self, key: tuple[int, ...]) -> None:
        if self._task.draws_globally:
            seed_with(key, self._device)

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
