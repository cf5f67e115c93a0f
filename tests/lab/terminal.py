"""Runs the command line on a pseudo-terminal, as a user would."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

CLI = str(Path(__file__).parents[2] / "cli_typer.py")
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)


class Terminal:
    """A command on its own pseudo-terminal, 80 columns wide."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        words = [sys.executable, "-c", _OWN_TERMINAL, sys.executable, CLI, *arguments]
        self._process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(home), cwd=home, start_new_session=True
        )
        os.close(theirs)
        self.screen = ""
        self._text = codecs.getincrementaldecoder("utf-8")()
        """Incremental, as a character may arrive in two pieces."""
        self._seen = 0

    def wait_for(self, text: str, patience: float = 120.0) -> None:
        """Read until ``text`` appears on the screen after the previous match."""
        end = time.monotonic() + patience
        while (place := self.screen.find(text, self._seen)) < 0:
            if not self._read(end):
                self._process.kill()
                raise AssertionError(f"exit code {self.exit_code()}, no {text!r} in {self.screen!r}")
        self._seen = place + len(text)

    def _read(self, end: float) -> bool:
        if not select.select([self._ours], [], [], max(end - time.monotonic(), 0.0))[0]:
            return False
        with contextlib.suppress(OSError):  # the other end is closed
            data = os.read(self._ours, 65536)
            self.screen += self._text.decode(data)
            return bool(data)
        return False

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._ours, b"\x03")

    def exit_code(self) -> int:
        end = time.monotonic() + 120.0
        while self._read(end):
            pass
        os.close(self._ours)
        return self._process.wait(60)


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "NO_COLOR": "1"}
