"""A language model that two hosts hold together, cut as the planner measured them, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLab
from tests.lab.spec import HostSpec
from tests.layouts.staged_records import tied_llama
from training.records.plan import read_plan

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_hosts_are_measured_by_blocks_and_train_as_planned(tmp_path: Path, make_lab: MakeLab) -> None:
    lab = make_lab(HostSpec("a", mbit=100), HostSpec("b", mbit=100))  # to measure a fast link keeps processors busy
    muster = Muster(tmp_path, lab.hosts_file)
    options = tied_llama(tmp_path, blocks=3, lines=200) | {
        "max_steps": 3, "batch_size": 4, "layout": "pipeline", "threads": 1, "eval_interval": 3, "max_eval_samples": 4,
    }  # fmt: skip
    words = ["train", "nanogpt", "--hosts", str(lab.hosts_file)]
    words += [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    ended = muster.run(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    assert "measuring" in ended.stderr and "The model is divided over " in ended.stderr
    (folder,) = (tmp_path / "output").iterdir()
    (member,) = read_plan(folder / "plan.json").members
    ends = [device.blocks for device in member.devices]
    assert ends[0] is not None and ends[1] is not None and ends[0][1] == ends[1][0]
    assert json.loads((folder / "metadata.json").read_text())["status"] == "completed"
    assert (folder / "model" / "config.json").is_file()
    muster.leave_nothing()
