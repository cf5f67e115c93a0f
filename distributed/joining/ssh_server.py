"""An SSH server on a connection that this computer has opened: how a machine that dials out is driven.

One key may log in, that of the pool. It may run commands, with this user's rights, and have loopback ports forwarded;
terminals, agents, files by SFTP and connections to other machines are refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import paramiko

from distributed.joining.guard import MARK
from distributed.ssh.channel import ordered
from distributed.ssh.forward import LOOPBACK

LOGIN_SECONDS = 20.0
_KEEPALIVE = 5
_CHUNK = 64 * 1024
_OUTPUT_PATIENCE = 5.0
"""Seconds for the rest of a command's output after its end: what it left running may hold it open."""
_PASSED = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LANGUAGE", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE",
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "UV_INDEX_URL", "HF_HOME", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables of the process that has joined which commands get; tokens and keys in others stay here."""


class Ports:
    """The loopback ports that a pool has here, over all its sessions: a later session gets a port of an earlier one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, socket.socket] = {}

    def open(self, port: int) -> socket.socket:
        """Listen on a loopback port, 0 for any.

        Raises:
            OSError: it is in use.
        """
        with self._lock:
            if (earlier := self._listeners.pop(port, None)) is not None:
                _hang_up(earlier)
            listener = socket.create_server((LOOPBACK, port))
            self._listeners[listener.getsockname()[1]] = listener
            return listener

    def close(self, port: int, listener: socket.socket | None) -> None:
        """Close a port, if it has this listener still. Idempotent."""
        with self._lock:
            if self._listeners.get(port) is listener:
                del self._listeners[port]
        if listener is not None:
            _hang_up(listener)


def _hang_up(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listener.close()


class _Session(paramiko.ServerInterface):  # type: ignore[misc, unused-ignore]  # paramiko has no types
    """What one login may do."""

    def __init__(self, transport: Any, pool_key: str, mark: str, ports: Ports) -> None:
        self._transport, self._pool_key, self._mark, self._ports = transport, pool_key, mark, ports
        self._listeners: dict[int, socket.socket] = {}

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: Any) -> int:
        is_pool = key.get_base64() == self._pool_key
        return int(paramiko.AUTH_SUCCESSFUL if is_pool else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, number: int) -> int:
        if kind == "session":
            return int(paramiko.OPEN_SUCCEEDED)
        return int(paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED)

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        threading.Thread(target=_execute, args=(ordered(channel), command, self._mark), daemon=True).start()
        return True

    def check_global_request(self, kind: str, message: Any) -> bool:
        return kind == "keepalive@openssh.com"

    def check_port_forward_request(self, address: str, port: int) -> int | bool:
        if address not in (LOOPBACK, "localhost"):
            return False
        try:
            listener = self._ports.open(port)
        except (OSError, OverflowError):
            return False
        number = int(listener.getsockname()[1])
        self._listeners[number] = listener
        threading.Thread(target=self._forward, args=(listener, number), daemon=True).start()
        return number

    def cancel_port_forward_request(self, address: str, port: int) -> None:
        self._ports.close(port, self._listeners.pop(port, None))

    def end(self) -> None:
        """Close the ports of this login."""
        for port, listener in self._listeners.items():
            self._ports.close(port, listener)

    def _forward(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                stream, origin = listener.accept()
            except OSError:
                return
            try:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel = ordered(self._transport.open_forwarded_tcpip_channel(origin, (LOOPBACK, port)))
            except (paramiko.SSHException, OSError, EOFError):
                stream.close()
                continue
            threading.Thread(target=_join, args=(stream, channel), daemon=True).start()


def _join(stream: socket.socket, channel: Any) -> None:
    """Copy bytes both ways until both directions have ended."""
    back = threading.Thread(target=_copy, args=(channel, stream, lambda: stream.shutdown(socket.SHUT_WR)), daemon=True)
    back.start()
    _copy(stream, channel, channel.shutdown_write)
    back.join()
    for end in (stream, channel):
        with contextlib.suppress(OSError, EOFError):
            end.close()


def _copy(source: Any, sink: Any, end: Any) -> None:
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        end()
    except (OSError, EOFError):
        for broken in (source, sink):
            with contextlib.suppress(OSError, EOFError):
                broken.close()


def _execute(channel: Any, command: bytes, mark: str) -> None:
    """Run a command in the home folder as sshd does: it is not ended with the connection."""
    variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
    variables |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, cwd=Path.home(),
            env={**variables, MARK: mark}, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, EOFError):
            channel.sendall_stderr(f"{error}\n".encode())
            channel.send_exit_status(127)
            channel.close()
        return
    outputs = ((process.stdout, channel.sendall), (process.stderr, channel.sendall_stderr))
    threading.Thread(target=_feed, args=(channel, process.stdin), daemon=True).start()
    threads = [threading.Thread(target=_drain, args=output, daemon=True) for output in outputs]
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join(_OUTPUT_PATIENCE)
    with contextlib.suppress(OSError, EOFError):
        channel.send_exit_status(code if code >= 0 else 128 - code)
        channel.shutdown_write()
    with contextlib.suppress(OSError, EOFError):
        channel.close()


def _feed(channel: Any, stream: Any) -> None:
    with contextlib.suppress(OSError, EOFError, ValueError):
        while data := channel.recv(_CHUNK):
            stream.write(data)
            stream.flush()
    with contextlib.suppress(OSError, ValueError):
        stream.close()


def _drain(stream: Any, send: Any) -> None:
    """Send a command's output; once nobody takes it, close it, so that the command does not wait for ever."""
    with contextlib.suppress(OSError, EOFError, ValueError), stream:
        while data := os.read(stream.fileno(), _CHUNK):
            send(data)


class SshServer:
    """The SSH server on one connection.

    Args:
        stream: a connected socket.
        key_file: this computer's host key.
        pool_key: the key that may log in, base64 of its wire format.
        mark: the value of :data:`MARK` for what it runs.
    """

    def __init__(self, stream: socket.socket, key_file: Path, pool_key: str, mark: str, ports: Ports) -> None:
        self._transport = paramiko.Transport(stream)
        self._transport.add_server_key(paramiko.Ed25519Key(filename=str(key_file)))
        self._transport.set_keepalive(_KEEPALIVE)
        self._session = _Session(self._transport, pool_key, mark, ports)

    def serve(self) -> None:
        """Serve until the connection ends; it ends where nobody logs in within twenty seconds."""
        timer = threading.Timer(LOGIN_SECONDS, self._require_login)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                self._transport.start_server(server=self._session)
                self._transport.join()
        finally:
            timer.cancel()
            self.close()

    def _require_login(self) -> None:
        if not self._transport.is_authenticated():
            self._transport.close()

    def close(self) -> None:
        """End the connection; commands go on. Idempotent."""
        self._transport.close()
        self._session.end()
