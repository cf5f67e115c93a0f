"""The hub of a run on another machine than the one that starts it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distributed.hosts.file import load_hosts, save_hosts
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

HUB = "training.exchange.coordinator_main"


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    lab = make_lab("a", "b")
    hosts = load_hosts(lab.hosts_file)
    machines = tuple(m.model_copy(update={"carries_hub": m.name == "b"}) for m in hosts.machines)
    save_hosts(hosts.model_copy(update={"machines": machines}), lab.hosts_file)
    return lab


def test_members_meet_there_and_nothing_is_left(lab: Lab, tmp_path: Path) -> None:
    muster = Muster(tmp_path, lab.hosts_file, pause=0.05)
    run_id = muster.detach("--max-steps", "40")
    muster.until_step(run_id, 3, members=2)
    assert lab["b"].pids(HUB) and not lab["a"].pids(HUB)
    ended = muster.wait_for_end(run_id)
    assert ended.returncode == 0, ended.stderr
    assert muster.metadata(run_id)["metrics"]["lost_members"] == []
    assert [ours(host) + host.pids(HUB) for host in lab] == [[], []]
    assert not list(lab["b"].files.glob(".cache/muster/runs/*"))


def test_a_killed_coordinator_is_started_again_there(lab: Lab, tmp_path: Path) -> None:
    muster = Muster(tmp_path, lab.hosts_file, pause=0.05)
    run_id = muster.detach("--max-steps", "400", "--lease", "6")
    muster.until_step(run_id, 3, members=2)
    killed = lab["b"].pids(HUB)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: lab["b"].pids(HUB) not in ([], killed))
    before = muster.losses(run_id)[-1][0]
    muster.until_step(run_id, before + 20, members=2)
    assert muster.run("stop", run_id).returncode == 0
    assert muster.metadata(run_id)["metrics"]["lost_members"] == []
    assert [ours(host) + host.pids(HUB) for host in lab] == [[], []]
