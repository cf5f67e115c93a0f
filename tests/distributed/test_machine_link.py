"""What a machine says to our programs' questions may be anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_connection import Says

from distributed.agent.files import probe
from distributed.agent.requests import ProbeMachine
from distributed.cleaning.clean import leftovers
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import HereConnection, MachineLink, document
from distributed.ssh.errors import Dropped, RemoteFileError, SshError
from distributed.ssh.process import MAX_LINE

BOX = Machine(name="box", address="localhost", python=sys.executable)


@pytest.mark.slow
@given(st.binary() | st.recursive(st.none() | st.integers(), st.lists).map(lambda found: json.dumps(found).encode()))
@example(b"[" * 100_000)
@example(b"\xff\xfe{}")
def test_any_answer_is_read_or_refused(said: bytes) -> None:
    words = ""
    try:
        document("box", said)
    except SshError as error:
        words = error.message
    assert words.isprintable() and len(words) < 500


def test_a_python_that_prints_something_of_its_own_is_named() -> None:
    with pytest.raises(SshError, match=r"^box: its answer cannot be read: 'hello\\n\{\}'"):
        MachineLink(BOX, lambda: Says(b"hello\n{}")).probe([])


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    machine = BOX.model_copy(update={"python": str(tmp_path / "bin" / "python")})
    with pytest.raises(SshError, match=r"^box: no Python there"):
        MachineLink(machine, lambda: HereConnection("box")).probe([])


def test_a_driver_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program may hang for ten seconds each time."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = probe(tmp_path, ProbeMachine([]))
    assert (said["gpus"], said["gpu_memory"], said["gpu_bf16"]) == (0, 0, False)
    assert (tmp_path / "log").read_text() == "asked\n"


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"processes": 5}', b"[]"])
def test_no_answer_is_no_proof(answer: bytes) -> None:
    def dial(machine: Machine, *_: object) -> MachineLink:
        return MachineLink(machine, lambda: Says(answer))

    assert isinstance(leftovers(Hosts(machines=(BOX,)), "run-1", dial=dial)["box"], SshError)


def test_a_look_at_stderr_does_not_move_where_the_command_writes() -> None:
    process = HereConnection("box").stream(["sh", "-c", "echo one >&2; echo; read line; echo two >&2; echo"])
    process.read_line(60)
    assert process.stderr == b"one\n"
    process.write(b"go\n")
    process.read_line(60)
    assert process.stderr == b"one\ntwo\n"
    process.close()


def test_a_line_without_end_is_given_in_pieces() -> None:
    size = 2 * MAX_LINE + 1000
    with HereConnection("box").stream(["sh", "-c", f"head -c {size} /dev/zero; echo; echo end"]) as talkative:
        lines = list(talkative)
    assert b"".join(lines) == bytes(size) + b"\nend\n" and lines[-1] == b"end\n" and len(lines) > 2


def test_this_machine_tells_its_ends_as_others_do(tmp_path: Path) -> None:
    connection = HereConnection("box")
    assert connection.run(["sh", "-c", "kill -9 $$"]).returncode == 137
    with pytest.raises(Dropped, match="^box: /nowhere: No such file"):
        connection.stream(["/nowhere"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(RemoteFileError, match="^box: cannot write"):
        connection.put(b"x", str(tmp_path / "folder"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
