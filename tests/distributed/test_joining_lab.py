"""A machine without SSH server, behind a firewall that lets nobody in, joins by a code and trains like the others."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from distributed.hosts.file import save_hosts
from distributed.hosts.joined import door_status, joined_machines
from distributed.hosts.schema import Hosts, Machine
from tests.distributed.joining import PROGRAM, JoinedProcess, SharedCode, free_port
from tests.distributed.muster_runs import Muster, ours
from tests.lab.fixtures import MakeLab
from tests.lab.host import LabHost
from tests.lab.lab import Lab
from tests.lab.spec import HostSpec, LabUnavailable
from tests.waiting import until
from training.records.events import WarningEvent

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]
FIREWALL = "iptables -P INPUT DROP && iptables -A INPUT -i lo -j ACCEPT && iptables -A INPUT -p tcp ! --syn -j ACCEPT"
"""Nobody outside can open a connection."""


def joined(lab: Lab, host: LabHost, port: int) -> JoinedProcess:
    """Let a host of the lab that accepts no connection join this machine."""
    if shutil.which("iptables") is None:
        raise LabUnavailable("iptables is not installed (Debian, Ubuntu: apt install iptables)")
    host.run(["sh", "-c", FIREWALL], check=True)
    with pytest.raises(TimeoutError):  # not refused, as by a machine without sshd alone
        socket.create_connection((host.address, 22), timeout=0.5)
    shared = SharedCode("--port", str(port))

    def spawn(words: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return host.popen(words, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True)

    process = JoinedProcess(spawn, shared.code, "--at", f"{lab.address}:{port}", "--name", host.name)
    code, output = shared.finish()
    assert code == 0, output
    assert shared.code not in process_list()
    return process


def warnings(muster: Muster, run_id: str) -> list[str]:
    return [event.message for event in muster.events(run_id) if isinstance(event, WarningEvent)]


def process_list() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_it_trains_beside_others_returns_after_a_cut_and_leaves(
    make_lab: MakeLab, tmp_path: Path, joining_config: Path
) -> None:
    lab = make_lab("a", HostSpec("b", sshd=False))
    host = lab["b"]
    port = free_port()
    process = joined(lab, host, port)
    machine = Machine(name="b", address="b.joined", python=sys.executable)
    save_hosts(Hosts(machines=(*lab.hosts("a").machines, machine), ssh_config=str(lab.ssh_config)), lab.hosts_file)
    muster = Muster(tmp_path, lab.hosts_file, gate=lab.folder / "gate")
    try:
        muster.let_pass(5)
        run_id = muster.detach("--max-steps", "20", "--lease", "30")
        muster.until_step(run_id, 5, members=2)
        since = door_status()["b"]["since"]
        host.run(["ss", "--kill", "dport", "=", f":{port}"], check=True)  # its line, and the sessions of the run
        until(lambda: door_status().get("b", {}).get("since", since) != since)
        until(lambda: "b: reconnected" in warnings(muster, run_id))
        muster.let_pass(20)
        ended = muster.wait_for_end(run_id)
        assert ended.returncode == 0, ended.stderr
        assert "b: reconnected" in warnings(muster, run_id)
        assert (muster.folder_of(run_id) / "model" / "model.safetensors").is_file()
        muster.let_pass(5)
        run_id = muster.detach("--max-steps", "20", "--lease", "30")
        muster.until_step(run_id, 5, members=2)
        left = host.run([*PROGRAM, "leave"])
        assert left.returncode == 0, left.stderr
        assert "has left" in process.finish()
        assert ours(host) == []
        muster.let_pass(20)
        assert muster.wait_for_end(run_id).returncode == 0
        assert muster.metadata(run_id)["metrics"]["lost_members"] == [1]
        assert joined_machines() == []
    finally:
        muster.leave_nothing()
