"""Writes a member's snapshots in the background of its training, which waits only for a copy of its state.

The copy is hashed, written and fsynced in a thread. The next snapshot, an order and the end of the training wait until
it is on the disk. A failure there fails the training at its next step.

The copy takes as many bytes as a snapshot, from memory of the host. Where less than twice as much is free, snapshots
are written from the tensors themselves while the training waits: a machine does not run out of memory by this.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from profiles.errors import RunFailed
from training.hardware.resources import free_memory
from training.records.events import Emit, SnapshotEvent
from training.snapshots.snapshot_copies import SnapshotCopies
from training.snapshots.snapshot_store import Snapshot, SnapshotStore
from training.snapshots.tensor_file import HostCopy, TensorFile


class SnapshotWriter:
    """Writes one snapshot at a time.

    Args:
        device: that holds what is saved.
        name: of this machine, for messages.
        emit: takes the event of each snapshot on the disk, in the writing thread.
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
        self._has_ended = self._is_short = False
        self._copy = HostCopy(device)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._pending: Future[None] | None = None

    def begin(self, snapshot: Snapshot, plan_hash: str, in_background: bool = True) -> None:
        """Write a snapshot; return when its tensors may change: when it is written, unless ``in_background``.

        Raises:
            RunFailed: it cannot be written, or the one before could not.
        """
        self.wait()
        start, file = time.monotonic(), TensorFile(snapshot.tensors)
        self._store.current = snapshot.step
        if in_background and self._has_room_for(file.body_bytes):
            pieces, copied = self._copy.take(file), Snapshot(snapshot.step, {}, copy.deepcopy(snapshot.state))
            self._pending = self._pool.submit(self._write, copied, pieces, plan_hash, start)
        else:
            self._write(snapshot, file.pieces(), plan_hash, start)
        if self.copies is not None:
            self.copies.begin(snapshot.step, file.body_bytes, self._pending)

    def check(self) -> None:
        """Raise what failed in the meantime, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self, for_copies: bool = False) -> None:
        """Wait until all that was begun is on the disk.

        Args:
            for_copies: whether also, for some seconds, until others have it.

        Raises:
            RunFailed: it cannot be written; names the machine.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        if for_copies and self.copies is not None:
            self.copies.wait()

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
        """Wait for a pending snapshot; its failure is reported by :meth:`wait`, not here."""
        self._settle()
        self._pool.shutdown()
        self._copy.release()
        self._has_ended = True

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
        self._emit(SnapshotEvent(step=snapshot.step, path=path, bytes=size, seconds=seconds, live=live))
