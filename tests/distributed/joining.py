"""A computer that shares a code and machines that join it, through the real command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.hosts.joined import ask_door, door_socket, joining_folder
from distributed.joining.door import Door
from distributed.joining.pairing.codes import parse_code
from distributed.joining.pairing.frames import json_line
from tests.distributed.muster_runs import REPOSITORY
from tests.waiting import PATIENCE

PROGRAM = [sys.executable, str(REPOSITORY / "cli_typer.py"), "machines"]
_CODE = re.compile(r"\d+(?:-[a-z]+){3}$")
needs_box = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bwrap") is None,
    reason="bubblewrap is not installed (Debian, Ubuntu: apt install bubblewrap)",
)
"""Marks a test that runs programs in the box of Linux."""
Spawn = Callable[[Sequence[str]], "subprocess.Popen[str]"]


def free_port() -> int:
    with socket.create_server(("0.0.0.0", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for a Unix socket below it."""
    folder = Path(tempfile.mkdtemp(prefix="mu"))
    try:
        yield folder
    finally:
        end_door(folder)
        shutil.rmtree(folder, ignore_errors=True)


def end_door(config: Path) -> None:
    """End the door of a configuration folder, if one runs."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        psutil.Process(int((config / "muster" / "joining" / "door.lock").read_text())).kill()


class RunningDoor:
    """A door of this process, on a loopback port."""

    def __init__(self) -> None:
        joining_folder()
        self._network = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._user = socket.socket(socket.AF_UNIX)
        door_socket().unlink(missing_ok=True)
        self._user.bind(str(door_socket()))
        self._user.listen(16)
        for listener in (self._network, self._user):
            listener.setblocking(False)
        self.port = int(self._network.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(self._loop):
            self._task = self._loop.create_task(self._run())
            self._loop.run_until_complete(self._task)

    async def _run(self) -> None:
        try:
            self.state = Door()
            self.state._busy = math.inf  # a test may be slower than the minute after which an idle door ends
            await self.state.run(self._network, self._user)
        finally:
            others = asyncio.all_tasks() - {self._task}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)  # transports close in the next turn

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._network.close()
        self._user.close()

    def dial(self, first: bytes = b"", host: str = "") -> socket.socket:
        """Return a connection of a stranger that has sent something.

        Args:
            host: loopback address that it comes from.
        """
        source = (host, 0) if host else None
        stream = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE, source_address=source)
        stream.sendall(first)
        return stream


class Sharer:
    """A command that shares a code at a running door, and admits who knows it unless told otherwise."""

    def __init__(self) -> None:
        self._stream = ask_door({"share": True}, start=False)
        self._lines = self._stream.makefile("rb")
        self.code = parse_code(self.next()["code"])

    def next(self) -> dict[str, Any]:
        return dict(json.loads(self._lines.readline() or b"{}"))

    def admit(self, admitted: bool = True) -> dict[str, Any]:
        """Answer the question that comes next; return the last event."""
        assert self.next()["asks"]["name"] == "studio"
        self.send(admitted)
        return self.next()

    def send(self, admitted: bool) -> None:
        self._stream.sendall(json_line({"admit": admitted}))

    def close(self) -> None:
        self._lines.close()
        self._stream.close()


class SharedCode:
    """``muster machines share`` while it waits, with its code."""

    def __init__(self, *options: str) -> None:
        pipe = subprocess.PIPE
        words = [*PROGRAM, "share", "--yes", *options]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = _CODE.match(line)
        assert match, line + self.process.communicate()[1]
        self.code = match[0]

    def finish(self) -> tuple[int, str]:
        """Return its exit code and what it has written after the code."""
        stdout, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stdout + stderr


class JoinedProcess:
    """``muster machines join`` while it runs.

    Args:
        spawn: starts a command where the machine is, with pipes.
        code: is typed.
    """

    def __init__(self, spawn: Spawn, code: str, *arguments: str) -> None:
        self.process = spawn([*PROGRAM, "join", "--yes", "--lend", "own", *arguments])
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code}\n")
        self.process.stdin.flush()

    def finish(self) -> str:
        """Wait for its end; return what it has written."""
        return self.process.communicate(timeout=300)[1]
