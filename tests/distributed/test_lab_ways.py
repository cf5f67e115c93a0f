"""Ways to a machine: none at all (this one), direct, and through another one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.schema import Hosts, Machine
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]


def config_with_jump(lab: Lab, folder: Path) -> Path:
    """Return an ssh configuration in which b is reached through a."""
    path = folder / "ssh_config"
    path.write_text(lab.ssh_config.read_text().replace("Host b ", "Host b jumped\n  ProxyJump a\nHost b "))
    return path


@pytest.mark.parametrize("engine", ["mesh", "nccl"])
def test_this_machine_trains_along(make_lab: MakeLab, tmp_path: Path, engine: str) -> None:
    lab = make_lab("a")
    here = Machine(name="here", address="localhost", python=sys.executable, project_path=str(tmp_path / "muster"))
    save_hosts(Hosts(machines=(here, *lab.hosts().machines), ssh_config=str(lab.ssh_config)), tmp_path / "hosts.json")
    muster = Muster(tmp_path, tmp_path / "hosts.json")
    done = muster.run(*muster.train("--max-steps", "4", "--engine", engine))
    assert done.returncode == 0, done.stderr
    assert ours(lab["a"]) == []


def test_a_machine_behind_a_jump_host_reaches_the_coordinator_through_ssh(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab("a", "b")
    machines = tuple(Machine(name=name, python=sys.executable) for name in ("a", "b"))
    hosts = Hosts(machines=machines, ssh_config=str(config_with_jump(lab, tmp_path)))
    save_hosts(hosts, tmp_path / "hosts.json")
    lab["b"].run(["ip", "route", "add", "blackhole", f"{lab.address}/32"], check=True)
    muster = Muster(tmp_path, tmp_path / "hosts.json")
    done = muster.run(*muster.train("--max-steps", "4"))
    assert done.returncode == 0, done.stderr
    assert [ours(host) for host in lab] == [[], []]
