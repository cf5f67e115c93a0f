"""A program on a terminal of its own that can only print, as a person with a screen reader has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

_BEGIN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
PATIENCE = 120.0


class OwnTerminal:
    """A Python program on a dumb terminal, 80 columns wide.

    Args:
        words: script and arguments.
        folder: where it runs.
    """

    def __init__(self, words: Sequence[str], folder: Path, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.screen = ""
        self._seen = 0

    def __enter__(self) -> OwnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def wait_for(self, text: str) -> None:
        """Read until ``text`` is on the screen, beyond what was waited for before."""
        self.wait_until(re.compile(re.escape(text)))

    def wait_until(self, pattern: re.Pattern[str]) -> None:
        end = time.monotonic() + PATIENCE
        while (match := pattern.search(self.screen, self._seen)) is None:
            assert self._read(end), f"no {pattern.pattern!r} in {self.screen!r}"
        self._seen = match.end()

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def interrupt(self) -> None:
        """Press ctrl+c."""
        os.write(self._ours, b"\x03")

    def exit_code(self) -> int:
        end = time.monotonic() + PATIENCE
        while self._read(end):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, end: float) -> bool:
        if not select.select([self._ours], [], [], max(end - time.monotonic(), 0.0))[0]:
            return False
        with contextlib.suppress(OSError):  # the other side is closed
            data = os.read(self._ours, 65536)
            self.screen += data.decode(errors="replace")
            return bool(data)
        return False
