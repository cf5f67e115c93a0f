"""Two hosts that each hold a shard of every weight, planned as over a direct cable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.hosts.file import load_hosts
from distributed.launcher import DistributedLauncher
from distributed.preparation import members
from distributed.preparation.prepare import PrepareOptions
from profiles.files.resolve import load_profile
from tests.distributed.muster_runs import PATIENCE, ours
from tests.distributed.test_lab_pipeline import Pipeline
from tests.lab.fixtures import MakeLightLab
from tests.waiting import until
from training.records.plan import read_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6


def test_two_hosts_hold_shards_and_train_as_one_process(
    tmp_path: Path, make_light_lab: MakeLightLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "DIRECT_MBIT", 1.0)  # this machine measures what it has time for
    lab = make_light_lab("a", "b")
    muster = Pipeline(tmp_path, lab, STEPS, stages=2)
    whole = muster.whole()
    muster.let_pass(1000)
    words = [*muster.train(*muster.options, "--layout", "shard", "--snapshot-interval", "2")][4:]
    options = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    profile = load_profile("nanogpt", options).profile
    launcher = DistributedLauncher(load_hosts(lab.hosts_file), profile, PrepareOptions())
    path = launcher.start(launcher.plan(), ["test"], output=tmp_path / "output")
    try:
        until(lambda: json.loads((path / "metadata.json").read_text())["status"] == "completed", PATIENCE)
    finally:
        muster.leave_nothing()
    (member,) = read_plan(path / "plan.json").members
    assert [device.machine for device in member.devices] == ["a", "b"]
    muster.assert_same_as(whole, path.name[:20])
    until(lambda: [ours(host) for host in lab] == [[], []])
