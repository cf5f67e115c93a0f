"""Writes a member's snapshots in the background of its training, which waits only for a copy of its state.

The copy is hashed, written and fsynced in a thread. The next snapshot, an order and the end of the training wait until
it is on the disk. Training goes on without a snapshot that cannot be written, as when the disk is full: that is told
once, and so is the first one that can be written again.

The copy takes as many bytes as a snapshot, from memory of the host. Where less than twice as much is free, snapshots
are written from the tensors themselves while the training waits: a machine does not run out of memory by this.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from profiles.errors import RunFailed
from training.hardware.resources import free_memory
from training.records.events import Emit, SnapshotEvent, WarningEvent
from training.snapshots.snapshot_copies import SnapshotCopies
from training.snapshots.snapshot_pace import SnapshotCost
from training.snapshots.snapshot_store import Snapshot, SnapshotStore
from training.snapshots.tensor_file import HostCopy, TensorFile


class SnapshotWriter:
    """Writes one snapshot at a time.

    Args:
        device: that holds what is saved.
        name: of this machine, for messages.
        emit: takes the event of each snapshot on the disk, in the writing thread, and warnings.
        run_dir: paths in events are relative to it.
        free: returns the bytes of free memory.
    """

    copies: SnapshotCopies | None = None
    """Give each snapshot a second holder; ``None``: nobody does."""

    def __init__(
        self,
        store: SnapshotStore,
        device: torch.device,
        name: str,
        emit: Emit,
        run_dir: Path,
        free: Callable[[], int] = free_memory,
    ) -> None:
        self._store, self._name, self._emit, self._run_dir = store, name, emit, run_dir
        self._device, self._free = device, free
        self._has_ended = self._is_short = self._is_failing = False
        self._waited, self._written, self._begun = SnapshotCost()
        self._copy = HostCopy(device)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._pending: Future[None] | None = None

    def begin(self, snapshot: Snapshot, plan_hash: str, in_background: bool = True) -> None:
        """Write a snapshot; return when its tensors may change: when it is written, unless ``in_background``."""
        self._end_pending()
        start, file = time.monotonic(), TensorFile(snapshot.tensors)
        self._store.current = snapshot.step
        if in_background and self._has_room_for(file.body_bytes):
            pieces, copied = self._copy.take(file), Snapshot(snapshot.step, {}, copy.deepcopy(snapshot.state))
            self._pending = self._pool.submit(self._write, copied, pieces, plan_hash, start)
        else:
            self._pending = Future()
            with _ending(self._pending):
                self._write(snapshot, file.pieces(), plan_hash, start)
        self._waited, self._begun = time.monotonic() - start, start
        if self.copies is not None:
            self.copies.begin(snapshot.step, file.body_bytes, self._pending)

    def check(self) -> None:
        """Warn of what failed in the meantime, without waiting."""
        if self._pending is not None and self._pending.done():
            self._end_pending()

    def wait(self, for_copies: bool = False, is_required: bool = False) -> str:
        """Wait until all that was begun is on the disk; return why it is not, with the machine's name and what to do.

        Args:
            for_copies: whether also, for some seconds, until others have it.
            is_required: whether a failure is raised, not only warned of.

        Raises:
            RunFailed: it cannot be written, and is required; names the machine.
        """
        failure = self._end_pending(tells=not is_required)
        if failure is not None and is_required:
            raise failure
        if for_copies and self.copies is not None:
            self.copies.wait()
        return str(failure or "")

    def cost(self) -> SnapshotCost:
        """Return what the last one cost."""
        return SnapshotCost(self._waited, self._written, self._begun)

    def _end_pending(self, tells: bool = False) -> RunFailed | None:
        """Wait for the pending one; return why it could not be written, and warn of that if it ``tells``, or if the one
        before could be."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            pending.result()
        except RunFailed as failure:
            if tells or not self._is_failing:
                kept = f"training goes on, and {self._store.newest_in_words()}"
                self._emit(WarningEvent(message=f"{failure}; {kept}"))
            self._is_failing = True
            return failure
        if self._is_failing:
            self._is_failing = False
            self._emit(WarningEvent(message=f"{self._name} can write snapshots again"))
        return None

    def release(self) -> None:
        """Free the memory of the copy, which the machine is short of; no copies are made from now on."""
        if self._device.type == "cpu":
            self._settle()
            self._copy.release()
            self._is_short = True

    def newest_in_words(self) -> str:
        """Return a sentence on the newest snapshot."""
        self._settle()
        return self._store.newest_in_words()

    def close(self) -> None:
        """Wait for a pending snapshot; its failure is reported by :meth:`wait`, not here; sweep leftovers."""
        self._settle()
        self._pool.shutdown()
        self._copy.release()
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._store.sweep()

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.exception()

    def _has_room_for(self, size: int) -> bool:
        return not (self._has_ended or self._is_short) and self._free() >= 2 * (size - self._copy.bytes)

    def _write(self, snapshot: Snapshot, pieces: Iterable[memoryview], plan_hash: str, start: float) -> None:
        try:
            folder, size = self._store.write(snapshot.step, pieces, snapshot.state, plan_hash)
        except RunFailed as error:
            self._store.current = None
            raise RunFailed(error.message, error.hint, machine=self._name) from error
        path, live = str(folder.relative_to(self._run_dir)), tuple(snapshot.state.get("live", ()))
        seconds = time.monotonic() - start
        self._written = seconds
        self._emit(SnapshotEvent(step=snapshot.step, path=path, bytes=size, seconds=seconds, live=live))


@contextlib.contextmanager
def _ending(future: Future[None]) -> Iterator[None]:
    """End ``future`` with the end of what is done here."""
    try:
        yield
        future.set_result(None)
    except RunFailed as error:
        future.set_exception(error)
