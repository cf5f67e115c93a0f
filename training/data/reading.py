"""Readers of the training samples: threads of this process, or separate processes.

Tasks of Muster give each sample its own generator, and threads read samples in parallel: decoding and arithmetic
release Python's lock. A user's own code may draw from the shared generators, so in this process it takes turns with the
trainer; in separate processes it needs no turns. A sample is a function of seed, epoch and index wherever it is read.
"""

from __future__ import annotations

import io
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
import torch.multiprocessing

from profiles.errors import RunFailed, where_it_failed
from profiles.quantities import bytes_text
from training.data.batches import BatchSource, ReadBatch, Samples
from training.data.partitions import Schedule
from training.hardware.resources import whole_cores
from training.records.plan import RunPlan
from training.tasks.base import Task
from training.tasks.own_code.streams import Stream
from training.tasks.user_code import find_factory

_MOST_BYTES = 1 << 28
"""Largest pickled data set that each process gets a copy of."""
_MOST_WORKERS = 4
"""Default limit of the number of workers."""


class CannotRead(Exception):
    """Other processes cannot read these samples."""


class ReadingProcesses:
    """Processes that read training samples.

    They are spawned, not forked: a copy of the training process would keep its connections open, and its threads'
    locks.

    Args:
        task: without its model, see :meth:`training.tasks.base.Task.reader_copy`.
        code: ``module:name`` or ``file.py:name`` with the classes of the task's parts; empty: none.
        name: of this machine, for messages.

    Raises:
        CannotRead: the task, or a batch of its first sample, cannot be pickled.
    """

    def __init__(self, task: Task, seed: int, workers: int, code: str, name: str) -> None:
        self._name = name
        initial = code, _pickled((task, seed))
        spawned = torch.multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(workers, mp_context=spawned, initializer=_begin, initargs=initial)
        try:
            for probe in [self._pool.submit(_read, [[0]], 0) for _ in range(workers)]:  # each worker has started then
                probe.result()
        except Exception as error:  # the user's own code may raise anything, and what it makes may not be sent
            self.close()
            raise CannotRead(where_it_failed(error)) from error

    def read(self, pieces: Sequence[Sequence[int]], epoch: int) -> tuple[list[ReadBatch | None], dict[int, str]]:
        """Return the micro-batches of these samples, and which samples cannot be read, with the reason.

        Raises:
            RunFailed: a process has ended.
        """
        try:
            return self._pool.submit(_read, pieces, epoch).result()
        except BrokenProcessPool as error:
            problem = "a process that reads samples was killed, as where memory runs out (RAM, or /dev/shm)"
            hint = "set data_workers = 1: then the training process reads them itself"
            raise RunFailed(problem, hint, machine=self._name) from error

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def batch_source(
    plan: RunPlan,
    task: Task,
    schedule: Schedule,
    rank: int,
    samples: Samples,
    in_background: bool,
    warn: Callable[[str], None],
    newcomer_draws: bool = True,
) -> BatchSource:
    """Return the source of a member's batches, with the number of threads or processes in its plan.

    Args:
        warn: called with the reason if requested processes cannot be used.
        newcomer_draws: see :class:`~training.data.batches.BatchSource`.
    """
    if not in_background:
        return BatchSource(task, schedule, rank, samples, ahead=False, newcomer_draws=newcomer_draws)
    requested = plan.profile.data.data_workers
    usual = min(_MOST_WORKERS, max(1, whole_cores() - 1)) if task.device.type != "cpu" else 1
    workers, processes = requested or usual, None
    if workers > 1 and task.uses_global_rng:
        try:
            processes = _processes_of(plan, task, rank, workers)
        except CannotRead as error:
            workers = 1
            if requested:
                warn(f"data_workers = {requested}: other processes cannot read the samples: {error}; this one does")
    return BatchSource(task, schedule, rank, samples, True, workers, processes, newcomer_draws)


def _processes_of(plan: RunPlan, task: Task, rank: int, workers: int) -> ReadingProcesses:
    if isinstance(task.train, Stream):
        raise CannotRead("they come one after the other")
    reader, path = task.reader_copy(), plan.profile.model.model_path
    if reader is None:
        raise CannotRead(f"jobs of the kind '{task.name}' have no way to send them")
    seed, name = plan.profile.training.seed, plan.all_members[rank].name
    return ReadingProcesses(reader, seed, workers, path if ":" in path else "", name)


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_BYTES:
            raise CannotRead(f"the data set takes more than {bytes_text(_MOST_BYTES)} of memory in each process")
        return super().write(data)


def _pickled(value: object) -> bytes:
    stream = _Bounded()
    try:
        pickle.dump(value, stream, protocol=5)
    except CannotRead:
        raise
    except Exception as error:  # whatever the parts of a person's task raise
        raise CannotRead(where_it_failed(error)) from error
    return stream.getvalue()


_samples: Samples | Exception | None = None
"""In a reading process: its samples, or the error that prevents them."""


def _begin(code: str, pickled: bytes) -> None:
    global _samples
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole session: the process that trains still keeps its step
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        if code:
            find_factory(code)  # a file's classes are found under the name that it gets
        task, seed = pickle.loads(pickled)  # our own parent wrote it
        _samples = Samples(task, seed, max_broken_share=1.0)
    except Exception as error:  # noqa: BLE001 - told with the first batch; else the pool would only say that it is broken
        _samples = error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _read(pieces: Sequence[Sequence[int]], epoch: int) -> tuple[list[ReadBatch | None], dict[int, str]]:
    assert _samples is not None
    if isinstance(_samples, Exception):
        raise _samples
    batches = [_samples.training_batch(piece, epoch) for piece in pieces]
    # Its generator is seeded, and its memory held, by the process that trains.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("samples that use the GPU are read in the process that trains")
    broken = _samples.broken("train")
    return batches, {index: broken[index] for piece in pieces for index in piece if index in broken}
