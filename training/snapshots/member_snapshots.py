"""The snapshots of one member: each of its devices writes its part of them, in a folder of its own.

Everything in a snapshot goes by the names of the whole model, so a run may go on with other devices than wrote it: each
reads what it needs from all parts. The number of a part is that of the device that wrote it; its folder is named after
it, also where another machine holds a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from profiles.errors import RunFailed
from training.records.plan import RunPlan
from training.snapshots.pieces import Assembly, Rows
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


class SnapshotParts(NamedTuple):
    """A snapshot of a member, and where its parts are."""

    step: int
    origin: Origin
    holders: Mapping[int, Sequence[int]]
    """The member's devices on whose machines each part is."""
    damaged: Mapping[int, Sequence[str]] = MappingProxyType({})
    """Folders of stores whose part of it is damaged, by the device that has checked them on its machine."""


class MemberSnapshots:
    """What lies on this machine of the snapshots of a member.

    Args:
        checkpoints: folder of the run's snapshots in the run folder of this process.
        rank: of this process.
    """

    def __init__(self, checkpoints: Path, plan: RunPlan, rank: int) -> None:
        process, keep = plan.process(rank), plan.profile.snapshot.snapshot_keep
        self.own = SnapshotStore(checkpoints / process.folder, keep, shared=plan.world_size > 1 or plan.is_staged)
        """Of this process: the only part of its snapshots that it writes."""
        self.plan_hash = plan.hash()
        self.loaded: int | None = None
        """Step of the snapshot that the run went on from."""
        self._damaged: Collection[str] = ()
        """Folders of stores with a damaged part of the snapshot from which the run goes on."""
        self._checkpoints, self._process = checkpoints, process
        # the processes of a machine have their run folders side by side, or all the same one
        self._folder, self._inside = (
            (checkpoints, "") if not plan.own_folders else (checkpoints.parents[1], f"*/{checkpoints.name}/")
        )
        self.machines = [device.machine for device in process.member.devices]
        """Of the member's devices."""
        neighbours = [number for number, machine in enumerate(self.machines) if machine == process.device.machine]
        self._turn, self._turns = neighbours.index(process.device_number), len(neighbours)
        if process.is_lead:
            written = {worker.folder for worker in plan.processes}
            self.own.abandoned = [store for store in self._stores if store.directory.name not in written]

    @property
    def to_check(self) -> list[SnapshotStore]:
        """The parts that this process checks; the member's other processes on this machine check the others."""
        return self._stores[self._turn :: self._turns]

    def receiver(self, device: int) -> int:
        """Return the device that receives parts for all of the machine of ``device``."""
        return self.machines.index(self.machines[device])

    def store_of(self, part: int) -> SnapshotStore:
        """Return where this process writes a part: its own, or a copy of another's, of which it keeps the newest."""
        if part == self._process.device_number:
            return self.own
        return SnapshotStore(self._checkpoints / self._process._replace(device_number=part).folder, 1)

    def note_damaged(self, parts: SnapshotParts) -> None:
        """Pass over the parts of a snapshot that were found damaged on this machine."""
        here = self._process.device.machine
        self._damaged = {
            folder for device, folders in parts.damaged.items() if self.machines[device] == here for folder in folders
        }

    def parts(self, step: int, origin: Origin) -> dict[int, SnapshotStore]:
        """Return where this machine has parts of one snapshot, by their numbers."""
        stores = ((store, store.state(step)) for store in self._stores if self._has(store, step))
        return {state.get("part", (0, 1))[0]: store for store, state in stores if Origin.of(state) == origin}

    def _has(self, store: SnapshotStore, step: int) -> bool:
        """Whether a store has a snapshot; one that was damaged may have been replaced by a copy."""
        steps = store.verified_steps()[0] if str(store.directory) in self._damaged else store.steps()
        return step in steps

    def load(
        self,
        step: int,
        plan_hash: str,
        origin: Origin,
        wanted: Callable[[str], bool],
        rows: Mapping[str, Rows] = MappingProxyType({}),
    ) -> Snapshot:
        """Return what is wanted of the snapshot of ``step``, from all its parts in this run folder.

        Args:
            wanted: whether a tensor is needed.
            rows: see :class:`training.snapshots.pieces.Assembly`.

        Raises:
            RunFailed: none of them is on this machine, or one cannot be read.
        """
        assembly, states = Assembly(wanted, rows), list[dict[str, Any]]()
        stores = self.parts(step, origin).values()
        for store in sorted(stores, key=lambda store: store.directory != self.own.directory):
            states.append(store.state(step))
            assembly.begin(states[-1].get("rows", {}))
            assembly.add(store.load(step, plan_hash, assembly.cut).tensors)
        if not states:
            message = f"no part of the snapshot of step {step} is on this machine"
            raise RunFailed(message, "resume on the machines that have one")
        self.own.current = self.loaded = step
        return Snapshot(step, assembly.tensors(), states[0])

    @property
    def _stores(self) -> list[SnapshotStore]:
        first = self._process._replace(device_number=0).folder
        folders = (self._folder.glob(f"{self._inside}{name}") for name in (first, f"{first}-stage-*"))
        return [SnapshotStore(path, self.own.keep) for path in sorted(path for paths in folders for path in paths)]
