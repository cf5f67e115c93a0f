"""A code alone finds the computer that shares it: real multicast, two sharers, a stranger with the same number."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.distributed.joining import PROGRAM
from tests.lab import processes
from tests.lab.fixtures import MakeLab
from tests.lab.host import REPOSITORY, LabHost
from tests.lab.spec import HostSpec

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]
SPEAKER = Path(__file__).with_name("mdns_speaker.py")
_FOLDER = "XDG_CONFIG_HOME=/root/.config"
MEET = """
import sys
from distributed.joining.dialling import Meeting
from distributed.joining.pairing.codes import parse_code
from distributed.joining.pairing.introductions import introduce
from distributed.joining.pools import helper_identity, joined_pools
from profiles.errors import MachinesNotReady

key = helper_identity()
meeting = Meeting(parse_code(sys.argv[1]), sys.argv[2], key, introduce(key.public, name="b"))
print("met", flush=True)
sys.stdin.readline()
try:
    meeting.agree(lambda pool: True)
except MachinesNotReady as error:
    print(error.message, joined_pools(), flush=True)
"""


@contextlib.contextmanager
def started(host: LabHost, words: Sequence[str], **streams: int) -> Iterator[subprocess.Popen[str]]:
    process = host.popen(["env", _FOLDER, *words], text=True, **{"stdin": subprocess.DEVNULL, **streams})
    try:
        yield process
    finally:
        process.kill()  # what it has started ends with the host, and holds the other ends until then
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()


@contextlib.contextmanager
def shared(host: LabHost) -> Iterator[str]:
    """Share a code on a host; yield it."""
    words, nothing = [*PROGRAM, "share", "--yes"], subprocess.DEVNULL
    with started(host, words, stdout=subprocess.PIPE, stderr=nothing) as process:
        assert process.stdout is not None
        yield processes.read_line(process.stdout)


def join(host: LabHost, code: str, until: str) -> list[str]:
    """Type a code on a host as a person does; return what is said up to a line that contains ``until``."""
    lines: list[str] = []
    words = [*PROGRAM, "join", "--yes", "--lend", "own", *code.upper().split("-")]
    with started(host, words, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while not (lines and until in lines[-1]):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
    return lines


def test_a_code_alone_finds_the_computer_that_shares_it(make_lab: MakeLab) -> None:
    lab = make_lab(*(HostSpec(name, sshd=False) for name in "abc"))
    nobody = join(lab["c"], "17-acid-acid-acid", "hint:")
    assert "no computer on this network shares a code with number 17" in nobody[-2] and "--at ADDRESS" in nobody[-1]
    pipe = subprocess.PIPE
    with shared(lab["a"]), shared(lab["b"]) as code:
        slot = code.partition("-")[0]
        announcing = [sys.executable, str(SPEAKER), "share", slot, lab["a"].address]
        with started(lab["a"], announcing, stdin=pipe, stdout=pipe) as stranger:
            assert stranger.stdout is not None and processes.read_line(stranger.stdout) == "ready"
            assert "connected to b" in join(lab["c"], code, "connected to")[-1]


def test_a_cable_that_is_pulled_between_code_and_yes_ends_both_sides(make_lab: MakeLab) -> None:
    lab = make_lab(HostSpec("a", sshd=False), HostSpec("b", sshd=False))
    pipe = subprocess.PIPE
    with started(lab["a"], [*PROGRAM, "share", "--yes"], stdout=pipe, stderr=pipe) as sharing:
        assert sharing.stdout is not None and sharing.stderr is not None
        code = processes.read_line(sharing.stdout)
        words = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", MEET, code, lab["a"].address]
        with started(lab["b"], words, stdin=pipe, stdout=pipe) as joining:
            assert joining.stdin is not None and joining.stdout is not None
            assert joining.stdout.readline() == "met\n"
            lab["b"].cut()
            joining.stdin.write("yes\n")
            joining.stdin.flush()
            assert "no machine has joined: b has gone before it had joined" in sharing.stderr.read()
            assert "cannot reach a door there" in (outcome := joining.stdout.readline()) and "[]" in outcome
