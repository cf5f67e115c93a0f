"""TCP ports carried through an SSH connection, in both directions, on loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import paramiko

from distributed.ssh.heartbeat import Heartbeat

_CHUNK = 64 * 1024
_PATIENCE = 10.0
LOOPBACK = "127.0.0.1"


class Forward:
    """A port that is being forwarded; closing it ends new and running connections.

    ``port`` is where it listens: on this machine for a local forward, on the far one for a remote forward.
    """

    def __init__(self, port: int, stop: Callable[[], None]) -> None:
        self.port = port
        self._stop = stop
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def address(self) -> str:
        """``host:port`` to connect to."""
        return f"{LOOPBACK}:{self.port}"

    def join(self, near: Any, far: Any) -> None:
        """Carry bytes between two streams until both directions have ended."""
        with self._lock:
            refused = self._closed
            if not refused:
                self._open |= {near, far}
        if refused:
            _close(near, far)
            return
        halves = [threading.Thread(target=_carry, args=pair, daemon=True) for pair in ((near, far), (far, near))]
        for half in halves:
            half.start()
        threading.Thread(target=self._finish, args=(halves, near, far), daemon=True).start()

    def _finish(self, halves: list[threading.Thread], near: Any, far: Any) -> None:
        for half in halves:
            half.join()
        _close(near, far)
        with self._lock:
            self._open -= {near, far}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._open)
        self._stop()
        for stream in streams:
            with contextlib.suppress(OSError, EOFError):
                stream.shutdown(socket.SHUT_RDWR)
            _close(stream)

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FarPorts:
    """The ports that the far side listens on for us."""

    def __init__(self, transport: Any, heartbeat: Heartbeat) -> None:
        self._transport = transport
        self._heartbeat = heartbeat
        self._known: dict[int, tuple[Forward, tuple[str, int]]] = {}
        self._leaving = False

    def open(self, address: tuple[str, int], far_port: int) -> Forward:
        """Let the far side listen on a loopback port, 0 for any, and carry its connections to ``address``.

        Raises:
            paramiko.SSHException: it refuses, or the connection is lost.
        """
        with self._heartbeat.exclusive(_PATIENCE):
            port = self._transport.request_port_forward(LOOPBACK, far_port, self._arrived)
        forward = Forward(port, lambda: self._give_back(port))
        self._known[port] = (forward, address)
        return forward

    def leave(self) -> None:
        """The connection is about to close: its ports end with it and need not be given back one by one."""
        self._leaving = True

    def _arrived(self, channel: Any, origin: tuple[str, int], server: tuple[str, int]) -> None:
        """Called by paramiko's own thread, which must not wait."""
        known = self._known.get(server[1])
        if known is None:
            channel.close()
        else:
            threading.Thread(target=_join_new, args=(*known, channel), name="ssh-forward", daemon=True).start()

    def _give_back(self, port: int) -> None:
        """End one port; paramiko's own way would forget the handler of all the others."""
        self._known.pop(port, None)
        if self._leaving:
            return
        quiet = contextlib.suppress(paramiko.SSHException, EOFError, OSError)
        with quiet, self._heartbeat.exclusive(_PATIENCE):
            self._transport.global_request("cancel-tcpip-forward", (LOOPBACK, port), wait=True)


def _join_new(forward: Forward, address: tuple[str, int], channel: Any) -> None:
    try:
        near = socket.create_connection(address, timeout=_PATIENCE)
    except OSError:
        channel.close()
        return
    near.settimeout(None)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    forward.join(near, channel)


def _carry(source: Any, sink: Any) -> None:
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    except (OSError, EOFError):
        _close(source, sink)
        return
    with contextlib.suppress(OSError, EOFError):
        sink.shutdown(socket.SHUT_WR)


def _close(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, EOFError):
            stream.close()
