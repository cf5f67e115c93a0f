"""This machine with the face of an SSH connection: hosts files may name it, and it needs no SSH server for that."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from distributed.hosts.schema import Hosts, Machine
from distributed.ssh.errors import CommandTimeout, Dropped, RemoteFileError
from distributed.ssh.forward import Forward
from distributed.ssh.process import CHUNK, STDERR_KEPT, Completed, Process
from training.run_files import write_whole

HERE_NAME = "this machine"


def this_machine(name: str = HERE_NAME) -> Hosts:
    """Return the hosts of a group of one: this machine, with the Python that runs this program."""
    return Hosts(machines=(Machine(name=name, address="localhost", python=sys.executable),))


class HereConnection:
    """This machine, with the face of an SSH connection. Commands start in the home folder, as over SSH."""

    fingerprint = "this machine"

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def run(
        self, argv: Sequence[str], *, input: bytes | BinaryIO | None = None, timeout: float | None = 60.0
    ) -> Completed:
        try:
            process = HereProcess(self.machine, argv)
        except Dropped as error:
            return Completed(127, b"", error.message.encode())
        with process:
            return process.communicate(input, timeout)

    def stream(self, argv: Sequence[str]) -> Process:
        return HereProcess(self.machine, argv)

    def put(self, source: bytes | Path, remote: str, *, mode: int = 0o600) -> None:
        target = Path.home() / Path(remote).expanduser()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, source if isinstance(source, bytes) else source.read_bytes(), mode)
        except OSError as error:
            raise RemoteFileError(self.machine, f"cannot write {target}: {error.strerror}", "free some space") from None

    def forward_remote(self, local_address: tuple[str, int], remote_port: int = 0) -> Forward:
        return Forward(local_address[1], lambda: None)

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


class HereProcess(Process):
    """A command of this machine."""

    def __init__(self, machine: str, argv: Sequence[str]) -> None:
        self.machine = machine
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd=Path.home()
            )
        except OSError as error:
            self._errors.close()
            raise Dropped(machine, f"{argv[0]}: {error.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of what it wrote to stderr. Its place in the file is shared with the command, so no seek."""
        descriptor = self._errors.fileno()
        return os.pread(descriptor, STDERR_KEPT, max(os.fstat(descriptor).st_size - STDERR_KEPT, 0))

    def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except (OSError, ValueError):
            raise Dropped(self.machine, "a command ended while it was written to") from None

    def end_input(self) -> None:
        try:
            self._stdin.close()
        except OSError:
            raise Dropped(self.machine, "a command ended while it was written to") from None

    def _more(self, timeout: float | None) -> bytes:
        try:
            if not select.select([self._stdout], [], [], timeout)[0]:
                raise TimeoutError
            return os.read(self._stdout.fileno(), CHUNK)
        except (OSError, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Dropped(self.machine, "the command was closed") from None

    def wait(self, timeout: float | None = None) -> int:
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CommandTimeout(self.machine, "a command did not end in time") from None
        return _exit_code(code)

    def close(self) -> None:
        """End the command and its streams."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._errors):
            with contextlib.suppress(OSError):
                stream.close()


def _exit_code(code: int) -> int:
    """128 + signal where a signal ended it, as over SSH."""
    return code if code >= 0 else 128 - code
