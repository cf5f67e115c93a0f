"""The real set-up in a terminal of one host, real machines on the network of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.lab import processes
from tests.lab.host import REPOSITORY, LabHost
from tests.lab.lab import Lab
from tests.lab.spec import LabUnavailable
from tests.screens.terminal import Terminal

pytestmark = pytest.mark.lab
SET_UP = """
import sys
from app.screens.app import run_wizard
from app.wizard.real_services import RealServices
sys.exit(run_wizard(RealServices(), "", False))
"""
START = 40.0
"""Seconds for a Python process to start on a busy machine."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        with Lab("desk", "studio") as built:
            yield built
    except LabUnavailable as error:
        pytest.skip(str(error))


def announce(host: LabHost) -> subprocess.Popen[str]:
    words = [sys.executable, str(REPOSITORY / "cli_typer.py"), "announce"]
    process = host.popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    processes.read_line(process.stderr, START)
    return process


def test_a_machine_shows_when_it_announces_itself_and_is_offline_when_it_is_killed(lab: Lab) -> None:
    words = lab["desk"].command([sys.executable, "-c", SET_UP], str(REPOSITORY))
    with Terminal(*words, width=100, height=30) as terminal:
        terminal.until("New set-up", START)
        terminal.press("n")
        terminal.until("desk (here)", START)
        mark = len(terminal.written)
        announcer = announce(lab["studio"])
        assert terminal.written_since("studio", mark) < 2.5
        terminal.written_since("online", mark)
        mark = len(terminal.written)
        for pid in lab["studio"].pids("announce"):
            os.kill(pid, signal.SIGKILL)
        lab["studio"].stop_sshd()
        assert terminal.written_since("offline", mark) < 10.0
        announcer.wait()
        terminal.press("\x03")
        assert terminal.end() == 130
    for stream in (announcer.stdin, announcer.stderr):
        if stream is not None:
            stream.close()
