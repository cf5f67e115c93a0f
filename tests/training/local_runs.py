"""A run of real processes on this computer that goes on beside its test."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from profiles.files.resolve import profile_from_options
from training.records.events import Event, MemberEvent, StepEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController

SPIRALS = Path(__file__).parents[2] / "examples" / "custom" / "spirals.py"


class Run:
    """A local run of the spirals example in a thread, with what it said so far."""

    def __init__(self, folder: Path, snapshots: Path | None = None, workers: int = 2, **options: object) -> None:
        chosen = {"task": "custom", "model_path": f"{SPIRALS}:build", "eval_before": False, "eval_interval": 0}
        profile = profile_from_options("spirals", {**chosen, **options})
        plan = plan_local_run(profile, workers).model_copy(update={"resume": snapshots is not None})
        self.events: list[Event] = []
        self.pids: dict[int, int] = {}
        self.folder = RunFolder.create(folder, plan, ["test"])
        if snapshots is not None:
            shutil.copytree(snapshots, self.folder.path / "checkpoints", dirs_exist_ok=True)
        self.run = RunController(plan, self.folder, self._take)
        self.run.start()
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()

    def _wait(self) -> None:
        with self.folder:
            self.outcome = self.run.wait()

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, MemberEvent) and event.message.startswith("pid ") and event.member is not None:
            self.pids[event.member] = int(event.message.split()[1])

    def step(self) -> int:
        return max((e.step for e in self.events if isinstance(e, StepEvent)), default=0)

    def end(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()
