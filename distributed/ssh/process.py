"""A command that runs on another machine.

SSH gives the server one string, which the user's login shell parses: sh, bash, zsh, fish, csh, each with rules of its
own. So the words travel encoded (:func:`command_line`): letters, digits and a few marks as they are, every other byte
as ``\\0ooo``. The login shell sees three quoted words without quotes or dollars inside the last; a POSIX ``sh`` on the
far side decodes them.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from distributed.ssh.errors import CommandTimeout, Dropped, NoShell
from profiles.errors import BadInput

CHUNK = 64 * 1024
OUTPUT_LIMIT = 64 * 1024 * 1024
"""Bytes of output that are taken of a command."""
_BUFFERED = 4 * 1024 * 1024
"""Bytes of output kept for a slow reader; beyond them the far side waits."""
STDERR_KEPT = 64 * 1024
_NOISE_LIMIT = 256 * 1024
"""Bytes the login shell's start files may print before a command."""
_NO_SHELL_HINT = (
    "do the user's start files there end the shell (try: ssh USER@HOST true)? "
    "Else give it a login shell: sudo chsh -s /bin/sh USER"
)
MAX_LINE = 2 * 1024 * 1024
LIMIT = 100_000
"""Bytes of an encoded command; Linux refuses one argument of 128 KiB. Longer input belongs on stdin."""
_P = TypeVar("_P", bound="Process")
_PLAIN = re.compile(rb"[^A-Za-z0-9_@%+=:,./-]")


def encode(argv: Sequence[str]) -> str:
    """Encode a command's words; ``printf %b`` decodes them to a line for ``sh``."""
    line = " ".join(shlex.quote(word) for word in argv).encode("utf-8", "surrogateescape")
    return _PLAIN.sub(lambda match: b"\\0%03o" % match[0][0], line).decode("ascii")


def command_line(argv: Sequence[str], marker: str) -> str:
    """Return the string to send. It prints ``marker`` on a line of stdout and then runs ``argv``.

    Whatever stands before the marker was written by the login shell's start files. ``marker`` is letters and digits.

    Raises:
        BadInput: no words, a NUL byte, or too long.
    """
    if not argv or not argv[0]:
        raise BadInput("an empty command cannot be run on another machine")
    if any("\0" in word for word in argv):
        raise BadInput(f"the command {argv[0]!r} has a NUL byte in an argument")
    encoded = encode(argv)
    if len(encoded) > LIMIT:
        raise BadInput(f"the command {argv[0]!r} is too long ({len(encoded)} bytes)", "send the data on stdin")
    # "exit $?" keeps sh as the parent: a signal that ends the command then shows as the exit code 128 + signal.
    return f"""sh -c 'echo {marker}; eval "$(printf %b "$1")"; exit $?' sh '{encoded}'"""


@dataclass(frozen=True)
class Completed:
    """A command that has ended. ``returncode`` is 128 + signal where a signal ended it."""

    returncode: int
    stdout: bytes
    stderr: bytes
    """The last 64 KiB of it."""

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    @property
    def errors(self) -> list[str]:
        """The lines of stderr."""
        return self.stderr.decode(errors="replace").strip().splitlines()

    @property
    def problem(self) -> str:
        """The last line of stderr, or the exit code."""
        return self.errors[-1] if self.errors else f"exit code {self.returncode}"


class _Pipe:
    """Bytes from one thread to another, bounded."""

    def __init__(self, limit: int) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._limit = limit
        self._ended = False
        self._changed = threading.Condition()

    def put(self, chunk: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._size < self._limit or self._ended)
            self._chunks.append(chunk)
            self._size += len(chunk)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, timeout: float | None) -> bytes:
        """Return the next chunk, or nothing at the end.

        Raises:
            TimeoutError: nothing came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._chunks) or self._ended, timeout):
                raise TimeoutError
            if not self._chunks:
                return b""
            chunk = self._chunks.popleft()
            self._size -= len(chunk)
            self._changed.notify_all()
            return chunk


class Process(ABC):
    """A running command: write to its stdin, read its stdout line by line, wait for its end.

    All methods raise :class:`~distributed.ssh.errors.Dropped` once the connection to it is lost.
    """

    machine: str
    _rest = b""
    """What was read and not yet handed out."""

    @property
    @abstractmethod
    def stderr(self) -> bytes:
        """What it wrote to stderr so far, the last 64 KiB."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Write to its stdin; waits while it does not read."""

    @abstractmethod
    def end_input(self) -> None:
        """Close its stdin."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, 128 + signal where a signal ended it.

        Raises:
            CommandTimeout: it did not end in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Close its streams; a process over there that ignores that goes on running."""

    @abstractmethod
    def _more(self, timeout: float | None) -> bytes:
        """Return what stdout gives next, nothing at its end; TimeoutError where nothing comes in time."""

    def read(self, timeout: float | None = None) -> bytes:
        """Return some bytes of stdout as they come, nothing at its end.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds.
        """
        data, self._rest = self._rest, b""
        return data or self._more(timeout)

    def read_line(self, timeout: float | None = None) -> bytes:
        """Return the next line of stdout with its newline, nothing at the end; the last line may lack the newline.

        Raises:
            TimeoutError: no whole line came within ``timeout`` seconds; what came is kept for the next call.
        """
        end = None if timeout is None else time.monotonic() + timeout
        searched = 0
        while (position := self._rest.find(b"\n", searched)) < 0 and len(self._rest) < MAX_LINE:
            searched = len(self._rest)
            more = self._more(_left(end))
            if not more:
                break
            self._rest += more
        cut = min(position + 1 if position >= 0 else len(self._rest), MAX_LINE)
        line, self._rest = self._rest[:cut], self._rest[cut:]
        return line

    def communicate(
        self, input: bytes | BinaryIO | None, timeout: float | None, limit: int = OUTPUT_LIMIT
    ) -> Completed:
        """Feed stdin, collect stdout, and wait for the end.

        Raises:
            CommandTimeout: it did not end in time, or wrote more than ``limit`` bytes.
        """
        end = None if timeout is None else time.monotonic() + timeout
        threading.Thread(target=self._feed, args=(input,), daemon=True).start()
        chunks: list[bytes] = []
        size = 0
        try:
            while data := self.read(_left(end)):
                chunks.append(data)
                size += len(data)
                if size > limit:
                    raise CommandTimeout(self.machine, f"a command wrote more than {limit} bytes", "stopped listening")
            returncode = self.wait(_left(end))
        except TimeoutError:
            raise CommandTimeout(self.machine, f"a command did not end within {timeout:.0f} s", "is it hung?") from None
        return Completed(returncode, b"".join(chunks), self.stderr)

    def _feed(self, data: bytes | BinaryIO | None) -> None:
        stream = data if data is not None and not isinstance(data, bytes) else io.BytesIO(data or b"")
        with contextlib.suppress(Dropped, OSError, EOFError, ValueError):  # it ended before: its exit code tells
            while chunk := stream.read(CHUNK):
                self.write(chunk)
            self.end_input()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.read_line, b"")

    def __enter__(self: _P) -> _P:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteProcess(Process):
    """A command on another machine, made by :meth:`distributed.ssh.connection.SshConnection.stream`.

    One thread may read while another writes.
    """

    def __init__(self, machine: str, channel: Any, marker: str, lost_hint: str) -> None:
        self.machine = machine
        self._channel = channel
        self._marker = marker.encode() + b"\n"
        self._started = False
        self._closed = False
        self._lost_hint = lost_hint
        self._noise = b""
        self._stdout = _Pipe(_BUFFERED)
        self._stderr = b""
        self._threads = [
            threading.Thread(target=self._pump, args=(channel.recv, self._stdout.put, self._stdout.end), daemon=True),
            threading.Thread(target=self._pump, args=(channel.recv_stderr, self._keep_stderr, None), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stderr(self) -> bytes:
        return self._stderr

    def write(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), CHUNK):  # paramiko copies all that is left for every packet
                self._channel.sendall(data[start : start + CHUNK])
        except (OSError, EOFError):
            raise self._end_of_stream() from None

    def end_input(self) -> None:
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError):
            raise self._end_of_stream() from None

    def wait(self, timeout: float | None = None) -> int:
        if not self._channel.status_event.wait(timeout):
            raise CommandTimeout(self.machine, f"a command did not end within {timeout:.0f} s", "is the machine hung?")
        self._threads[1].join(1.0)
        if self._channel.exit_status < 0:
            raise self._end_of_stream()
        return int(self._channel.exit_status)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(EOFError):  # the connection was lost meanwhile
            self._channel.close()
        self._stdout.end()

    @staticmethod
    def _pump(receive: Callable[[int], bytes], put: Callable[[bytes], None], end: Callable[[], None] | None) -> None:
        try:
            while data := receive(CHUNK):
                put(data)
        except OSError:
            pass  # closed: the readers learn it from the channel's state
        finally:
            if end is not None:
                end()

    def _keep_stderr(self, data: bytes) -> None:
        self._stderr = (self._stderr + data)[-STDERR_KEPT:]

    def _more(self, timeout: float | None) -> bytes:
        if self._started:
            return self._take(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while (position := self._noise.find(self._marker)) < 0:  # what the login shell's start files print comes first
            data = self._take(_left(end))
            self._noise += data
            if not data or len(self._noise) > _NOISE_LIMIT:
                raise self._no_shell()
        self._started = True
        return self._noise[position + len(self._marker) :] or self._take(_left(end))

    def _take(self, timeout: float | None) -> bytes:
        data = self._stdout.take(timeout)
        if not data and not self._channel.eof_received and not self._closed:
            raise self._end_of_stream()
        return data

    def _no_shell(self) -> NoShell:
        self._threads[1].join(1.0)
        if len(self._noise) > _NOISE_LIMIT:
            hint = "let ~/.bashrc, ~/.zshenv or config.fish there print nothing when the shell is not interactive"
            return NoShell(self.machine, "logged in, but its shell start files never stop printing", hint)
        said = (self._noise + self._stderr).decode(errors="replace").strip()[:120]
        problem = f"logged in, but commands do not run there ({said or 'no answer'})"
        return NoShell(self.machine, problem, _NO_SHELL_HINT)

    def _end_of_stream(self) -> Dropped:
        if self._channel.exit_status >= 0:
            problem = f"a command ended (exit code {self._channel.exit_status}) while it was written to"
            return Dropped(self.machine, problem, self.stderr.decode(errors="replace").strip()[-200:])
        return Dropped(self.machine, "the connection was lost while a command ran", self._lost_hint)


def _left(end: float | None) -> float | None:
    return None if end is None else max(end - time.monotonic(), 0.0)
