"""A command that runs on another machine."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from distributed.ssh.errors import CommandTimeout, Dropped, NoShell

CHUNK = 64 * 1024
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
    def problem(self) -> str:
        """The last line of stderr, or the exit code."""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.returncode}"


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


class RemoteProcess:
    """A running command: write to its stdin, read its stdout line by line, wait for its end.

    Made by :meth:`distributed.ssh.connection.SshConnection.stream`. Closing it closes its stdin and output; a process
    over there that ignores both goes on running. All methods raise :class:`~distributed.ssh.errors.Dropped` once the
    connection is lost. One thread may read while another writes.
    """

    def __init__(self, machine: str, channel: Any, marker: str, lost_hint: str) -> None:
        self.machine = machine
        self._channel = channel
        self._marker = marker.encode() + b"\n"
        self._started = False
        self._closed = False
        self._lost_hint = lost_hint
        self._rest = b""
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
        """What it wrote to stderr so far, the last 64 KiB."""
        return self._stderr

    def write(self, data: bytes) -> None:
        """Write to its stdin; waits while the far side does not read."""
        try:
            for start in range(0, len(data), CHUNK):  # paramiko copies all that is left for every packet
                self._channel.sendall(data[start : start + CHUNK])
        except (OSError, EOFError):
            raise self._end_of_stream() from None

    def end_input(self) -> None:
        """Close its stdin."""
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError):
            raise self._end_of_stream() from None

    def read(self, timeout: float | None = None) -> bytes:
        """Return some bytes of stdout as they come, nothing at its end.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds.
        """
        self._skip_noise(timeout)
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        return self._more(timeout)

    def read_line(self, timeout: float | None = None) -> bytes:
        """Return the next line of stdout with its newline, nothing at the end; the last line may lack the newline.

        Raises:
            TimeoutError: no whole line came within ``timeout`` seconds; what came is kept for the next call.
        """
        end = None if timeout is None else time.monotonic() + timeout
        self._skip_noise(timeout)
        searched = 0
        while (position := self._rest.find(b"\n", searched)) < 0 and len(self._rest) < MAX_LINE:
            searched = len(self._rest)
            more = self._more(_left(end))
            if not more:
                break
            self._rest += more
        cut = position + 1 if position >= 0 else len(self._rest)
        line, self._rest = self._rest[:cut], self._rest[cut:]
        return line

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.read_line, b"")

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, 128 + signal where a signal ended it.

        Raises:
            CommandTimeout: it did not end in time.
        """
        if not self._channel.status_event.wait(timeout):
            raise CommandTimeout(self.machine, f"a command did not end within {timeout:.0f} s", "is the machine hung?")
        self._threads[1].join(1.0)
        if self._channel.exit_status < 0:
            raise self._end_of_stream()
        return int(self._channel.exit_status)

    def communicate(self, input: bytes | BinaryIO | None, timeout: float | None, limit: int) -> Completed:
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

    def close(self) -> None:
        """Close the channel and end the helper threads."""
        self._closed = True
        with contextlib.suppress(EOFError):  # the connection was lost meanwhile
            self._channel.close()
        self._stdout.end()

    def __enter__(self) -> RemoteProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _feed(self, data: bytes | BinaryIO | None) -> None:
        stream = data if data is not None and not isinstance(data, bytes) else io.BytesIO(data or b"")
        try:
            while chunk := stream.read(CHUNK):
                self._channel.sendall(chunk)
            self._channel.shutdown_write()
        except (OSError, EOFError, ValueError):
            pass  # it ended without reading everything: its exit code tells

    def _more(self, timeout: float | None) -> bytes:
        data = self._stdout.take(timeout)
        if not data and not self._channel.eof_received and not self._closed:
            raise self._end_of_stream()
        return data

    def _skip_noise(self, timeout: float | None) -> None:
        """Drop what the login shell's start files print before our command."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._started:
            position = self._rest.find(self._marker)
            if position >= 0:
                self._rest = self._rest[position + len(self._marker) :]
                self._started = True
                return
            data = self._more(_left(end))
            self._rest += data
            if not data or len(self._rest) > _NOISE_LIMIT:
                raise self._no_shell()

    def _no_shell(self) -> NoShell:
        self._threads[1].join(1.0)
        if len(self._rest) > _NOISE_LIMIT:
            hint = "let ~/.bashrc, ~/.zshenv or config.fish there print nothing when the shell is not interactive"
            return NoShell(self.machine, "logged in, but its shell start files never stop printing", hint)
        said = (self._rest + self._stderr).decode(errors="replace").strip()[:120]
        problem = f"logged in, but commands do not run there ({said or 'no answer'})"
        return NoShell(self.machine, problem, _NO_SHELL_HINT)

    def _end_of_stream(self) -> Dropped:
        if self._channel.exit_status >= 0:
            problem = f"a command ended (exit code {self._channel.exit_status}) while it was written to"
            return Dropped(self.machine, problem, self.stderr.decode(errors="replace").strip()[-200:])
        return Dropped(self.machine, "the connection was lost while a command ran", self._lost_hint)


def _left(end: float | None) -> float | None:
    return None if end is None else max(end - time.monotonic(), 0.0)
