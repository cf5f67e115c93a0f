"""A resume that cannot begin, whatever is wrong, costs nothing: mended, the run goes on from where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from profiles.errors import ExitCode
from profiles.files.resolve import profile_from_options
from training.records.events import SnapshotEvent, StepEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.outcome import RunOutcome
from training.run.run_controller import RunController

pytestmark = pytest.mark.slow

JOB = """
import itertools
import time
from pathlib import Path
import torch
from training.tasks.custom import CustomJob

def build():
    values = torch.tensor([[float(n)] for n in Path("{data}").read_text().split()])
    return CustomJob(torch.nn.Linear(1, 1), torch.utils.data.TensorDataset(values, values), loss=loss)

steps = itertools.count(1)

def loss(output, wanted):
    if next(steps) > 20 and not Path("{hurry}").exists():
        time.sleep(0.05)
    return torch.nn.functional.mse_loss(output, wanted)
"""
"""Slow after its first snapshot, so that it can be stopped there."""


def carry_out(folder: RunFolder, stop_after_snapshot: bool = False) -> RunOutcome:
    def watch(event: object) -> None:
        if stop_after_snapshot and isinstance(event, SnapshotEvent):
            run.request_stop("enough")

    with folder:
        run = RunController(folder.plan(), folder, watch)
        run.start()
        return run.wait()


def device(plan: RunPlan, name: str) -> RunPlan:
    return plan.model_copy(update={"members": (plan.members[0].on_device(kind=name),)})


def faster(plan: RunPlan) -> RunPlan:
    training = plan.profile.training.model_copy(update={"learning_rate": 0.5})
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"training": training})})


def test_whatever_is_wrong_at_a_resume_the_run_stays_as_it_was(tmp_path: Path) -> None:
    job, data = tmp_path / "job.py", tmp_path / "data.txt"
    data.write_text(" ".join(map(str, range(8))))
    hurry = tmp_path / "hurry"
    job.write_text(JOB.format(data=data, hurry=hurry))
    options = {
        "task": "custom",
        "model_path": f"{job}:build",
        "max_steps": 200,
        "snapshot_interval": 20,
        "device": "cpu",
    }
    plan = plan_local_run(profile_from_options("p", {**options, "batch_size": 2, "learning_rate": 1e-4}), 1)
    first = carry_out(RunFolder.create(tmp_path / "output", plan, ["first"]), stop_after_snapshot=True)
    assert first.status == "cancelled"
    before, kept = RunFolder.open(first.run_dir).metadata, sorted(first.run_dir.glob("checkpoints/*/*"))
    assert kept
    hurry.touch()

    def away(file: Path, change: Callable[[RunPlan], RunPlan] = lambda plan: plan) -> RunOutcome:
        """Resume while a file is missing."""
        hidden = file.rename(file.with_suffix(".away"))
        try:
            resumed = change(plan).model_copy(update={"resume": True})
            return carry_out(RunFolder.resume(first.run_dir, resumed, ["again"]))
        finally:
            hidden.rename(file)

    spare = tmp_path / "spare.txt"
    spare.touch()
    absent = "mps" if torch.cuda.is_available() else "cuda"
    for outcome, cause in [
        (away(data), "data.txt"),
        (away(job), "job.py"),
        (away(spare, lambda plan: device(plan, absent)), absent),
        (away(spare, faster), "different settings"),
    ]:
        assert (outcome.status, outcome.exit_code) == ("failed", ExitCode.BAD_INPUT), cause
        assert cause in outcome.message
        assert RunFolder.open(first.run_dir).metadata == before
        assert sorted(first.run_dir.glob("checkpoints/*/*")) == kept
    again = RunFolder.resume(first.run_dir, plan.model_copy(update={"resume": True}), ["again"])
    assert carry_out(again).status == "completed"
    steps = [event.step for event in again.events() if isinstance(event, StepEvent)]
    assert steps == list(range(1, 201))
