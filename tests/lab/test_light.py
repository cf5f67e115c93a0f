"""Tests of the light lab: the lab's interface without root, and its cleanup."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.hosts.file import load_hosts
from distributed.ssh.connection import SshConnection, SshTarget
from tests.lab import keeper
from tests.lab.host import REPOSITORY
from tests.lab.light import LightLab
from tests.lab.processes import until_it_runs
from tests.lab.spec import HostSpec, LabUnavailable
from tests.waiting import until

MakeLightLab = Callable[..., LightLab]


def left_over(folder: Path) -> list[object]:
    return [*keeper.marked(f"{folder.name}-"), *keeper.servers(f"{folder}/"), *([folder] if folder.exists() else [])]


@pytest.mark.slow
def test_hosts_have_homes_of_their_own_and_a_hosts_file(make_light_lab: MakeLightLab) -> None:
    lab = make_light_lab("a", "b")
    hosts = load_hosts(lab.hosts_file)
    for name in ("a", "b"):
        with SshConnection.connect(SshTarget.of(hosts.machine(name), hosts)) as connection:
            connection.put(name.encode(), "~/name")
            assert connection.run(["sh", "-c", "cd; cat name"]).stdout == name.encode()
    assert (lab["a"].files / "name").read_text() == "a"


def test_what_only_the_full_lab_can_is_refused() -> None:
    with pytest.raises(LabUnavailable, match="use Lab"):
        LightLab(HostSpec("a", cores=0.5))


@pytest.mark.slow
def test_a_killed_host_ends_with_all_it_runs_and_boots_again(make_light_lab: MakeLightLab) -> None:
    lab = make_light_lab("a", "ab")
    with SshConnection.connect(lab.target("a")) as a, SshConnection.connect(lab.target("ab")) as other:
        a.run(["sh", "-c", "nohup sleep 84.5 >/dev/null 2>&1 &"])
        other.run(["sh", "-c", "nohup sleep 84.5 >/dev/null 2>&1 &"])
        for host in lab:
            until_it_runs(host.pids, "sleep 84.5")
        lab["a"].kill()
        assert lab["a"].pids() == []
        assert len(lab["ab"].pids("sleep 84.5")) == 1
    lab["a"].boot()
    SshConnection.connect(lab.target("a")).close()


@pytest.mark.slow
def test_nothing_is_left_after_the_end(make_light_lab: MakeLightLab) -> None:
    lab = make_light_lab("a")
    with SshConnection.connect(lab.target("a")) as a:
        a.run(["sh", "-c", "nohup setsid sleep 85.5 >/dev/null 2>&1 &"])
        until_it_runs(lab["a"].pids, "sleep 85.5")
        lab["a"].cut()
        assert len(left_over(lab.folder)) >= 3
        lab.close()
    assert left_over(lab.folder) == []


OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.lab.light import LightLab
lab = LightLab("a")
print(lab.folder, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_light_lab_does_not_outlive_a_killed_owner(make_light_lab: MakeLightLab) -> None:
    make_light_lab("probe")
    command = [sys.executable, "-c", OWNER, str(REPOSITORY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert left_over(folder)
        owner.kill()
    until(lambda: not left_over(folder))
