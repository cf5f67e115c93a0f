"""A worker is killed in the middle of a step: what it had in hand is trained on by the others, each sample once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from local_runs import Run

from tests.waiting import until

JOB = """
import json, os, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training.tasks.custom import CustomJob

HERE, calls = Path({folder!r}), []

def build():
    return CustomJob(nn.Linear(2, 1), TensorDataset(torch.rand(60, 2), torch.arange(60)), loss=loss)

def loss(output, numbers):
    if output.requires_grad:
        calls.append(numbers.tolist())
        (HERE / f"{{os.getpid()}}.json").write_text(json.dumps(calls))
        while len(calls) == {last} and is_victim():
            time.sleep(0.01)
    return (output - 1).square().mean()

def is_victim():
    try:
        os.link(HERE / f"{{os.getpid()}}.json", HERE / "victim")  # the first of all
    except FileExistsError:
        return (HERE / "victim").samefile(HERE / f"{{os.getpid()}}.json")
    return True
"""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "committed"), [("allreduce", 1), ("diloco", 2)])
def test_every_sample_of_the_epoch_counts_once(tmp_path: Path, strategy: str, committed: int) -> None:
    """Steps hold 12 samples, then 8; the victim ends in the first step that no synchronisation holds."""
    job = tmp_path / "job.py"
    job.write_text(JOB.format(folder=str(tmp_path), last=committed + 1))
    options = {"strategy": strategy, "batch_size": 4, "max_steps": 7} | ({"sync_interval": 2} if committed > 1 else {})
    run = Run(tmp_path / "output", workers=3, model_path=f"{job}:build", **options)
    until(lambda: (tmp_path / "victim").exists())
    (victim,) = (pid for pid in run.pids.values() if (tmp_path / "victim").samefile(tmp_path / f"{pid}.json"))
    os.kill(victim, signal.SIGKILL)
    run.end()
    assert run.outcome.status == "completed" and len(run.outcome.metrics["lost_members"]) == 1
    steps = {pid: json.loads((tmp_path / f"{pid}.json").read_text()) for pid in run.pids.values()}
    assert len(steps[victim]) == committed + 1
    counted = [
        number for pid in steps for step in steps[pid][: committed if pid == victim else None] for number in step
    ]
    assert sorted(counted) == list(range(60))
