"""The box in which programs of others run: real ones, which try to leave it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.joining.lending import box as box_module
from distributed.joining.lending.box import Bubblewrap, NoBox, Program, ProgramBox, box_for, sandbox_profile
from distributed.joining.lending.box_check import require_box
from distributed.joining.lending.resting import freeze, thaw
from distributed.joining.lending.terms import LendingTerms
from tests.distributed.joining import needs_box
from tests.distributed.muster_runs import REPOSITORY
from tests.preloaded.python import python_itself
from tests.waiting import until

pytestmark = [pytest.mark.slow, needs_box]
FRIEND = LendingTerms("friend")


@pytest.fixture(autouse=True)
def _real_python(monkeypatch: pytest.MonkeyPatch, joining_config: Path) -> None:
    """A preloaded copy of a process would not be in the box."""
    monkeypatch.setattr(sys, "executable", python_itself())


@pytest.fixture
def box(tmp_path: Path) -> Iterator[ProgramBox]:
    made = box_for(FRIEND, tmp_path / "box", "pool/token", "pool")
    yield made
    made.close()


def result(box: ProgramBox, argv: Sequence[str]) -> tuple[int, str]:
    """Run a program in a box; return its exit code and all that it writes."""
    program = box.popen(argv)
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    with program.stdin, program.stdout, program.stderr:
        program.stdin.close()
        output = program.stdout.read() + program.stderr.read()
    return program.wait(), output.decode()


def exit_code(program: Program) -> int:
    """Close the streams of a program that ends, and return its exit code."""
    for stream in (program.stdin, program.stdout, program.stderr):
        assert stream is not None
        stream.close()
    return program.wait()


@pytest.mark.parametrize("lend", ["tasks", "friend"])
def test_the_box_of_this_computer_holds(lend: Any) -> None:
    require_box(LendingTerms(lend))


def test_a_box_with_a_hole_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Bubblewrap._command
    hole = ["--bind", "/", "/", "--bind", "/home", "/home", "--share-net"]
    monkeypatch.setattr(box_module, "HOME", Path("/tmp"))
    monkeypatch.setattr(Bubblewrap, "_command", lambda self: [*command(self)[:-2], *hole])
    with pytest.raises(NoBox, match="read a file of its owner, list the owner's folder, write outside") as refused:
        require_box(FRIEND)
    assert "reach" in refused.value.message


def test_without_bubblewrap_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoBox, match="bubblewrap is not installed"):
        require_box(FRIEND)


def test_a_system_that_forbids_the_box_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bubblewrap, "_command", lambda self: ["sh", "-c", "echo bwrap: No permissions >&2; exit 1"])
    with pytest.raises(NoBox, match="bwrap: No permissions"):
        require_box(FRIEND)


def test_only_its_own_folder_can_be_written(box: ProgramBox) -> None:
    assert result(box, ["sh", "-c", "echo hello > ~/note && cat ~/note"]) == (0, "hello\n")
    for path in ("/usr/x", "/x", "/home/x", str(REPOSITORY / "training" / "x.py")):
        assert result(box, ["touch", path])[0] != 0


def test_neither_home_nor_the_runs_of_a_clone_are_there(box: ProgramBox) -> None:
    code, text = result(box, ["sh", "-c", f"ls -A / {REPOSITORY} ~; env"])
    assert code == 0
    assert not {"etc/shadow", "output", "config.ini", ".git", "tests", "mnt"} & set(text.split())
    assert "XDG_CONFIG_HOME" not in text and "HOME=/home/lent" in text


def test_no_other_process_is_seen(box: ProgramBox) -> None:
    _, text = result(box, ["sh", "-c", "ls /proc"])
    assert len([word for word in text.split() if word.isdecimal()]) < 8


def test_a_loopback_port_leads_to_who_made_the_box_alone(box: ProgramBox) -> None:
    with box.listen(0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            box.listen(port)
        with pytest.raises(ConnectionRefusedError):  # it is not this computer's port
            socket.create_connection(("127.0.0.1", port), timeout=5)
        words = f"import socket; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'hi')"
        program = box.popen(["python3", "-c", words])
        stream, _ = listener.accept()
        with stream:
            assert stream.recv(2) == b"hi"
        assert exit_code(program) == 0


def test_memory_and_cores_are_bounded(tmp_path: Path) -> None:
    bounded = box_for(LendingTerms("friend", memory=1 << 30, cores=1), tmp_path, "pool/token", "pool")
    try:
        script = "import os; print(len(os.sched_getaffinity(0))); bytearray(2 << 30)"
        code, text = result(bounded, ["python3", "-c", script])
        assert code == 1 and text.startswith("1\n") and "MemoryError" in text
    finally:
        bounded.close()


def test_everything_ends_with_it_also_what_hides(box: ProgramBox) -> None:
    result(
        box,
        [
            "sh",
            "-c",
            "setsid sleep 1000 < /dev/null > /dev/null 2>&1 & env -i setsid sleep 1000 < /dev/null > /dev/null 2>&1 &",
        ],
    )
    ran = until(lambda: [one for one in box.processes() if one.name() == "sleep"])
    box.close()
    until(lambda: not any(one.is_running() for one in ran))
    assert result(box, ["true"])[0] == 0  # the next one has a new box


def test_it_ends_with_who_made_it_however_that_ends(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from distributed.joining.lending.box import box_for
from distributed.joining.lending.terms import LendingTerms
box = box_for(LendingTerms("friend"), Path({str(tmp_path)!r}), "pool/token", "pool")
box.popen(["sleep", "1000"])
while len(box.processes()) < 4:
    time.sleep(0.01)
print(*[one.pid for one in box.processes()], flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as maker:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        maker.send_signal(signal.SIGKILL)
    assert len(pids) >= 4
    until(lambda: not any(map(psutil.pid_exists, pids)))


def test_it_stands_still_and_goes_on(box: ProgramBox) -> None:
    program = box.popen(["sh", "-c", "while :; do :; done"])
    until(lambda: any(one.name() == "sh" for one in box.processes()))
    freeze(box.processes())
    until(lambda: {one.status() for one in box.processes()} == {psutil.STATUS_STOPPED})
    thaw(box.processes())
    until(lambda: psutil.STATUS_STOPPED not in {one.status() for one in box.processes()})
    box.close()
    assert exit_code(program) == 137


def test_the_profile_of_macos_names_what_may_be_written_and_nothing_else() -> None:
    profile = sandbox_profile(Path("/Users/ada/Library/Caches/muster/lent/1"), ["/opt/python"])
    assert "(deny default)" in profile
    writes = [line for line in profile.splitlines() if "file-write" in line]
    assert len(writes) == 1 and writes[0].count("subpath") == 1
    assert '(subpath "/Users"' not in profile and "localhost" in profile and "(allow network-outbound)" not in profile
