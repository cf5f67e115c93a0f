"""Runs on a network of real hosts, through the real command line: what is lost, what goes on, what is left."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Hosts, Machine
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.processes import signal_all
from tests.waiting import until
from training.records.events import MemberEvent, WarningEvent

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


def test_the_last_goes_on_without_a_killed_agent_and_a_pulled_cable(make_lab: MakeLab, start: Start) -> None:
    """With stock torch, and with this machine among those that train. With the other engine the mesh goes on, too, and
    takes a machine back whose cable was pulled: ``test_lab_return.py``."""
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    project = str(muster.folder / "muster")
    here = Machine(name="here", address="localhost", python=sys.executable, project_path=project)
    save_hosts(Hosts(machines=(here, *lab.hosts().machines), ssh_config=str(lab.ssh_config)), lab.hosts_file)
    run_id = stands_still(muster, "--max-steps", "20", "--lease", "6", "--engine", "nccl")
    signal_all(lab["a"].pids("agent.py"), signal.SIGKILL)
    muster.let_pass(10)
    muster.until_step(run_id, 10)
    lab["b"].cut()
    muster.let_pass(20)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\ba lost\b", ended.stderr) and re.search(r"\bb lost\b", ended.stderr)
    assert muster.metadata(run_id)["metrics"]["lost_members"] == [1, 2]
    assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])


def test_without_a_supervisor_no_orphan_is_left_and_the_run_resumes(make_lab: MakeLab, start: Start) -> None:
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    options = ["--max-steps", "160", "--snapshot-interval", "40", "--lease", "5"]  # more than they take until it ends
    options += ["--balance", "off"]  # a busy host would take other samples
    muster.let_pass(160)
    words = muster.train(*options)
    words[2:4] = ["--local", "2"]  # as exact as on two hosts
    assert muster.run(*words).returncode == 0
    (undisturbed,) = (folder.name[:20] for folder in (muster.folder / "output").iterdir())
    run_id = stands_still(muster, *options, "--engine", "nccl", step=12)  # members of the other engine train on
    muster.kill_supervision(run_id)
    muster.let_pass(160)
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])
    resumed = muster.run("distributed-train", "--resume", run_id)
    assert resumed.returncode == 0, resumed.stderr
    losses, expected = dict(muster.losses(run_id)), dict(muster.losses(undisturbed))
    assert losses == pytest.approx(expected, rel=1e-6)  # also those that were told to nobody


def test_nothing_that_is_killed_ends_a_run_and_no_event_is_lost_or_doubled(make_lab: MakeLab, start: Start) -> None:
    """First a connection, then the supervisor twice while all train, and at last a worker."""
    lab = make_lab("a", "b")
    muster = start(lab, 0.05)
    run_id = stands_still(muster, "--max-steps", "30")
    signal_all(lab["a"].pids("sshd: root"), signal.SIGKILL)
    until(lambda: any("a: reconnected" in line for line in warnings(muster, run_id)))
    muster.let_pass(15)  # it trains while it is killed
    for _ in range(2):
        killed = muster.supervisor(run_id)
        signal_all([killed], signal.SIGKILL)
        until(lambda: muster.supervisor(run_id) not in (0, killed))  # noqa: B023 - at once
    muster.let_pass(20)
    muster.until_step(run_id, 20, members=2)
    signal_all(lab["a"].pids("training.workers.worker"), signal.SIGKILL)
    muster.let_pass(30)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    for member, last in enumerate((20, 30)):
        assert [step for step, _ in muster.losses(run_id, member)] == list(range(1, last + 1))
    lost = [event for event in muster.events(run_id) if isinstance(event, MemberEvent) and event.status == "lost"]
    assert [event.member for event in lost] == muster.metadata(run_id)["metrics"]["lost_members"] == [0]
    assert re.search(r"\ba lost\b", ended.stderr)
    assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
    until(lambda: ours(lab["a"]) + ours(lab["b"]) == [])


def warnings(muster: Muster, run_id: str) -> list[str]:
    return [event.message for event in muster.events(run_id) if isinstance(event, WarningEvent)]
