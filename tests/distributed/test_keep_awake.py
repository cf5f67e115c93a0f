"""Machines stay awake while they train, and may sleep afterwards; the platform's commands are stood in for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import system
from distributed.agent import machine_health
from tests.distributed.muster_runs import REPOSITORY
from tests.distributed.test_agent import Agents, agents
from tests.lab.processes import is_dead
from tests.waiting import until

__all__ = ["agents"]

KEEPS = 'echo "$$ $*" >> "$AWAKE"; exec sleep 600'
FAKES = {
    "caffeinate": KEEPS,
    "systemd-inhibit": 'case $* in *sleep:idle*) exit 1;; esac; echo "$$ $*" >> "$AWAKE"; eval "exec \\${$#}"',
}
"""The second is that of a system that refuses a session over SSH to stop it from being put to sleep. Linux may have the
first one, too: it is another program there."""

SUPERVISED = """
import os, sys, time
from distributed import supervisor
def run(path, lock=None):
    while not (os.path.exists(os.environ["AWAKE"]) and os.path.getsize(os.environ["AWAKE"])):
        time.sleep(0.02)
    return 0
supervisor.supervise_folder = run
sys.exit(supervisor.main())
"""
"""A supervisor whose run ends when the machine is kept awake."""


@pytest.fixture
def awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each command that kept this machine awake: its process and its words."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in FAKES.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("AWAKE", str(tmp_path / "awake"))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path / "awake"


def kept(awake: Path) -> tuple[int, str]:
    until(lambda: awake.exists() and awake.read_text().endswith("\n"))
    pid, words = awake.read_text().split(None, 1)
    return int(pid), words


@pytest.mark.slow
def test_a_machine_stays_awake_as_long_as_its_worker(agents: Agents, awake: Path) -> None:
    agents.start()
    attachment = agents.attach()
    pid, words = kept(awake)
    assert words.startswith("-ims -w " if sys.platform == "darwin" else "--what=idle ")
    attachment.say(n=1, worker={"command": "stop"})
    attachment.records(lambda record: "end" in record)
    assert not is_dead(pid)  # the model is still to be fetched
    attachment.say(n=2, bye=True)
    until(lambda: is_dead(pid))
    attachment.close()


@pytest.mark.slow
def test_the_machine_that_supervises_stays_awake(awake: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", SUPERVISED]
    done = subprocess.run(command, input=str(tmp_path).encode(), cwd=REPOSITORY, capture_output=True, timeout=60)
    assert done.returncode == 0
    pid, _ = kept(awake)
    until(lambda: is_dead(pid))


@pytest.mark.parametrize(
    ("platform", "name", "begin"),
    [("darwin", "caffeinate", "-ims -w "), ("linux", "systemd-inhibit, which prevents idle sleep", "--what=idle ")],
)
def test_each_system_has_its_program(
    platform: str, name: str, begin: str, awake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert machine_health.inhibitor() == name
    awake.unlink(missing_ok=True)
    process = system.keep_awake()
    assert process is not None
    _, words = kept(awake)
    assert words.startswith(begin)
    process.kill()
    process.communicate()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert machine_health.inhibitor() == ""
    assert system.keep_awake() is None
