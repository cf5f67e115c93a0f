"""The coordinator of a run on another machine than the one that starts it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from distributed.hosts.file import load_hosts, save_hosts
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.lab.processes import signal_all
from tests.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

COORDINATOR = "training.exchange.group.coordinator_main"


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    lab = make_lab("a", "b")
    hosts = load_hosts(lab.hosts_file)
    machines = tuple(m.model_copy(update={"carries_coordinator": m.name == "b"}) for m in hosts.machines)
    save_hosts(hosts.model_copy(update={"machines": machines}), lab.hosts_file)
    return lab


def test_members_meet_there_and_a_killed_one_is_started_again_there(lab: Lab, tmp_path: Path) -> None:
    muster = Muster(tmp_path, lab.hosts_file, gate=lab.folder / "gate")
    muster.let_pass(3)
    run_id = muster.detach("--max-steps", "20", "--lease", "6")
    muster.until_step(run_id, 3, members=2)
    killed = lab["b"].pids(COORDINATOR)
    assert killed and not lab["a"].pids(COORDINATOR)
    signal_all(killed, signal.SIGKILL)
    until(lambda: lab["b"].pids(COORDINATOR) not in ([], killed))
    muster.let_pass(20)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert [len(muster.losses(run_id, rank)) for rank in (0, 1)] == [20, 20]
    assert muster.metadata(run_id)["metrics"]["lost_members"] == []
    assert [ours(host) + host.pids(COORDINATOR) for host in lab] == [[], []]
    assert not list(lab["b"].files.glob(".cache/muster/runs/*"))
