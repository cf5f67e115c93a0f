"""An SSH server on a connection that this computer has opened: how a machine that dials out is driven.

One key may log in, that of the pool. It may have commands carried out, as far as this computer is lent to it
(:mod:`distributed.joining.lending`), and loopback ports forwarded; terminals, agents, files by SFTP and connections to
other machines are refused.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko

from distributed.ssh.channel import ordered
from distributed.ssh.forward import LOOPBACK

LOGIN_SECONDS = 20.0
_KEEPALIVE = 5
_CHUNK = 64 * 1024
Execute = Callable[[Any, bytes], None]


class Ports:
    """The loopback ports that a pool has here, over all its sessions: a later session gets a port of an earlier one.

    Args:
        listen: returns a socket that listens on a loopback port of the pool's box.
    """

    def __init__(self, listen: Callable[[int], socket.socket]) -> None:
        self._listen = listen
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
            listener = self._listen(port)
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

    def __init__(self, transport: Any, pool_key: str, execute: Execute, ports: Ports) -> None:
        self._transport, self._pool_key, self._execute, self._ports = transport, pool_key, execute, ports
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
        threading.Thread(target=self._execute, args=(ordered(channel), command), daemon=True).start()
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


class SshServer:
    """The SSH server on one connection.

    Args:
        stream: a connected socket.
        key_file: this computer's host key.
        pool_key: the key that may log in, base64 of its wire format.
        execute: carries out a command, given its channel, in a thread.
    """

    def __init__(self, stream: socket.socket, key_file: Path, pool_key: str, execute: Execute, ports: Ports) -> None:
        self._transport = paramiko.Transport(stream)
        self._transport.add_server_key(paramiko.Ed25519Key(filename=str(key_file)))
        self._transport.set_keepalive(_KEEPALIVE)
        self._session = _Session(self._transport, pool_key, execute, ports)

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
