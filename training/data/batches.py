"""Samples and batches: each sample has its own random generators, unreadable ones are left out, and the micro-batches
of the next steps are made in the background while the current step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from profiles.errors import MusterError, RunFailed, counted, where_it_failed
from profiles.quantities import share_text
from training.data.partitions import Schedule
from training.data.sample_order import Cursor
from training.exchange.staging import is_asynchronous
from training.hardware.device import is_out_of_memory, pin
from training.numerics.randomness import Turns, batch_key, evaluation_key, preserved_generators, sample_key, seed_with
from training.tasks.base import Batch, SizedDataset, Task

V = TypeVar("V")
ReadBatch = tuple[list[int], Batch]
"""Indices of the samples that could be read, and their batch."""
_CPU = torch.device("cpu")
_MOST_LISTED = 10
"""Unreadable samples that are named one by one."""


class Samples:
    """The samples of a task's splits, made into batches.

    A training sample is a function of ``(seed, epoch, index)`` and one of an evaluation of ``(seed, index)``, also
    where its ``__getitem__`` draws from torch's, numpy's or Python's generator: these are seeded for it, and left as
    they were. So it is the same whichever process reads it, and no other draw depends on it.

    Args:
        task: prepared.
        device: the device whose generator is seeded too.
        allowed: share of a split's samples that may be unreadable, 0 to 1.
        who: name of this machine, for messages.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        device: torch.device = _CPU,
        max_broken_share: float = 0.0,
        machine_name: str = "this machine",
    ) -> None:
        self.task = task
        self._seed = seed
        self.device = device
        self._max_broken_share = max_broken_share
        self._machine_name = machine_name
        self._broken: dict[str, dict[int, str]] = {}
        self._lock = threading.Lock()
        self._pending_warnings: queue.SimpleQueue[str] = queue.SimpleQueue()

    def training_batch(self, indices: Sequence[int], epoch: int) -> ReadBatch | None:
        """Return the indices of the readable samples and their batch; ``None`` if none is readable.

        Raises:
            RunFailed: too many cannot be read.
        """
        with self._generators():
            keys = [sample_key(self._seed, epoch, index) for index in indices]
            read = self._readable("train", self.task.train, indices, keys)
            if not read:
                return None
            readable_indices = [index for index, _ in read]
            rngs = [np.random.default_rng([self._seed, epoch, index]) for index in readable_indices]
            self._seed_with(batch_key(self._seed, epoch, indices[0]))
            return readable_indices, self.task.collate([sample for _, sample in read], rngs)

    def evaluation_batch(self, split: str, indices: Sequence[int]) -> tuple[int, Batch] | None:
        """Return the number of readable samples and their batch; ``None`` if none is readable.

        Raises:
            RunFailed: too many cannot be read.
        """
        with self._generators():
            keys = [evaluation_key(self._seed, index) for index in indices]
            read = self._readable(split, self.task.evaluation[split], indices, keys)
            return (len(read), self.task.collate([sample for _, sample in read], None)) if read else None

    def probe(self, split: str, index: int, look: Callable[[Any], V]) -> V | str:
        """Return ``look(sample)`` of a sample as an evaluation reads it, or the name of the error that it raises."""
        with self._generators():
            self._seed_with(evaluation_key(self._seed, index))
            try:
                return look((self.task.train if split == "train" else self.task.evaluation[split])[index])
            except Exception as error:  # noqa: BLE001 - the user's own code may raise anything; training on it reports it
                return type(error).__name__

    def take_warnings(self) -> Iterator[str]:
        """Yield the warnings about unreadable samples since the last call."""
        while not self._pending_warnings.empty():
            yield self._pending_warnings.get()

    def broken(self, split: str) -> Mapping[int, str]:
        """Return the unreadable samples of a split, with the reason."""
        return self._broken.get(split, {})

    def leave_out(self, split: str, broken: Mapping[int, str]) -> None:
        """Record samples that another process could not read.

        Raises:
            RunFailed: there are too many.
        """
        for index, reason in broken.items():
            self._leave_out(split, index, reason)

    def _generators(self) -> AbstractContextManager[None]:
        return preserved_generators(self.device) if self.task.uses_global_rng else nullcontext()

    def _seed_with(self, key: tuple[int, ...]) -> None:
        if self.task.uses_global_rng:
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
                self._leave_out(split, index, where_it_failed(error))
        return read

    def _leave_out(self, split: str, index: int, reason: str) -> None:
        with self._lock:
            broken = self._broken.setdefault(split, {})
            is_new = index not in broken
            broken.setdefault(index, reason)
            self._report_broken(split, index, broken, is_new)

    def _report_broken(self, split: str, index: int, broken: Mapping[int, str], is_new: bool) -> None:
        """Report a sample once, but too many of them every time: the batch that met them may have been dropped."""
        size = len(self.task.train if split == "train" else self.task.evaluation[split])
        if len(broken) > self._max_broken_share * size:
            listed = ", ".join(map(str, list(broken)[:_MOST_LISTED])) + (", ..." if len(broken) > _MOST_LISTED else "")
            raise RunFailed(
                f"{self._machine_name}: {len(broken)} of {counted(size, 'sample')} of {split} cannot be read, "
                f"more than {share_text(self._max_broken_share)}: sample {listed}; "
                f"the first: {next(iter(broken.values()))}",
                "repair or remove them, or raise max_broken_share",
            )
        if is_new and len(broken) <= _MOST_LISTED:
            suffix = "; further ones are not listed" if len(broken) == _MOST_LISTED else ""
            self._pending_warnings.put(
                f"sample {index} of {split} cannot be read and is left out: {broken[index]}{suffix}"
            )


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


class Readers(Protocol):
    """Processes that read training samples; :class:`training.data.reading.ReadingProcesses` are some."""

    def read(self, pieces: Sequence[Sequence[int]], epoch: int) -> tuple[list[ReadBatch | None], dict[int, str]]: ...

    def close(self) -> None: ...


class _StepRequest(NamedTuple):
    """A step and the member whose batches of it are wanted."""

    cursor: Cursor
    batch_sizes: dict[int, int]
    max_micro_batch: int
    rank: int


class _StepPlan(NamedTuple):
    """The samples to read for a step."""

    pieces: list[list[int]]
    epoch: int
    longest: int
    after: Cursor


class BatchSource:
    """Makes the batches of a step, and those of the following steps ahead of time.

    A batch depends only on seed, cursor and membership: if the membership changes, batches made ahead are dropped.
    They are made in threads, one step in each. If samples may draw from the shared generators, they are made by
    processes, or in a single thread while the trainer lends it the turn (:class:`training.numerics.randomness.Turns`).

    Args:
        ahead: whether anything is made in the background.
        workers: steps whose batches are made at once.
        processes: that read the samples.
        newcomer_draws: whether this member draws samples while the others do not count it yet (see
            :meth:`training.data.sample_order.SampleSchedule.step`); else it has none until then.
    """

    def __init__(
        self,
        task: Task,
        schedule: Schedule,
        rank: int,
        samples: Samples,
        ahead: bool = True,
        workers: int = 1,
        processes: Readers | None = None,
        newcomer_draws: bool = True,
    ) -> None:
        self._ahead_of_time = ahead
        self._newcomer_draws = newcomer_draws
        self.turns = Turns()
        self._task = task
        self._schedule = schedule
        self._rank = rank
        self._samples = samples
        self._processes = processes
        self._depth = max(2, workers)
        self._in_turns = task.uses_global_rng and processes is None
        self._pool = ThreadPoolExecutor(1 if self._in_turns else workers, thread_name_prefix="batches")
        self._queue: deque[tuple[_StepRequest, Cursor, Future[StepBatches]]] = deque()
        self._waited = 0.0

    def take(
        self,
        cursor: Cursor,
        batch_sizes: Mapping[int, int],
        remaining_steps: int,
        max_micro_batch: int = 0,
        rank: int | None = None,
    ) -> StepBatches:
        """Return the batches of the step at ``cursor`` and start making those of the steps that follow.

        Args:
            remaining_steps: steps after this one.
            max_micro_batch: size of the micro-batches into which the step is cut; 0: the member's batch size.
            rank: the member whose share of the step is wanted; ``None``: this member.
        """
        request = _StepRequest(cursor, dict(batch_sizes), max_micro_batch, self._rank if rank is None else rank)
        if not self._ahead_of_time:
            with self.turns.lent():
                return self._make(self._plan(request))
        if not self._queue or self._queue[0][0] != request:
            self._begin(request)
        while len(self._queue) <= min(remaining_steps, self._depth):
            self._add(request._replace(cursor=self._queue[-1][1]))
        with self.turns.lent():
            start = time.monotonic()
            batches = self._queue.popleft()[2].result()
            self._waited += time.monotonic() - start
        return batches

    def waited(self) -> float:
        """Return the seconds for which the trainer has waited for batches and its turn since the last call."""
        waited, self._waited, self.turns.waited = self._waited + self.turns.waited, 0.0, 0.0
        return waited

    def begin(self, cursor: Cursor, batch_sizes: Mapping[int, int], max_micro_batch: int, rank: int) -> None:
        """Start making the batches that :meth:`take` will be asked for next."""
        if self._ahead_of_time:
            self._begin(_StepRequest(cursor, dict(batch_sizes), max_micro_batch, rank))

    def _begin(self, request: _StepRequest) -> None:
        for *_, begun_in_vain in self._queue:
            begun_in_vain.cancel()
        self._queue.clear()
        self._add(request)

    def _add(self, request: _StepRequest) -> None:
        plan = self._plan(request)
        self._queue.append((request, plan.after, self._pool.submit(self._make, plan)))

    def _plan(self, request: _StepRequest) -> _StepPlan:
        cursor, batch_sizes, max_size, rank = request
        cursor = self._schedule.start(cursor, batch_sizes)
        micro_batches, after = self._schedule.step(cursor, batch_sizes, rank)
        if not self._newcomer_draws and rank not in batch_sizes:
            micro_batches = []
        own_indices = [index for batch in micro_batches for index in batch]
        pieces = micro_batches
        if max_size:
            pieces = [own_indices[i : i + max_size] for i in range(0, len(own_indices), max_size)]
        longest = self._schedule.longest(cursor, batch_sizes, rank, own_indices)
        return _StepPlan(pieces, self._schedule.epoch_of(cursor, rank), longest, after)

    def _make(self, plan: _StepPlan) -> StepBatches:
        readable = [batch for batch in self._read(plan.pieces, plan.epoch) if batch is not None]
        if plan.longest:
            readable = [(indices, self._task.pad_to_length(batch, plan.longest)) for indices, batch in readable]
        # the loss of a micro-batch without weight is a mean over nothing: not a number
        weighed = [(*read, weight) for read in readable if (weight := self._task.weight(read[1]))]
        batches = [batch for _, batch, _ in weighed]
        return StepBatches(
            micro_batches=list(map(pin, batches)) if is_asynchronous(self._samples.device) else batches,
            weights=[weight for *_, weight in weighed],
            indices=[indices for indices, *_ in weighed],
            samples=sum(len(indices) for indices, _ in readable),
            cursor=plan.after,
        )

    def _read(self, pieces: list[list[int]], epoch: int) -> list[ReadBatch | None]:
        if self._processes is None:
            return [self._batch(piece, epoch) for piece in pieces]
        batches, broken = self._processes.read(pieces, epoch)
        self._samples.leave_out("train", broken)
        return batches

    def _batch(self, indices: list[int], epoch: int) -> ReadBatch | None:
        with self.turns.taken() if self._in_turns else nullcontext():
            return self._samples.training_batch(indices, epoch)

    def close(self) -> None:
        self.turns.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
