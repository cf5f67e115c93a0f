"""The way to a machine through another one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Hosts, Machine
from tests.distributed.muster_runs import Muster, ours
from tests.lab import processes
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab
from tests.waiting import until
from training.records.events import MemberEvent, WarningEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]


def config_with_jump(lab: Lab, folder: Path) -> Path:
    """Return an ssh configuration in which b is reached through a."""
    path = folder / "ssh_config"
    path.write_text(lab.ssh_config.read_text().replace("Host b ", "Host b jumped\n  ProxyJump a\nHost b "))
    return path


def test_a_machine_behind_a_jump_host_reaches_the_coordinator_through_ssh(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab("a", "b")
    machines = tuple(Machine(name=name, python=sys.executable) for name in ("a", "b"))
    hosts = Hosts(machines=machines, ssh_config=str(config_with_jump(lab, tmp_path)))
    save_hosts(hosts, tmp_path / "hosts.json")
    lab["b"].run(["ip", "route", "add", "blackhole", f"{lab.address}/32"], check=True)
    muster = Muster(tmp_path, tmp_path / "hosts.json", pause=0.02)
    try:
        run_id = muster.detach("--max-steps", "5000")
        muster.until_step(run_id, 5, members=2)
        for pid in lab["b"].pids("sshd"):  # its sessions, and with them what they carry
            processes.end(pid)
        lab["b"].start_sshd()
        until(lambda: any("b: reconnected" in warning for warning in warnings(muster, run_id)))
        until(lambda: joined(muster, run_id) > 1)
        muster.until_step(run_id, muster.losses(run_id)[-1][0] + 20, members=2)
        assert muster.run("stop", run_id).returncode == 0
        assert [ours(host) for host in lab] == [[], []]
    finally:
        muster.leave_nothing()


def joined(muster: Muster, run_id: str) -> int:
    """Return how often b has come into the group."""
    events = muster.events(run_id)
    return sum(isinstance(e, MemberEvent) and (e.member, e.status) == (1, "joined") for e in events)


def warnings(muster: Muster, run_id: str) -> list[str]:
    return [event.message for event in muster.events(run_id) if isinstance(event, WarningEvent)]
