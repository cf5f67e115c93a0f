"""A command that runs on another machine.

SSH passes the server one string, which the user's login shell parses: sh, bash, zsh, fish, csh, each with its own
rules. So the words are sent encoded (:func:`command_line`): letters, digits and a few marks as they are, every other
byte as ``\\0ooo``. The login shell sees three quoted words without quotes or dollars inside the last; a POSIX ``sh`` on
the remote side decodes them. Long words follow as the first line of the command's input: dropbear, the server of small
systems, ends the connection at a string of more than 9,000 bytes.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from distributed.ssh.command_log import CommandRecord, failure_text
from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import CommandTimeout, Dropped, NoShell
from profiles.errors import BadInput
from profiles.quantities import span_text

CHUNK = 64 * 1024
LOST_HINT = "is the machine still on and in this network?"
OUTPUT_LIMIT = 64 * 1024 * 1024
"""Maximum bytes of a command's output."""
STDERR_KEPT = 64 * 1024
_NOISE_LIMIT = 256 * 1024
"""Maximum bytes that the login shell's start files may print before a command."""
MAX_LINE = 2 * 1024 * 1024
LIMIT = 100_000
"""Bytes of an encoded command; Linux refuses one argument of 128 KiB. Longer input belongs on stdin."""
_LONGEST_INLINE = 8_000
"""Maximum bytes of a command in the string for the server."""
See = Callable[[int, int], object]
"""Called with the bytes that were sent, and the number of all."""
Input = bytes | Iterable[bytes] | None
"""Data for a command's stdin."""


def unseen(done: int, size: int) -> None:
    """Let bytes be sent without telling anybody."""


def chunks(stream: IO[bytes], size: int, see: See = unseen) -> Iterator[bytes]:
    """Yield the ``size`` bytes of a stream in parts; ``see`` is called when each has been taken."""
    done = 0
    while chunk := stream.read(CHUNK):
        yield chunk
        done += len(chunk)
        see(done, size)


_P = TypeVar("_P", bound="Process")
_EXPIRED = re.compile(r"password.*(expired|change required)|change your password", re.IGNORECASE | re.DOTALL)
_PLAIN = re.compile(rb"[^A-Za-z0-9_@%+=:,./-]")


def encode(argv: Sequence[str]) -> str:
    """Encode a command's words; ``printf %b`` decodes them to a line for ``sh``."""
    line = " ".join(shlex.quote(word) for word in argv).encode("utf-8", "surrogateescape")
    return _PLAIN.sub(lambda match: b"\\0%03o" % match[0][0], line).decode("ascii")


def command_line(argv: Sequence[str], marker: str) -> tuple[str, bytes]:
    """Return the string to send, and the data that must come first on the command's stdin.

    The command prints ``marker`` on a line of stdout and then runs ``argv``. Whatever stands before the marker was
    written by the login shell's start files. ``marker`` is letters and digits.

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
    # A PYTHONHOME set by a start file would break every other Python.
    if len(encoded) > _LONGEST_INLINE:
        return (
            f"""sh -c 'unset PYTHONHOME; echo {marker}; read -r line; eval "$(printf %b "$line")"; exit $?'""",
            f"{encoded}\n".encode(),
        )
    return f"""sh -c 'unset PYTHONHOME; echo {marker}; eval "$(printf %b "$1")"; exit $?' sh '{encoded}'""", b""


_SENT = re.compile(
    rb"""sh -c 'unset PYTHONHOME; echo ([a-z0-9]+);"""
    rb"""(?: eval "\$\(printf %b "\$1"\)"; exit \$\?' sh '([^'"]*)'| read .*)"""
)


def command_words(line: bytes) -> tuple[str, list[str]] | None:
    """Return the marker and the words of a command that :func:`command_line` has encoded, no words where they follow on
    its input; ``None``: it is none.

    Raises:
        ValueError: its quotes do not match.
    """
    if (match := _SENT.fullmatch(line)) is None:
        return None
    text = re.sub(rb"\\0([0-7]{3})", lambda code: bytes([int(code[1], 8) & 255]), match[2] or b"")
    return match[1].decode(), shlex.split(text.decode("utf-8", "surrogateescape"))


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
        """The last line of stderr, or the one that says why a Python did not start, or the exit code."""
        fatal = next((line for line in self.errors if line.startswith("Fatal Python error")), "")
        return fatal or (self.errors[-1] if self.errors else f"exit code {self.returncode}")


class Process(ABC):
    """A running command: write to its stdin, read its stdout line by line, wait for its end.

    All methods raise :class:`~distributed.ssh.errors.Dropped` once the connection to it is lost.
    """

    machine: str
    ran: CommandRecord | None = None
    """Its line in the log of commands."""
    _buffer = b""
    """Data that was read and not returned yet."""

    @property
    @abstractmethod
    def stderr(self) -> bytes:
        """The last 64 KiB that it has written to stderr."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Write to its stdin; blocks while it does not read."""

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
        """Close its streams; a remote process that ignores this keeps running."""

    def _note_end(self, code: int | None) -> None:
        """Write down how it ended, where nobody has; ``None``: it may be running still."""
        if self.ran is not None and not self.ran.outcome:
            self.ran.end("ended" if code is None else "ok" if code == 0 else f"exit code {code}")

    @abstractmethod
    def _read_chunk(self, timeout: float | None) -> bytes:
        """Return the next bytes of stdout, empty at its end; raises TimeoutError where none arrive in time."""

    def read(self, timeout: float | None = None) -> bytes:
        """Return available bytes of stdout, empty at its end.

        Raises:
            TimeoutError: nothing arrived within ``timeout`` seconds.
        """
        data, self._buffer = self._buffer, b""
        return data or self._read_chunk(timeout)

    def read_line(self, timeout: float | None = None) -> bytes:
        """Return the next line of stdout with its newline, empty at the end; the last line may lack the newline.

        Raises:
            TimeoutError: no complete line arrived within ``timeout`` seconds; partial data is kept for the next call.
        """
        end = None if timeout is None else time.monotonic() + timeout
        searched = 0
        while (position := self._buffer.find(b"\n", searched)) < 0 and len(self._buffer) < MAX_LINE:
            searched = len(self._buffer)
            chunk = self._read_chunk(_left(end))
            if not chunk:
                break
            self._buffer += chunk
        cut = min(position + 1 if position >= 0 else len(self._buffer), MAX_LINE)
        line, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return line

    def communicate(self, input: Input, timeout: float | None) -> Completed:
        """Feed stdin, collect stdout, and wait for the end.

        Raises:
            CommandTimeout: it did not end in time, or wrote more than :data:`OUTPUT_LIMIT` bytes.
        """
        end = None if timeout is None else time.monotonic() + timeout
        threading.Thread(target=self._feed, args=(input,), daemon=True).start()
        chunks: list[bytes] = []
        size = 0
        try:
            while data := self.read(_left(end)):
                chunks.append(data)
                size += len(data)
                if size > OUTPUT_LIMIT:
                    problem = f"a command wrote more than {OUTPUT_LIMIT} bytes"
                    raise CommandTimeout(self.machine, problem, "stopped listening")
            returncode = self.wait(_left(end))
        except TimeoutError:
            raise _too_slow(self.machine, timeout) from None
        done = Completed(returncode, b"".join(chunks), self.stderr)
        if self.ran is not None:
            self.ran.end("ok" if done.ok else done.problem[:200])
        return done

    def _feed(self, data: Input) -> None:
        with contextlib.suppress(Dropped, OSError, EOFError, ValueError):  # it has ended already: see its exit code
            for piece in (data,) if isinstance(data, bytes) else data or ():
                self.write(piece)
            self.end_input()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.read_line, b"")

    def __enter__(self: _P) -> _P:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.ran is not None and not self.ran.outcome and error:
            self.ran.end(failure_text(error))
        self.close()


class RemoteProcess(Process):
    """A command on another machine, made by :meth:`distributed.ssh.connection.SshConnection.stream`.

    One thread may read while another writes.
    """

    def __init__(self, host: ResolvedHost, channel: Any, marker: str) -> None:
        self.machine, self._host = host.machine, host
        self.channel = channel
        self._marker = marker.encode() + b"\n"
        self._started = False
        self._closed = False
        self._noise = b""
        self._stderr = b""
        self._readable = threading.Event()
        channel.in_buffer.set_event(self._readable)
        self._errors = threading.Thread(target=self._keep_stderr, daemon=True)
        self._errors.start()

    @property
    def stderr(self) -> bytes:
        return self._stderr

    def write(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), CHUNK):  # paramiko copies all that is left for every packet
                self.channel.sendall(data[start : start + CHUNK])
        except (OSError, EOFError):
            raise self._end_of_stream() from None

    def end_input(self) -> None:
        try:
            self.channel.shutdown_write()
        except (OSError, EOFError):
            raise self._end_of_stream() from None

    def wait(self, timeout: float | None = None) -> int:
        if not self.channel.status_event.wait(timeout):
            raise _too_slow(self.machine, timeout)
        self._errors.join(1.0)
        if self.channel.exit_status < 0:
            raise self._end_of_stream()
        return int(self.channel.exit_status)

    def close(self) -> None:
        self._closed = True
        self._note_end(self.channel.exit_status if self.channel.exit_status >= 0 else None)
        with contextlib.suppress(EOFError):  # the connection was lost meanwhile
            self.channel.close()

    def _keep_stderr(self) -> None:
        """Read stderr continuously, as a full stderr would block stdout."""
        with contextlib.suppress(OSError, EOFError):  # closed or lost: readers see it in the channel's state
            while data := self.channel.recv_stderr(CHUNK):
                self._stderr = (self._stderr + data)[-STDERR_KEPT:]

    def _read_chunk(self, timeout: float | None) -> bytes:
        if self._started:
            return self._take(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while (position := self._noise.find(self._marker)) < 0:  # output of the login shell's start files comes first
            data = self._take(_left(end))
            self._noise += data
            if not data or len(self._noise) > _NOISE_LIMIT:
                raise self._no_shell()
        self._started = True
        return self._noise[position + len(self._marker) :] or self._take(_left(end))

    def _take(self, timeout: float | None) -> bytes:
        if not self._readable.wait(timeout):
            raise TimeoutError
        try:
            data = bytes(self.channel.recv(CHUNK))
        except (OSError, EOFError):
            raise self._end_of_stream() from None
        if not data and not self.channel.eof_received and not self._closed:
            raise self._end_of_stream()
        return data

    def _no_shell(self) -> NoShell:
        self._errors.join(1.0)
        if len(self._noise) > _NOISE_LIMIT:
            hint = "let ~/.bashrc, ~/.zshenv or config.fish there print nothing when the shell is not interactive"
            return NoShell(self.machine, "logged in, but its shell start files never stop printing", hint)
        output = (self._noise + self._stderr).decode(errors="replace").strip()
        if _EXPIRED.search(output):
            return self._password_expired()
        problem = f"logged in, but commands do not run there ({output[:120] or 'no answer'})"
        login = f"{self._host.user}@{self._host.hostname}"
        hint = f"do the user's start files there end the shell (try: ssh {login} true)? Does a ForceCommand of its "
        hint += "sshd_config, or command= before the key in authorized_keys, run something else? "
        hint += f"Else give it a login shell: sudo chsh -s /bin/sh {self._host.user}"
        return NoShell(self.machine, problem, hint)

    def _password_expired(self) -> NoShell:
        host = self._host
        problem = (
            f"logged in, but the password of {host.user} there has expired, and no command runs until it is changed"
        )
        login = f"{'' if host.port == 22 else f'-p {host.port} '}{host.user}@{host.hostname}"
        hint = f"log in once with: ssh {login}, type the present password where asked, then a new one twice"
        return NoShell(self.machine, problem, hint)

    def _end_of_stream(self) -> Dropped:
        if self.channel.exit_status >= 0:
            problem = f"a command ended (exit code {self.channel.exit_status}) while it was written to"
            return Dropped(self.machine, problem, self.stderr.decode(errors="replace").strip()[-200:])
        return Dropped(self.machine, "the connection was lost while a command ran", LOST_HINT)


def _left(end: float | None) -> float | None:
    return None if end is None else max(end - time.monotonic(), 0.0)


def _too_slow(machine: str, timeout: float | None) -> CommandTimeout:
    problem = f"a command did not end within {span_text(timeout or 0)}"
    return CommandTimeout(machine, problem, "is it very busy, or hung? try again")
