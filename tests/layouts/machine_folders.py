"""Machines that are folders: each has the run folders of its own workers, as a machine of a hosts file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.layouts.staged_records import Act, Record, plan_of, stop_soon, watch
from tests.layouts.thread_workers import ThreadWorkers
from training.records.plan import DevicePlan, RunPlan
from training.records.run_folder import RunFolder
from training.run.resumption import plan_to_resume


def on_machines(plan: RunPlan, *names: str) -> RunPlan:
    """Return the plan with the only member on devices of these machines."""
    devices = tuple(DevicePlan(machine=name, addresses=("127.0.0.1",), threads=1) for name in names)
    run = plan.profile.run.model_copy(update={"layout": "pipeline" if len(names) > 1 else "replicate"})
    member = plan.members[0].model_copy(update={"devices": devices})
    return plan.model_copy(update={"members": (member,), "profile": plan.profile.model_copy(update={"run": run})})


class MachineFolders:
    """Runs whose workers have folders on machines.

    Args:
        folder: of the machines, and of the run folder that the starting computer has.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run_dir = Path()

    def train(self, names: str, act: Act = watch, **options: Any) -> Record:
        plan = on_machines(plan_of(max(2, len(names)), **options), *names)
        return self._record(RunFolder.create(self._folder / "output", plan, ["test"]), act)

    def resume(self, names: str, act: Act = watch) -> Record:
        plan = on_machines(plan_to_resume(self.run_dir), *names)
        return self._record(RunFolder.resume(self.run_dir, plan, ["test"]), act)

    def folder_of(self, machine: str, rank: int) -> Path:
        return self._folder / machine / "runs" / self.run_dir.name / str(rank)

    def _record(self, folder: RunFolder, act: Act) -> Record:
        self.run_dir, plan = folder.path, folder.plan()

        def run_dir(rank: int) -> Path:
            path = self.folder_of(plan.process(rank).device.machine, rank)
            path.mkdir(parents=True, exist_ok=True)
            return path

        return Record(folder, act, ThreadWorkers(plan, run_dir, act is stop_soon).start, in_threads=True)
