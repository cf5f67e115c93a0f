"""Runs on a network of real hosts, through the real command line: what is lost, what goes on, what is left."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.waiting import until
from training.events import StepEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[[Lab, float], Muster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Muster] = []

    def make(lab: Lab, pause: float = 0.0) -> Muster:
        made.append(Muster(tmp_path, lab.hosts_file, pause))
        return made[-1]

    yield make
    for muster in made:
        muster.leave_nothing()


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # one ends with the other
            os.kill(pid, signal.SIGKILL)


def test_three_hosts_train_to_a_model_and_nothing_is_left(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b", "c")
    muster = start(lab, 0.0)
    done = muster.run(*muster.train("--max-steps", "12"))
    assert done.returncode == 0, done.stderr
    (folder,) = (muster.folder / "output").iterdir()
    assert (folder / "model" / "model.safetensors").stat().st_size > 0
    assert [ours(host) for host in lab] == [[], [], []]
    assert not list(folder.glob("secrets")) and not list(lab["a"].files.glob(".cache/muster/runs/*"))


def test_both_engines_give_the_same_losses(make_lab: MakeLab, start: Start) -> None:
    muster = start(make_lab("a", "b"), 0.0)
    curves = []
    for engine in ("mesh", "nccl"):
        run_id = muster.detach("--max-steps", "8", "--engine", engine)
        assert muster.wait_for_end(run_id).returncode == 0
        curves.append([loss for _, loss in muster.losses(run_id)])
    assert len(curves[0]) == 8
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize("victim", ["training.worker", "agent.py"])
def test_the_others_go_on_without_a_killed_process(make_lab: MakeLab, start: Start, victim: str) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = muster.detach("--max-steps", "80")
    muster.until_step(run_id, 5)
    kill(lab["a"].pids(victim))
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert "a is lost" in ended.stderr
    assert muster.metadata(run_id)["metrics"]["lost_members"] == [0]
    assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
    until(lambda: ours(lab["a"]) == [])


def test_the_others_go_on_when_a_cable_is_pulled(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = muster.detach("--max-steps", "80", "--lease", "6")
    muster.until_step(run_id, 5)
    lab["b"].cut()
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert "b is lost" in ended.stderr
    until(lambda: ours(lab["b"]) == [])


@pytest.mark.parametrize("accident", ["worker", "agent", "cable"])
def test_the_torch_engine_names_the_first_cause(make_lab: MakeLab, start: Start, accident: str) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = muster.detach("--max-steps", "400", "--engine", "nccl", "--lease", "6")
    muster.until_step(run_id, 5)
    if accident == "cable":
        lab["b"].cut()
    else:
        kill(lab["b"].pids("training.worker" if accident == "worker" else "agent.py"))
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 1
    assert muster.metadata(run_id)["status"] == "failed"
    assert "b" in muster.metadata(run_id)["error_message"]
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])


def test_a_killed_supervisor_leaves_no_orphan_and_the_run_resumes(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    options = ["--max-steps", "60", "--snapshot-interval", "10", "--lease", "5"]
    undisturbed = muster.detach(*options)
    assert muster.wait_for_end(undisturbed).returncode == 0
    run_id = muster.detach(*options)
    muster.until_step(run_id, 25)
    kill([muster.supervisor(run_id)])
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])
    resumed = muster.run("distributed-train", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    assert dict(muster.losses(run_id)) == pytest.approx(dict(muster.losses(undisturbed)), rel=1e-6)


def test_a_lost_connection_loses_and_doubles_no_event(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = muster.detach("--max-steps", "100")
    muster.until_step(run_id, 5)
    kill(lab["a"].pids("sshd: root"))
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert "connected again" in ended.stderr
    steps = [e.step for e in muster.events(run_id) if isinstance(e, StepEvent) and e.member == 0]
    assert steps == list(range(1, 101))
    assert muster.metadata(run_id)["metrics"]["lost_members"] == []


def test_two_terminals_see_every_event_once_and_stop_proves_that_nothing_is_left(
    make_lab: MakeLab, start: Start
) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = muster.detach("--max-steps", "1000")
    terminals = [muster.popen("attach", run_id) for _ in range(2)]
    muster.until_step(run_id, 10)
    stopped = muster.run("stop", run_id)
    assert stopped.returncode == 0, stopped.stderr
    kept, *left = stopped.stdout.splitlines()
    assert kept.startswith("stopped; the snapshot of step ") and kept.endswith(" is kept, 0 steps lost")
    assert left == ["a: nothing is left", "b: nothing is left"]
    assert [ours(host) for host in lab] == [[], []]
    said = [terminal.communicate(timeout=60)[1] for terminal in terminals]
    assert [terminal.returncode for terminal in terminals] == [130, 130]
    assert all(text.count("run cancelled") == 1 and text.count("a started") == 1 for text in said)
