"""Processes and accounts of a lab's hosts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO

from tests.lab.spec import HostSpec
from tests.waiting import PATIENCE, until


def read_line(stream: IO[str], patience: float = PATIENCE) -> str:
    """Return the next line of a child's output; empty at its end.

    Raises:
        TimeoutError: no output within ``patience`` seconds.
    """
    ready, _, _ = select.select([stream], [], [], patience)
    if not ready:
        raise TimeoutError(f"a host did not start within {patience:.0f} s")
    return stream.readline().strip()


def only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def birth(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, to tell it from others with its PID; empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def in_namespace(init: int, texts: Collection[str]) -> list[int]:
    """Return the PIDs in the PID namespace of ``init``, without itself, whose command line contains one of ``texts``;
    all, where there are none."""
    if not init:
        return []
    namespace = os.readlink(f"/proc/{init}/ns/pid")
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if pid != init and os.readlink(f"/proc/{pid}/ns/pid") == namespace and has_one(command_line(pid), texts):
                found.append(pid)
    return sorted(found)


def has_one(line: str, texts: Collection[str]) -> bool:
    """Whether a command line contains one of these; also where there are none."""
    return not texts or any(text in line for text in texts)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def line_of(pid: int) -> str:
    """Return the command line of a process; empty if it is gone."""
    with contextlib.suppress(OSError):
        return command_line(pid)
    return ""


def until_it_runs(pids: Callable[[str], list[int]], command: str) -> int:
    """Return a host's process once it is the only match: a background shell takes a moment to become its command.

    Args:
        pids: the method of that name of the host.
        command: its whole command line.
    """

    def alone() -> list[int]:
        found = pids(command)
        return found if [line_of(pid) for pid in found] == [command] else []

    return until(alone)[0]


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to processes; those that are gone are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(pid: int, number: int = signal.SIGKILL, patience: float = PATIENCE) -> None:
    """Send a signal to a process and wait until it is gone or a zombie."""
    started = birth(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    limit = time.monotonic() + patience
    while started and birth(pid) == started and not is_dead(pid):
        if time.monotonic() > limit:
            raise TimeoutError(f"process {pid} does not end")
        time.sleep(0.005)


def kill_now(init: int) -> None:
    """Kill process 1 of a host; the kernel kills its other processes and waits for them."""
    end(init)


def is_dead(pid: int) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True


def bury(process: subprocess.Popen[str]) -> None:
    """Close a child's pipes and wait for its end, or kill it after 10 seconds."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_accounts(folder: Path, spec: HostSpec) -> None:
    """Write a host's passwd and shadow: this machine's accounts, with the host's shell and password for root."""
    lines = Path("/etc/passwd").read_text().splitlines()
    root = f"root:x:0:0:root:/root:{spec.shell}"
    (folder / "passwd").write_text("\n".join([root, *(x for x in lines if not x.startswith("root:"))]) + "\n")
    names = [line.partition(":")[0] for line in lines if not line.startswith("root:")]
    secret = _hash_password(spec.password) if spec.password else "*"
    shadow = [f"root:{secret}:{spec.shadow_ages}:", *(f"{name}:*:19000:0:99999:7:::" for name in names)]
    (folder / "shadow").write_text("\n".join(shadow) + "\n")
    (folder / "shadow").chmod(0o600)


def _hash_password(password: str) -> str:
    command = ["openssl", "passwd", "-6", "-stdin"]
    return subprocess.run(command, input=password, capture_output=True, text=True, check=True).stdout.strip()
