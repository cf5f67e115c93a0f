"""What the benchmark scripts share: real local runs and their events."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from profiles.files.resolve import load_profile
from training.records.events import EvaluationEvent, Event, StepEvent, SyncEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController


@dataclass(frozen=True)
class Measured:
    """One finished run."""

    metrics: dict[str, Any]
    events: list[Event]

    def steps(self, rank: int) -> list[StepEvent]:
        return [e for e in self.events if isinstance(e, StepEvent) and e.member == rank]

    def syncs(self, rank: int) -> list[SyncEvent]:
        return [e for e in self.events if isinstance(e, SyncEvent) and e.member == rank]

    def final(self, split: str = "validation") -> EvaluationEvent:
        return [e for e in self.events if isinstance(e, EvaluationEvent) and e.split == split][-1]

    def final_loss(self, split: str = "validation") -> float:
        return float(self.final(split).loss or 0.0)

    def samples_per_second(self, skip: int) -> float:
        """Samples of all members after each member's first ``skip`` steps, over the time these took."""
        found = [e for e in self.events if isinstance(e, StepEvent) and e.step > skip]
        begin = max(e.time for e in self.events if isinstance(e, StepEvent) and e.step == skip)
        return sum(e.samples for e in found) / (max(e.time for e in found) - begin)


def train(
    profile: str, workers: int, overrides: Mapping[str, Any], *, simulated: bool = False, model: Path | None = None
) -> Measured:
    """Run a profile on this machine in a folder that is removed afterwards.

    Args:
        simulated: the workers are one process and take turns.
        model: where the trained model is to stay.

    Raises:
        SystemExit: the run did not complete.
    """
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {key: str(value) for key, value in overrides.items()} | {"output_dir": folder}
        plan = plan_local_run(load_profile(profile, options).profile, workers, simulated=simulated)
        with RunFolder.create(Path(folder), plan, sys.argv) as run_folder:
            run = RunController(plan, run_folder, events.append)
            run.start()
            outcome = run.wait()
        if model is not None and outcome.status == "completed":
            shutil.copytree(outcome.run_dir / "model", model, dirs_exist_ok=True)
    if outcome.status != "completed":
        raise SystemExit(f"{profile}: {outcome.message} ({outcome.hint})")
    return Measured(outcome.metrics, events)
