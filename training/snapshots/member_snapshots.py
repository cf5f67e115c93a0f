"""The snapshots of one member: each of its devices writes its part of them, in a folder of its own.

Everything in a snapshot goes by the names of the whole model, so a run may go on with other devices than wrote it: each
reads what it needs from all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiles.errors import RunFailed
from training.records.plan import RunPlan
from training.snapshots.snapshot_store import Snapshot, SnapshotStore


class Origin(NamedTuple):
    """What all parts of one snapshot have in common."""

    parts: int
    """On how many devices it was written."""
    course: tuple[tuple[int, int], ...]
    """Attempts that led to it, with the steps at which they began."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Origin:
        """Return the origin of a part, from its JSON-able state."""
        return cls(state.get("part", (0, 1))[1], tuple((attempt, step) for attempt, step in state.get("course", ())))


class MemberSnapshots:
    """What lies in this run folder of the snapshots of a member.

    Args:
        checkpoints: folder of the run's snapshots.
        rank: of this process.
    """

    def __init__(self, checkpoints: Path, plan: RunPlan, rank: int) -> None:
        process, keep = plan.process(rank), plan.profile.snapshot.snapshot_keep
        self.own = SnapshotStore(checkpoints / process.folder, keep, shared=plan.world_size > 1 or plan.is_staged)
        """Of this process: the only part that it writes."""
        self._checkpoints, self._first_folder = checkpoints, f"member-{process.member.rank}"
        self._turn, self._turns = process.device_number, len(process.member.devices)
        if plan.own_folders:
            self._turn, self._turns = 0, 1

    @property
    def to_check(self) -> list[SnapshotStore]:
        """The parts that this process checks; the member's other processes with this run folder check the others."""
        return self._stores[self._turn :: self._turns]

    def load(self, step: int, plan_hash: str, origin: Origin, wanted: Callable[[str], bool]) -> Snapshot:
        """Return what is wanted of the snapshot of ``step``, from all its parts in this run folder.

        Args:
            wanted: whether a tensor is needed, see :meth:`SnapshotStore.load`.

        Raises:
            RunFailed: none of them is on this machine, or one cannot be read.
        """
        parts: list[Snapshot] = []
        for store in sorted(self._stores, key=lambda store: store.directory != self.own.directory):
            if step in store.steps() and Origin.of(store.state(step)) == origin:
                parts.append(store.load(step, plan_hash, lambda name: wanted(name) and not _is_in(parts, name)))
        if not parts:
            message = f"no part of the snapshot of step {step} is on this machine"
            raise RunFailed(message, "resume on the machines that have one")
        self.own.current = step
        return Snapshot(step, {name: part.tensors[name] for part in parts for name in part.tensors}, parts[0].state)

    @property
    def _stores(self) -> list[SnapshotStore]:
        further = sorted(self._checkpoints.glob(f"{self._first_folder}-stage-*"))
        return [SnapshotStore(path, self.own.keep) for path in (self._checkpoints / self._first_folder, *further)]


def _is_in(parts: Sequence[Snapshot], name: str) -> bool:
    return any(name in part.tensors for part in parts)
