"""Runs on a network of real hosts, through the real command line: what is lost, what goes on, what is left."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.processes import signal_all
from tests.waiting import until
from training.records.events import StepEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[[Lab, float], Muster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Muster] = []

    def make(lab: Lab, pause: float = 0.0) -> Muster:
        made.append(Muster(tmp_path, lab.hosts_file, pause, gate=lab.folder / "gate"))
        return made[-1]

    yield make
    for muster in made:
        muster.leave_nothing()


def stands_still(muster: Muster, *arguments: str, step: int = 5) -> str:
    """Start a run that waits after a step: it cannot be over before it is disturbed, however busy this machine is."""
    muster.let_pass(step)
    run_id = muster.detach(*arguments)
    muster.until_step(run_id, step)
    return run_id


def test_three_hosts_train_to_a_model_and_nothing_is_left(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b", "c")
    muster = start(lab, 0.0)
    muster.let_pass(12)
    done = muster.run(*muster.train("--max-steps", "12"))
    assert done.returncode == 0, done.stderr
    (folder,) = (muster.folder / "output").iterdir()
    assert (folder / "model" / "model.safetensors").stat().st_size > 0
    assert [ours(host) for host in lab] == [[], [], []]
    assert not list(folder.glob("secrets")) and not list(lab["a"].files.glob(".cache/muster/runs/*"))


@pytest.mark.parametrize(("victim", "engine"), [("training.workers.worker", "mesh"), ("agent.py", "nccl")])
def test_the_others_go_on_without_a_killed_process(make_lab: MakeLab, start: Start, victim: str, engine: str) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = stands_still(muster, "--max-steps", "20", "--engine", engine)
    signal_all(lab["a"].pids(victim), signal.SIGKILL)
    muster.let_pass(20)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert re.search("a is (lost|given up)", ended.stderr)
    assert muster.metadata(run_id)["metrics"]["lost_members"] == [0]
    assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
    until(lambda: ours(lab["a"]) == [])


def test_the_others_go_on_when_a_cable_is_pulled(make_lab: MakeLab, start: Start) -> None:
    """With the other engine the mesh goes on, too, and takes the machine back: ``test_lab_return.py``."""
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = stands_still(muster, "--max-steps", "20", "--lease", "6", "--engine", "nccl")
    lab["b"].cut()
    muster.let_pass(20)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert re.search("b is (lost|given up)", ended.stderr)
    until(lambda: ours(lab["b"]) == [])


def test_without_a_supervisor_no_orphan_is_left_and_the_run_resumes(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    options = ["--max-steps", "20", "--snapshot-interval", "5", "--lease", "5"]
    muster.let_pass(20)
    words = muster.train(*options)
    words[2:4] = ["--local", "2"]  # as exact as on two hosts
    assert muster.run(*words).returncode == 0
    (undisturbed,) = (folder.name[:20] for folder in (muster.folder / "output").iterdir())
    run_id = stands_still(muster, *options, step=12)
    muster.kill_supervision(run_id)
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])
    muster.let_pass(20)
    resumed = muster.run("distributed-train", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert dict(muster.losses(run_id)) == pytest.approx(dict(muster.losses(undisturbed)), rel=1e-6)


def test_another_supervisor_takes_the_place_of_a_killed_one(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = stands_still(muster, "--max-steps", "30")
    muster.let_pass(15)  # it trains while it is killed
    for _ in range(2):
        killed = muster.supervisor(run_id)
        signal_all([killed], signal.SIGKILL)
        until(lambda: muster.supervisor(run_id) not in (0, killed))  # noqa: B023 - at once
    muster.let_pass(30)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    for member in range(2):
        assert [step for step, _ in muster.losses(run_id, member)] == list(range(1, 31))
    assert muster.metadata(run_id)["metrics"]["lost_members"] == []
    assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])


def test_a_lost_connection_loses_and_doubles_no_event(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = stands_still(muster, "--max-steps", "30")
    signal_all(lab["a"].pids("sshd: root"), signal.SIGKILL)
    muster.let_pass(30)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert "reconnected" in ended.stderr
    steps = [e.step for e in muster.events(run_id) if isinstance(e, StepEvent) and e.member == 0]
    assert steps == list(range(1, 31))
    assert muster.metadata(run_id)["metrics"]["lost_members"] == []


def test_two_terminals_see_every_event_once_and_stop_proves_that_nothing_is_left(
    make_lab: MakeLab, start: Start
) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    muster.let_pass(1000)
    run_id = muster.detach("--max-steps", "1000")
    terminals = [muster.popen("attach", run_id) for _ in range(2)]
    muster.until_step(run_id, 10)
    stopped = muster.run("stop", run_id)
    assert stopped.returncode == 0, stopped.stderr
    kept, *left = stopped.stdout.splitlines()
    assert kept.startswith("stopped; the snapshot of step ") and kept.endswith(" is kept, 0 steps lost")
    assert left == ["a: nothing left running", "b: nothing left running"]
    assert [ours(host) for host in lab] == [[], []]
    said = [terminal.communicate(timeout=60)[1] for terminal in terminals]
    assert [terminal.returncode for terminal in terminals] == [130, 130]
    assert all(text.count("the run was stopped") == 1 and text.count("a started") == 1 for text in said)
