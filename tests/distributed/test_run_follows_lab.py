"""A machine of the profile that has another address now is found by its host key."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.muster_runs import Muster
from tests.lab import processes
from tests.lab.fixtures import MakeLab
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.terminal import CLI

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab("a", "b")


@pytest.fixture
def moved(lab: Lab) -> Iterator[str]:
    """The new address of b, which announces itself there and is known at its old one only."""
    host = lab["b"]
    network, _, number = host.address.rpartition(".")
    address = f"{network}.{int(number) + 100}"
    for change in (["del", f"{host.address}/24"], ["add", f"{address}/24"]):
        host.run(["ip", "addr", *change, "dev", "eth0"]).check_returncode()
    announcing = _announce(host)
    yield address
    processes.signal_all(host.pids("announce"), signal.SIGTERM)
    announcing.communicate()


def _announce(host: LabHost) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = host.popen([sys.executable, CLI, "announce"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert processes.read_line(process.stderr).startswith("announced as")
    return process


def test_an_address_that_changed_needs_no_edit(lab: Lab, moved: str, tmp_path: Path) -> None:
    before = lab.hosts_file.read_bytes()
    muster = Muster(tmp_path, lab.hosts_file)
    done = muster.run(*muster.train("--max-steps", "6", "--no-input"))
    assert done.returncode == 0, done.stderr
    assert f"b: found at {moved} by its host key" in done.stderr
    assert lab.hosts_file.read_bytes() == before
    (folder,) = (tmp_path / "output").iterdir()
    assert muster.metadata(folder.name[:20])["metrics"]["lost_members"] == []
