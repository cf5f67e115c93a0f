"""Two members of two devices each: two devices of one host, and two hosts. Through the real command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.distributed.muster_runs import PATIENCE, ours
from tests.distributed.test_lab_pipeline import Pipeline
from tests.lab.fixtures import MakeLightLab
from tests.lab.light import LightLab
from tests.lab.processes import signal_all
from tests.waiting import until
from training.records.events import ErrorEvent, MemberEvent, RunEvent, StepEvent
from training.records.plan import read_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ("--max-steps", "8", "--batch-size", "12", "--strategy", "diloco", "--sync-interval", "2", "--codec", "fp32")


def four_devices(make_light_lab: MakeLightLab) -> LightLab:
    """Three hosts, the first one with two devices."""
    lab = make_light_lab("a", "b", "c")
    hosts = json.loads(lab.hosts_file.read_text())
    hosts["machines"][0]["devices"] = ["cpu", "cpu"]
    lab.hosts_file.write_text(json.dumps(hosts))
    return lab


def losses(muster: Pipeline, run_id: str) -> dict[tuple[int | None, int], float]:
    steps = [event for event in muster.events(run_id) if isinstance(event, StepEvent)]
    return {(event.member, event.step): event.loss for event in steps}


def test_two_members_train_as_two_whole_ones_through_a_stop(tmp_path: Path, make_light_lab: MakeLightLab) -> None:
    lab = four_devices(make_light_lab)
    muster = Pipeline(tmp_path, lab, 8, stages=2)
    muster.let_pass(1000)
    words = muster.train(*OPTIONS)
    words[2:4] = ["--local", "2"]
    whole = muster.run(*words)
    assert whole.returncode == 0, whole.stderr
    (folder,) = (tmp_path / "output").iterdir()
    muster.let_pass(4)
    run_id = muster.detach(*OPTIONS, "--layout", "pipeline", "--stages", "2")
    members = read_plan(muster.folder_of(run_id) / "plan.json").members
    assert [(member.name, member.machines) for member in members] == [("a:cpu+a:cpu-2", ("a",)), ("b+c", ("b", "c"))]
    muster.until_step(run_id, 4)
    muster.stop_with_snapshot(run_id)
    resumed = muster.run("distributed-train", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(muster, run_id) == pytest.approx(losses(muster, folder.name[:20]), rel=1e-6)
    muster.assert_same_as(folder.name[:20], run_id)
    until(lambda: [ours(host) for host in lab] == [[], [], []])
    muster.leave_nothing()


def test_a_member_that_lost_a_device_comes_back_by_itself(tmp_path: Path, make_light_lab: MakeLightLab) -> None:
    lab = four_devices(make_light_lab)
    muster = Pipeline(tmp_path, lab, 5000, stages=2)
    muster.let_pass(4)
    options = ("--max-steps", "5000", *OPTIONS[2:], "--eval-interval", "0", "--layout", "pipeline", "--stages", "2")
    run_id = muster.detach(*options)
    try:
        muster.until_step(run_id, 4, members=2)
        signal_all(lab["b"].pids("training.workers.worker"), signal.SIGKILL)
        until(lambda: "joins a running group" in news_of(muster, run_id), PATIENCE)
        muster.let_pass(5000)
        came_back = len(muster.losses(run_id, 1))
        until(lambda: len(muster.losses(run_id, 1)) > came_back, PATIENCE)
        stopped = muster.run("stop", run_id)
        assert stopped.returncode == 0, stopped.stderr
        events = muster.events(run_id)
        (end,) = [event.message for event in events if isinstance(event, RunEvent) and event.status == "cancelled"]
        assert end.endswith(" is kept, 0 steps lost")
        statuses = [event.status for event in events if isinstance(event, MemberEvent) and event.member == 1]
        assert [statuses.count(status) for status in ("lost", "joined")] == [1, 2]
        assert not [event for event in events if isinstance(event, ErrorEvent)]
        until(lambda: [ours(host) for host in lab] == [[], [], []])
    finally:
        muster.leave_nothing()


def news_of(muster: Pipeline, run_id: str) -> list[str]:
    return [event.message for event in muster.events(run_id) if isinstance(event, MemberEvent) and event.member == 1]
