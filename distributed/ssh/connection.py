"""One SSH connection to one machine: run, stream, put, forward, and whether it is alive.

::

    target = SshTarget("studio", "studio.local", user="ada")
    with SshConnection.connect(target, trust=ask_the_person) as studio:
        print(studio.run(["uname", "-sm"]).stdout.decode())

Commands are lists of words; whatever they contain, the remote side gets the same words, whichever login shell the user
has there. Every failure is an :class:`~distributed.ssh.errors.SshError` with the machine's name, the cause and the fix.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paramiko

from distributed.ssh.auth import Login
from distributed.ssh.channel import open_session, ordered
from distributed.ssh.command_log import note, noted, ssh_command
from distributed.ssh.config import ResolvedHost, SshTarget, resolve
from distributed.ssh.errors import (
    CommandTimeout,
    Dropped,
    ForwardRefused,
    NoShell,
    RemoteFileError,
    SshError,
    UserRefused,
    space_hint,
)
from distributed.ssh.forward import LOOPBACK, Forward, Heartbeat, RemotePorts
from distributed.ssh.keys.host_keys import fingerprint
from distributed.ssh.login_history import note_login
from distributed.ssh.process import LOST_HINT, Completed, Input, RemoteProcess, See, chunks, command_line, unseen
from distributed.ssh.session import Trust, open_transport
from distributed.ssh.wire import Deadline, SshStream, dial
from profiles.errors import BadInput
from profiles.quantities import span_text

__all__ = ["Completed", "Forward", "RemoteProcess", "SshConnection", "SshTarget", "Trust"]

CONNECT_TIMEOUT = 10.0
_MAX_JUMPS = 8
_SESSION_RETURN = 1.0
"""Seconds within which a server frees the session of a command that has ended."""
_MOST_FURTHER = 8
"""Maximum further connections: OpenSSH allows 10 sessions on each, some servers one."""
_LOGIN_TIMEOUT = 2.0
"""Minimum seconds for a reply during the log-in: the user may have used up the time by comparing fingerprints."""

PUT = """# stores a file
umask 077; trap '' PIPE HUP
if [ -d "$1" ]; then echo "$1: is a folder" >&2; exit 1; fi
mkdir -p -- "$(dirname -- "$1")" && cat > "$2" &&
if [ "$(wc -c < "$2")" -ne "$3" ]; then echo "the transfer was cut short" >&2; false; fi &&
chmod "$4" "$2" && mv -f -- "$2" "$1" || { rm -f -- "$2"; exit 1; }"""
"""To ``cat`` a dropped connection looks like the end of the input, so the size is checked before the file is renamed.
Writing the error must not kill the shell before it has cleaned up: its stderr is closed then.
"""

Gateways = Callable[[SshTarget], "SshConnection"]
"""Returns the connection to a jump host."""


@dataclass(frozen=True)
class _ConnectOptions:
    """How to connect; see :meth:`SshConnection.connect`."""

    trust: Trust | None
    password: str | None
    timeout: float
    heartbeat: float
    gateways: Gateways | None


class SshConnection:
    """An authenticated connection, created by :meth:`connect`; thread-safe."""

    def __init__(
        self,
        host: ResolvedHost,
        authenticated_by: str,
        wire: SshStream,
        transport: Any,
        gateway: SshConnection | None,
        options: _ConnectOptions,
    ) -> None:
        self.host, self.machine = host, host.machine
        self.authenticated_by = authenticated_by
        """The key's label, ``password``, or ``none``."""
        self.system = self.host_name = ""
        """Outputs of ``uname -sm``, for example ``Darwin arm64``, and of ``uname -n``."""
        self.transport = transport
        self.gateway, self._owns_gateway = gateway, True
        self._marker = "muster" + secrets.token_hex(8)
        self._options = options
        self._further: list[SshConnection] = []  # for commands beyond the server's MaxSessions
        self._further_lock = threading.Lock()
        self._forwards: list[Forward] = []
        self._heartbeat = Heartbeat(transport, wire, options.heartbeat)
        self._remote_ports = RemotePorts(transport, self._heartbeat)

    @classmethod
    def connect(
        cls,
        target: SshTarget,
        *,
        trust: Trust | None = None,
        password: str | None = None,
        timeout: float = CONNECT_TIMEOUT,
        heartbeat: float = 2.0,
        gateways: Gateways | None = None,
    ) -> SshConnection:
        """Connect, check the host key, log in, and check that commands run.

        Args:
            target: which machine; unset fields come from ~/.ssh/config.
            trust: asked about an unknown machine; ``None`` refuses it. A changed key is refused without asking.
            password: tried in place of the keys, if the server takes one.
            timeout: seconds for each machine on the route, all steps together.
            heartbeat: seconds between heartbeats; after four of them in silence the connection counts as lost.
            gateways: where the connection to a single jump host comes from, and stays; ``None``: it is one of its own.

        Raises:
            SshError: one of its subclasses, see :mod:`distributed.ssh.errors`.
            BadInput: ~/.ssh/config has an error.
        """
        return cls._connect(target, _ConnectOptions(trust, password, timeout, heartbeat, gateways))

    @classmethod
    def _connect(
        cls, target: SshTarget, options: _ConnectOptions, depth: int = 0, jumps: tuple[SshTarget, ...] | None = None
    ) -> SshConnection:
        """Connect through ``jumps``, or through the jump hosts of the configuration where it is ``None``."""
        if depth > _MAX_JUMPS:
            hint = "does ProxyJump in ~/.ssh/config go in a circle?"
            raise BadInput(f"more than {_MAX_JUMPS} jumps", hint, machine=target.name)
        host = replace(resolved := resolve(target), typed=ssh_command(target, resolved))
        gateway: SshConnection | None = None
        route = host.jumps if jumps is None else jumps
        # As ssh does: the last jump is reached through those before it, a single one as its own entry says.
        shared = options.gateways if len(route) == 1 else None
        if shared is not None:
            gateway = shared(route[-1])
        elif route:
            before = route[:-1] if len(route) > 1 else None
            gateway = cls._connect(route[-1], replace(options, password=None), depth + 1, before)
        connection: SshConnection | None = None
        try:
            connection = cls._open(host, gateway, options)
            connection._owns_gateway = shared is None
            connection._check_that_commands_run(max(options.timeout, host.connect_timeout))
            note_login(target, host, "" if gateway else connection.peer, connection.fingerprint, connection.host_name)
        except BaseException:
            for opened in (connection, gateway if shared is None else None):
                if opened is not None:
                    opened.close()
            raise
        return connection

    @classmethod
    def _open(cls, host: ResolvedHost, gateway: SshConnection | None, options: _ConnectOptions) -> SshConnection:
        deadline = Deadline(max(options.timeout, host.connect_timeout))
        with noted(host.machine, host.typed):
            wire = SshStream(gateway._channel_to(host, deadline)) if gateway else dial(host, deadline)
            transport, last_words = open_transport(host, wire, options.trust, deadline)
            try:
                timeout = max(deadline.remaining, _LOGIN_TIMEOUT)
                method = Login(host, transport, last_words, timeout).run(options.password)
            except BaseException:
                transport.close()
                raise
        wire.logged_in()
        return cls(host, method, wire, transport, gateway, options)

    def _channel_to(self, host: ResolvedHost, deadline: Deadline) -> Any:
        """Open a channel to the next machine through this one."""
        try:
            destination, origin = (host.hostname, host.port), (LOOPBACK, 0)
            return ordered(self.transport.open_channel("direct-tcpip", destination, origin, timeout=deadline.remaining))
        except (paramiko.SSHException, EOFError, OSError) as error:
            problem = f"{self.host.host_port} cannot reach {host.host_port} for us ({error})"
            raise ForwardRefused(host.machine, problem, "check ProxyJump in ~/.ssh/config") from None

    def _check_that_commands_run(self, timeout: float) -> None:
        try:
            with self.stream(["uname", "-snm"], min(timeout, CONNECT_TIMEOUT)) as process:
                result = self._first_answer(process, timeout)
        except (Dropped, NoShell) as error:
            if isinstance(error, NoShell) and self.transport.is_active():
                raise
            problem = f"{self.host.host_port} closed the connection right after user '{self.host.user}' had logged in"
            hint = (
                "may this user log in by SSH there? On a Mac: System Settings > General > Sharing > Remote Login > "
                "Allow access for; on Linux check the account and the SSH server's log"
            )
            raise UserRefused(self.machine, problem, hint) from None
        words = result.stdout.decode(errors="replace").split()
        self.system, self.host_name = " ".join(words[::2]), "".join(words[1:2])

    def _first_answer(self, process: RemoteProcess, timeout: float) -> Completed:
        try:
            return process.communicate(None, timeout)
        except CommandTimeout:
            problem = f"it let us in, but its first command did not end within {span_text(timeout)}"
            hint = (
                f"do the user's start files there wait for something? Try: ssh {self.host.user}@{self.host.hostname} "
                "true; if they are only slow, give it a longer ConnectTimeout in ~/.ssh/config"
            )
            raise CommandTimeout(self.machine, problem, hint) from None

    def run(self, argv: Sequence[str], *, input: Input = None, timeout: float | None = 60.0) -> Completed:
        """Run a command in the user's home folder there and wait for it.

        Args:
            argv: program and arguments. No shell interprets them; for a script use ``["sh", "-c", SCRIPT, "sh",
            ARG...]``. input: data for stdin. timeout: seconds; ``None`` waits as long as the connection lives.

        Raises:
            SshError: as :meth:`stream`, or NoShell. A failing command is not an error: see ``returncode``.
        """
        with self.stream(argv, CONNECT_TIMEOUT if timeout is None else min(timeout, CONNECT_TIMEOUT)) as process:
            return process.communicate(input, timeout)

    def stream(self, argv: Sequence[str], timeout: float = CONNECT_TIMEOUT) -> RemoteProcess:
        """Start a command within ``timeout`` seconds and return it while it runs; ``argv`` as in :meth:`run`.

        Raises:
            SshError: Dropped, CommandTimeout, or the server opens no more sessions.
        """
        line, first_input = command_line(argv, self._marker)
        deadline = Deadline(timeout)
        try:
            channel = self._open_session(deadline)
            with _closed_after(deadline.remaining, channel):
                channel.exec_command(line)
                if first_input:
                    self._send_first(channel, first_input)
        except (paramiko.SSHException, EOFError, OSError):
            if deadline.passed and self.transport.is_active():
                problem = f"its SSH server did not start a command within {span_text(timeout)}"
                raise CommandTimeout(self.machine, problem, "is the machine overloaded or hung?") from None
            raise self._lost() from None
        process = RemoteProcess(self.host, channel, self._marker)
        process.ran = note(self.machine, argv)
        return process

    def _send_first(self, channel: Any, data: bytes) -> None:
        try:
            channel.sendall(data)
        except OSError:
            if not channel.eof_received:  # else it has ended already: its output says why
                raise

    def _open_session(self, deadline: Deadline) -> Any:
        """Open a session; where the server allows no more of them here, on a further connection to it.

        Raises:
            SshError: it opens none there either, or the connection cannot be made.
        """
        retry_deadline = Deadline(min(_SESSION_RETURN, deadline.remaining))
        session = self._free_session(deadline)
        while session is None and not retry_deadline.passed:
            time.sleep(0.02)
            session = self._free_session(deadline)
        if session is None and self.system:
            with self._further_lock:  # what another thread has opened meanwhile may do
                session = self._free_session(deadline)
                if session is None and len(self._further) < _MOST_FURTHER:
                    self._connect_further()
                    session = self._free_session(deadline)
        if session is None:
            raise SshError(self.machine, "its SSH server opens no more sessions", "raise MaxSessions in sshd_config")
        return session

    def _free_session(self, deadline: Deadline) -> Any:
        """Return a new session on the first connection that the server grants one on; ``None`` if there is none."""
        for connection in (self, *filter(SshConnection.alive, self._further)):
            with contextlib.suppress(paramiko.ChannelException):
                return open_session(connection.transport, max(deadline.remaining, _LOGIN_TIMEOUT))
        return None

    def _connect_further(self) -> None:
        """Log in once more, through the same jump host."""
        options = replace(self._options, password=None, trust=lambda key: key.fingerprint == self.fingerprint)
        further = self._open(self.host, self.gateway, options)
        further._owns_gateway, self._further = False, [*filter(SshConnection.alive, self._further), further]
        if not self.transport.is_active():  # closed meanwhile
            further.close()

    def put(self, source: bytes | Path, remote: str, *, mode: int = 0o600, see: See = unseen) -> None:
        """Write a file there atomically; missing folders are created.

        Args:
            source: content, or a file of this machine.
            remote: path; relative paths and ``~/`` start in the user's home folder.
            see: called with the bytes that were sent, and their number.

        Raises:
            RemoteFileError: it cannot be written there.
            OSError: the local file cannot be read.
        """
        path = remote[2:] if remote.startswith("~/") else remote  # commands start there, and ~ is not expanded
        path = f"./{path}" if path.startswith("-") else path
        with open(source, "rb") if isinstance(source, Path) else io.BytesIO(source) as stream:
            size = os.fstat(stream.fileno()).st_size if isinstance(source, Path) else len(source)
            words = ["sh", "-c", PUT, "sh", path, f"{path}.part-{secrets.token_hex(4)}", str(size), f"{mode:o}"]
            done = self.run(words, input=chunks(stream, size, see), timeout=None)
        if not done.ok:
            full = next(filter(space_hint, done.errors), "")
            hint = space_hint(full) or "check the path and its permissions there"
            raise RemoteFileError(self.machine, f"cannot write {remote}: {full or done.problem}", hint)

    def forward_remote(self, local_address: tuple[str, int], remote_port: int = 0) -> Forward:
        """Listen on a loopback port there and forward its connections to ``local_address`` as seen from here.

        Raises:
            ForwardRefused: the port is in use there, or its SSH server does not forward.
        """
        try:
            forward = self._remote_ports.open(local_address, remote_port)
        except (paramiko.SSHException, EOFError, OSError):
            if not self.transport.is_active():
                raise self._lost() from None
            problem = f"its SSH server does not forward {f'port {remote_port}' if remote_port else 'ports'} for us"
            hint = "is the port in use there? Else " if remote_port else ""
            hint += (
                "set AllowTcpForwarding yes in its sshd_config, and see that nothing before your key in "
                "~/.ssh/authorized_keys there forbids it (restrict, no-port-forwarding, permitlisten)"
            )
            raise ForwardRefused(self.machine, problem, hint) from None
        self._forwards.append(forward)
        return forward

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the host key, which identifies the machine."""
        return fingerprint(self.transport.get_remote_server_key().asbytes())

    @property
    def peer(self) -> str:
        """Literal address of the machine; empty where the connection goes through another program."""
        try:
            return str(self.transport.getpeername()[0])
        except (OSError, IndexError, AttributeError):
            return ""

    def alive(self) -> bool:
        """Whether the remote side has answered recently, judged by heartbeats: a cut cable raises no error."""
        return bool(self.transport.is_active()) and not self._heartbeat.silent

    def _lost(self) -> Dropped:
        return Dropped(self.machine, f"the connection to {self.host.host_port} was lost", LOST_HINT)

    def close(self) -> None:
        """Close everything on the connection, and the connections it goes through. Idempotent."""
        self._remote_ports.leave()
        for forward in self._forwards:
            forward.close()
        self._forwards.clear()
        self._heartbeat.stop()
        for connection in self._further:
            connection.close()
        self.transport.close()
        if self.gateway is not None and self._owns_gateway:
            self.gateway.close()

    def __enter__(self) -> SshConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _closed_after(seconds: float, channel: Any) -> Iterator[None]:
    """Close a channel after ``seconds`` in the context: paramiko has no timeout for the reply to ``exec``."""

    def close() -> None:
        with contextlib.suppress(EOFError, OSError):  # the connection was lost meanwhile
            channel.close()

    timer = threading.Timer(seconds, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
