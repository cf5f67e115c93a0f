"""A language model that four hosts train in two members of two, as the plan chose and cut it, through the real command
line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLab
from tests.lab.spec import HostSpec
from tests.layouts.staged_records import tied_llama, trained, weights_in
from training.records.events import StepEvent
from training.records.plan import read_plan
from training.run.local_plan import plan_local_run

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = {
    "max_steps": 4, "batch_size": 128, "block_size": 32, "threads": 1, "lr_scaling": "linear",
    "from_scratch": False, "strategy": "allreduce", "codec": "fp32", "eval_interval": 4, "max_eval_samples": 4,
}  # fmt: skip
"""With ``lr_scaling = linear`` twice the samples in a step are worth twice as much, so two members win."""


def test_two_members_of_two_hosts_are_chosen_and_train_as_two_whole_ones(tmp_path: Path, make_lab: MakeLab) -> None:
    lab = make_lab(*(HostSpec(name, mbit=10) for name in "abcd"))  # a step takes as long as its messages
    muster = Muster(tmp_path, lab.hosts_file)
    options = tied_llama(tmp_path, blocks=2, lines=2000) | OPTIONS
    words = ["train", "nanogpt", "--hosts", str(lab.hosts_file), "--set", "layout=pipeline"]
    words += [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    ended = muster.run(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "measuring" in ended.stderr and "2 members hold the model, each divided over its devices" in ended.stderr
    (folder,) = (tmp_path / "output").iterdir()
    plan = read_plan(folder / "plan.json")
    assert sorted(name for member in plan.members for name in member.machines) == [*"abcd"]
    assert [[device.blocks for device in member.devices] for member in plan.members] == [[(0, 1), (1, 2)]] * 2
    assert json.loads((folder / "metadata.json").read_text())["status"] == "completed"
    in_one = plan.profile.run.model_copy(update={"layout": "replicate", "stages": 0})
    in_two = plan_local_run(plan.profile.model_copy(update={"run": in_one}), 2)
    whole = trained(tmp_path / "whole", in_two, in_threads=True)
    expected = {(event.member, event.step): event.loss for event in whole.of(StepEvent)}
    steps = [event for event in muster.events(folder.name) if isinstance(event, StepEvent)]
    assert {(event.member, event.step): event.loss for event in steps} == pytest.approx(expected, rel=1e-6)
    model = folder / "model"
    assert (model / "config.json").is_file()
    weights = safetensors.torch.load_file(model / "model.safetensors")
    for name, weight in weights_in(whole.outcome.run_dir).items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
    muster.leave_nothing()
