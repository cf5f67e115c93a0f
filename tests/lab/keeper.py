"""Ends a light lab when its owner exits, even if killed: ``python keeper.py FOLDER``, with stdin held by the owner.

Its processes are recognised by two marks: sshd servers have the lab's folder on their command line, and processes
started by sessions have the lab's name in their environment.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "MUSTER_LAB_HOST"
_PATIENCE = 60.0  # the file is also run by path, where nothing can be imported from tests


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes whose environment has a host mark that starts with ``mark``."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK, "").startswith(mark):
                yield process


def servers(config: str) -> Iterator[psutil.Process]:
    """Yield the sshd servers with this configuration on their command line, and the processes of their connections."""
    for process in psutil.process_iter():
        if config in command_line(process) and "sshd" in command_line(process):
            yield process
            with contextlib.suppress(psutil.Error):
                yield from (child for child in process.children(recursive=True) if "sshd" in command_line(child))


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def end(config: str, mark: str) -> None:
    """Kill the servers first, so that no new session starts, then all processes started by sessions."""
    limit = time.monotonic() + _PATIENCE
    while found := [process for process in (*servers(config), *marked(mark)) if _alive(process)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.2)
        if time.monotonic() > limit:
            raise TimeoutError(f"processes {[process.pid for process in found]} do not end")


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end_lab(folder: Path) -> None:
    """End all hosts of a lab and remove its files."""
    end(f"{folder}/", f"{folder.name}-")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.read()
    end_lab(Path(sys.argv[1]))
