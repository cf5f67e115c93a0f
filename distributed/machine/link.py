"""One machine of a run as seen by the supervisor: its connection, re-established when lost, and its agent.

This computer has the interface of an SSH connection too: hosts files may name it, and it needs no SSH server for that.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from distributed.agent.requests import MachineRequest, ProbeMachine, frame
from distributed.hosts.joined import lend_class
from distributed.hosts.lending import LendClass
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.packing import AGENT, program, version
from distributed.machine.pool import ConnectionPool
from distributed.ssh.command_log import note
from distributed.ssh.config import resolve
from distributed.ssh.connection import SshConnection, SshTarget, Trust
from distributed.ssh.errors import CommandTimeout, Dropped, RemoteFileError, SshError, space_hint
from distributed.ssh.forward import Forward
from distributed.ssh.process import CHUNK, STDERR_KEPT, Completed, Input, Process, See, unseen
from profiles.installation import training_python
from training.records.run_files import write_atomically

HERE_NAME = "this machine"
OWN_PROGRAM = "muster-request"
"""Stands for the program of a machine's own Muster, where that machine takes no program of others."""


def this_machine(name: str = HERE_NAME) -> Hosts:
    """Return hosts with only this machine, with its training Python, if there is one."""
    return Hosts(machines=(Machine(name=name, address="localhost", python=training_python()),))


class HereConnection:
    """This machine, with the interface of an SSH connection. Commands start in the home folder, as over SSH."""

    fingerprint = "this machine"
    peer = ""

    def __init__(self, machine: str) -> None:
        self.machine = machine

    def run(self, argv: Sequence[str], *, input: Input = None, timeout: float | None = 60.0) -> Completed:
        try:
            process = HereProcess(self.machine, argv)
        except Dropped as error:
            return Completed(127, b"", error.message.encode())
        with process:
            return process.communicate(input, timeout)

    def stream(self, argv: Sequence[str]) -> Process:
        return HereProcess(self.machine, argv)

    def put(self, source: bytes | Path, remote: str, *, mode: int = 0o600, see: See = unseen) -> None:
        target = Path.home() / Path(remote).expanduser()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, source if isinstance(source, bytes) else source.read_bytes(), mode)
        except OSError as error:
            raise RemoteFileError(self.machine, f"cannot write {target}: {error.strerror}", "free some space") from None

    def forward_remote(self, local_address: tuple[str, int], remote_port: int = 0) -> Forward:
        return Forward(local_address[1], lambda: None)

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


class HereProcess(Process):
    """A command that runs on this machine."""

    def __init__(self, machine: str, argv: Sequence[str]) -> None:
        self.machine = machine
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd=Path.home()
            )
        except OSError as error:
            self._errors.close()
            raise Dropped(machine, f"{argv[0]}: {error.strerror}") from None
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self.ran = note(machine, argv)

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of its stderr. The file position is shared with the command, so this does not seek."""
        descriptor = self._errors.fileno()
        return os.pread(descriptor, STDERR_KEPT, max(os.fstat(descriptor).st_size - STDERR_KEPT, 0))

    def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except (OSError, ValueError):
            raise Dropped(self.machine, "a command ended before it had read its input") from None

    def end_input(self) -> None:
        try:
            self._stdin.close()
        except OSError:
            raise Dropped(self.machine, "a command ended before it had read its input") from None

    def _read_chunk(self, timeout: float | None) -> bytes:
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
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CommandTimeout(self.machine, "a command did not end in time") from None
        return code if code >= 0 else 128 - code  # 128 + signal where a signal ended it, as over SSH

    def close(self) -> None:
        """End the command and its streams."""
        self._note_end(self.process.poll())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self._stdin, self._stdout, self._errors):
            with contextlib.suppress(OSError):
                stream.close()


CACHE = "~/.cache/muster"
"""Muster's folder on a machine where the hosts file names none."""
Tell = Callable[[str], None]
"""Called with a line for each step of a long operation."""
Connection = SshConnection | HereConnection
"""A machine that commands can be run on."""


class MachineLink:
    """A machine and the connection to it; may be used from several threads.

    Args:
        dial: returns a living connection.
        host: its address as SSH resolved it, or as found after its connection broke; empty where it cannot dial this
            machine directly (behind a jump host).
        shares: whether the connection belongs to a pool, which closes it.
        lend: what the machine lets others run.
    """

    def __init__(
        self,
        machine: Machine,
        dial: Callable[[], Connection],
        host: str = "",
        shares: bool = False,
        lend: LendClass = "own",
    ) -> None:
        self.machine, self.lend = machine, lend
        self.host = host
        self.name = machine.name
        self.python = _remote_path(machine.python_command or (machine.is_local and training_python()) or "python3")
        self.root = machine.project_path or CACHE
        """Muster's folder there; absolute once the machine has reported its missing files."""
        self._dial, self._shares = dial, shares
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._forwards: dict[tuple[str, int], Forward] = {}
        self._dialled = False
        self._has_program = False

    def forward(self, near: tuple[str, int]) -> str:
        """Forward a loopback port there to ``near`` as seen from here, also over later connections; return its
        ``host:port`` there. A later connection uses the same port again, if it is free.

        Raises:
            SshError: no connection, or its SSH server does not forward.
        """
        connection = self.connection()
        with self._lock:
            if near not in self._forwards:
                self._forwards[near] = connection.forward_remote(near)
            return self._forwards[near].address

    def _restore_forwards(self, connection: Connection) -> None:
        """Restore the forwarded ports of the previous connection; one that fails is requested again when needed."""
        before, self._forwards = self._forwards, {}
        for near, forward in before.items():
            for port in (forward.port, 0):
                with contextlib.suppress(SshError):
                    self._forwards[near] = connection.forward_remote(near, port)
                    break

    def connection(self) -> Connection:
        """Return a living connection.

        Raises:
            SshError: the machine cannot be connected to.
        """
        with self._lock:
            if self._connection is not None and not self._connection.alive():
                self._release()
            if self._connection is None:
                self._connection = self._dial()
                self._restore_forwards(self._connection)
                if self.host and self._dialled:
                    self.host = self._connection.peer or self.host
                self._dialled = True
            return self._connection

    def follow(self, moved: MachineLink) -> None:
        """Dial the machine at the address of ``moved`` from now on."""
        with self._lock:
            self.machine, self.host, self._dial, self._shares = moved.machine, moved.host, moved._dial, moved._shares
            self.lend = moved.lend

    def taking_over(self, earlier: MachineLink | None) -> MachineLink:
        """Return this link with the connection of an earlier one to the same machine, which loses it."""
        if earlier is not None:
            with earlier._lock:
                self._connection, earlier._connection = earlier._connection, None
                self._forwards, earlier._forwards = earlier._forwards, {}
        return self

    def put_agent(self) -> None:
        """Copy Muster's program there; until then, it is sent along with every request."""
        if self.runs_own_program:
            return
        self.connection().put(program(), self._program_path, mode=0o700)
        self._has_program = True

    @property
    def runs_own_program(self) -> bool:
        """Whether the machine takes requests alone, and carries them out with its own Muster."""
        return self.lend == "tasks"

    @property
    def _program_path(self) -> str:
        return f"{self.root}/agent/{version()}/{AGENT}"

    def command(self, request: MachineRequest, python: str = "") -> list[str]:
        """Return the command line that carries out a request there, once it gets it on its input.

        Args:
            python: runs the program; default: the link's.
        """
        if self.runs_own_program:
            return [OWN_PROGRAM, *request.title]
        about = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(request).__name__).lower()  # "list addresses", in the log
        sent = ["-c", f"# {about}\n{program(request.module).decode()}"]
        words = [_remote_path(self._program_path)] if self._has_program else sent
        return [python or self.python, *words, self.root, *request.title]

    def stream(self, request: MachineRequest, python: str = "") -> Process:
        """Start what carries out a request, and return it while it runs.

        Raises:
            SshError: no connection.
        """
        process = self.connection().stream(self.command(request, python))
        with contextlib.suppress(Dropped):  # it has ended already: its output says why
            process.write(frame(request))
        return process

    def run(
        self, request: MachineRequest, payload: Iterable[bytes] = (), timeout: float | None = 60.0, python: str = ""
    ) -> Completed:
        """Let a request be carried out, and return the outcome.

        Args:
            payload: what follows the request on its input.

        Raises:
            SshError: no connection, or it was lost.
        """
        input: Input = itertools.chain([frame(request)], payload) if payload else frame(request)
        return self.connection().run(self.command(request, python), input=input, timeout=timeout)

    def ask(
        self, request: MachineRequest, payload: Iterable[bytes] = (), timeout: float | None = 60.0
    ) -> dict[str, Any]:
        """Let a request be carried out, and return the reply.

        Raises:
            SshError: it failed; the message is its last line of stderr.
        """
        done = self.run(request, payload, timeout)
        if not done.ok:
            hint = space_hint(done.problem) or "is the hosts file's python the right one for this machine?"
            raise RemoteFileError(self.name, done.problem, hint)
        return document(self.name, done.stdout)

    def probe(self, modules: Sequence[str], dial: str = "") -> dict[str, Any]:
        """Ask the machine for a report on itself; it needs nothing but Python.

        Args:
            modules: packages to look for.
            dial: ``HOST PORT`` that it tries to connect to.

        Raises:
            SshError: no connection, or no usable Python.
        """
        done = self.run(ProbeMachine(modules, dial), timeout=30.0)
        if not done.ok and done.returncode in (126, 127):
            fix = "name another with 'python' in the hosts file" if self.machine.python else "install Python 3.10 there"
            raise SshError(self.name, f"no Python there: {self.python} ({done.problem})", fix)
        if not done.ok:
            raise SshError(self.name, f"{self.python} does not work there: {done.problem}", "try it on that machine")
        return document(self.name, done.stdout)

    def close(self) -> None:
        with self._lock:
            if self._shares and self._connection is not None and self._connection.alive():
                for forward in self._forwards.values():
                    forward.close()
                self._forwards = {}
            self._release()

    def _release(self) -> None:
        if self._connection is not None and not self._shares:
            self._connection.close()
        self._connection = None


def document(machine: str, output: bytes) -> dict[str, Any]:
    """Parse the JSON object that one of our programs has printed on a machine.

    Raises:
        SshError: the output is not a JSON object.
    """
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(output)
        if isinstance(parsed, dict):
            return parsed
    problem = f"its answer cannot be read: {output[:80].decode(errors='replace')!r}"
    raise SshError(machine, problem, "does its Python print anything by itself (sitecustomize, .pth files)?")


Dial = Callable[[Machine, Hosts, Trust | None], MachineLink]
"""Returns the link to a machine of a hosts file; the last argument judges an unknown host key. See :func:`link_to`."""


def link_to(
    machine: Machine, hosts: Hosts, trust: Trust | None = None, pool: ConnectionPool | None = None
) -> MachineLink:
    """Return the link to a machine of a hosts file; nothing is dialled yet.

    Args:
        pool: where the connection comes from and stays; ``None``: the link has a connection of its own.

    Raises:
        BadInput: ~/.ssh/config has an error.
    """
    if machine.is_local:
        return MachineLink(machine, lambda: HereConnection(machine.name), "127.0.0.1")
    target = SshTarget.of(machine, hosts)
    resolved = resolve(target)
    host = resolved.hostname if resolved.is_dialled else ""
    lend = lend_class(resolved.joined)
    if pool is not None:
        return MachineLink(machine, lambda: pool.get(target, trust), host, shares=True, lend=lend)
    return MachineLink(machine, lambda: SshConnection.connect(target, trust=trust), host, lend=lend)


def address_towards(host: str) -> str:
    """Return this machine's literal address on the route to ``host``; loopback where there is no route."""
    try:
        family, kind, _, _, address_info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address_info)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _remote_path(path: str) -> str:
    """Return a path without ``~``, which is not expanded in commands: they start in the home folder."""
    return f"./{path[2:]}" if path.startswith("~/") else path
