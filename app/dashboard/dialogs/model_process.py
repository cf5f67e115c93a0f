"""The processes that run models for the dashboard: each ends at once, with all its children, when it is not needed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import IO, Any, cast

from app.console import visible
from profiles.errors import BadInput
from profiles.installation import program_words


def start_group(
    command: Sequence[str], stderr: int, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    """Start a process that reads and writes lines, in a process group of its own."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        env={**os.environ, **variables},
    )


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process of :func:`start_group` and its children, which have nothing to save."""
    with contextlib.suppress(OSError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)


class ModelProcess:
    """Answers commands in one process (``serve``), which keeps their models loaded; the first command starts it.

    Args:
        command: of the process; empty: this program's.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command or [*program_words(), "serve"]
        self.stage = "its process starts"
        """The newest line that it wrote for a person."""
        self.closed = False
        self._changing = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._folder: TemporaryDirectory[str] | None = None

    def ask(self, *words: str) -> dict[str, Any]:
        """Return the JSON document of a command.

        Raises:
            BadInput: it failed, or the process has ended.
        """
        process = self._started()
        with contextlib.suppress(OSError):  # it has ended; its last line says why
            stdin = cast(IO[str], process.stdin)
            stdin.write(json.dumps(words) + "\n")
            stdin.flush()
        document = self._answer(cast(IO[str], process.stdout))
        if "error" in document:
            raise BadInput(document["error"]["message"], document["error"]["hint"])
        return document

    def file(self, name: str, content: bytes) -> Path:
        """Write a file for a command; it is removed when this is closed."""
        self._started()
        path = Path(cast(TemporaryDirectory[str], self._folder).name, name)
        path.write_bytes(content)
        return path

    def close(self) -> None:
        """End the process with all its children, and remove its files."""
        with self._changing:
            self.closed = True
            self._end()
            if self._folder is not None:
                self._folder.cleanup()

    def _started(self) -> subprocess.Popen[str]:
        with self._changing:
            if self.closed:
                raise BadInput("its process was ended")
            self._folder = self._folder or TemporaryDirectory(prefix="muster-")
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._process is None:
                variables = {"TMPDIR": self._folder.name, "PYTHONWARNINGS": "ignore"}
                self._process = start_group(self._command, subprocess.STDOUT, variables)
            return self._process

    def _end(self) -> None:
        if self._process is not None:
            kill_group(self._process)
            with contextlib.suppress(OSError), self._process:  # waits, and closes its pipes
                self._process = None

    def _answer(self, lines: IO[str]) -> dict[str, Any]:
        with contextlib.suppress(ValueError):  # its pipes were closed meanwhile
            for line in lines:
                if (document := _document(line)) is not None:
                    return document
                self.stage = line.strip() or self.stage
        raise BadInput(f"the model cannot be asked: {visible(self.stage)}")


def _document(line: str) -> dict[str, Any] | None:
    """Return the document of a command, if the line holds one."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) and "exit_code" in document else None
