"""A real program in a real pseudo-terminal: what it writes, byte by byte, and what it answers with."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from types import TracebackType

from tests.lab.host import REPOSITORY
from tests.waiting import PATIENCE

ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[PX^_].*?\x1b\\|\x1b[@-Z\\-_=>78]")
_STYLE = re.compile(rb"\x1b\[([0-9;:]*)m")
_PLAIN = {0, 1, 2, 3, 4, 5, 7, 8, 9, 21, 22, 23, 24, 25, 27, 28, 29, 53, 55}
"""Parameters of SGR that are no colours."""


class Terminal:
    """A program in a terminal of so many columns and lines."""

    def __init__(self, *words: str, width: int = 80, height: int = 24, environment: Mapping[str, str] = {}) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM")}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, cwd=REPOSITORY, start_new_session=True,
            env={**kept, "TERM": "xterm-256color", **environment},
        )  # fmt: skip
        os.close(slave)
        self.written = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def hang_up(self) -> None:
        """Go away, as a window that is closed; the program may go on."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDONLY)

    def until(self, text: str, patience: float = PATIENCE) -> float:
        """Read until a text was written; return the seconds since the start."""
        wanted, end = text.encode(), time.monotonic() + patience
        while wanted not in ESCAPE.sub(b"", self.written):
            assert time.monotonic() < end, f"waited for {text!r}: {self.words[-2000:]}"
            self._read(0.2)
        return time.monotonic() - self.began

    def written_since(self, text: str, mark: int, patience: float = PATIENCE) -> float:
        """Read until a text was written after ``mark`` bytes; return the seconds that took."""
        begin = time.monotonic()
        while text.encode() not in ESCAPE.sub(b"", self.written[mark:]):
            assert time.monotonic() - begin < patience, f"waited for {text!r}: {self.words[-2000:]}"
            self._read(0.05)
        return time.monotonic() - begin

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self, patience: float = PATIENCE) -> int:
        """Read until the program ends; return its exit code."""
        end = time.monotonic() + patience
        while self.process.poll() is None:
            assert time.monotonic() < end, f"waited for the end: {self.words[-2000:]}"
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    @property
    def words(self) -> str:
        """Everything that was written, without escape codes."""
        return ESCAPE.sub(b"", self.written).decode(errors="replace")

    @property
    def colours(self) -> list[bytes]:
        """Every style code that sets a colour, those for the default colours too."""
        codes = (match.group(1) for match in _STYLE.finditer(self.written))
        return [code for code in codes if any(int(part or 0) not in _PLAIN for part in re.split(rb"[;:]", code))]

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            time.sleep(0.01)
            return False
        self.written += data
        return bool(data)
