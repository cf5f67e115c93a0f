"""A language model that two hosts hold together, cut as the planner measured them, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster
from tests.lab.fixtures import MakeLab
from training.records.plan import read_plan

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_hosts_are_measured_by_blocks_and_train_as_planned(tmp_path: Path, make_lab: MakeLab) -> None:
    lab = make_lab("a", "b")
    muster = Muster(tmp_path, lab.hosts_file)
    texts = tmp_path / "texts"
    texts.mkdir()
    for split in ("train", "validation"):
        (texts / f"{split}.txt").write_text("all work and no play makes jack a dull boy\n" * 200)
    options = {
        "dataset": str(texts), "max-steps": "3", "batch-size": "4", "block-size": "32", "layout": "pipeline",
        "threads": "1", "eval-interval": "3", "max-eval-samples": "4",
    }  # fmt: skip
    words = ["train", "nanogpt", "--hosts", str(lab.hosts_file)]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    planned = muster.run(*words, "--plan-only")
    assert planned.returncode == 0, planned.stderr
    assert "The model is divided over " in planned.stdout + planned.stderr
    ended = muster.run(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    (folder,) = (tmp_path / "output").iterdir()
    (member,) = read_plan(folder / "plan.json").members
    ends = [device.blocks for device in member.devices]
    assert ends[0] is not None and ends[1] is not None and ends[0][1] == ends[1][0]
    assert json.loads((folder / "metadata.json").read_text())["status"] == "completed"
    assert (folder / "model" / "config.json").is_file()
    muster.leave_nothing()
