"""Heartbeats and forwarded TCP ports of an SSH connection, on loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko

from distributed.ssh.channel import ordered
from distributed.ssh.wire import SshStream

_CHUNK = 64 * 1024
_TIMEOUT = 10.0
_MISSED = 4
"""Unanswered heartbeats after which the connection counts as lost."""
LOOPBACK = "127.0.0.1"


class Silence:
    """Measures for how long nothing was received, counting only time in which this process was running.

    While the computer slept, or this process was not scheduled, received data was not read yet. So at most twice
    ``pause``, the intended time between two updates, is counted between them.
    """

    def __init__(self, pause: float) -> None:
        self.seconds = 0.0
        self._pause = pause
        self._updated = self._heard = 0.0

    def update(self, now: float, heard: float) -> None:
        """Update the count; ``heard`` is when something was last received."""
        self.seconds = self.seconds + min(now - self._updated, 2 * self._pause) if heard == self._heard else 0.0
        self._updated, self._heard = now, heard


class Heartbeat:
    """Requests a reply every ``interval`` seconds and closes the transport after four without any data.

    Closing wakes all threads that wait on the connection. Bytes of any kind count as a sign of life, so that a slow
    link full of bulk data is not taken for a dead one. A request is queued behind other writes and, on a cut link,
    blocks for ever; so another thread watches the silence.
    """

    def __init__(self, transport: Any, wire: SshStream, interval: float) -> None:
        self._transport = transport
        self._wire = wire
        self._interval = interval
        self._pause = min(interval, 0.25)
        self._silence = Silence(self._pause)
        self._requests = threading.Lock()
        """paramiko supports only one unanswered global request."""
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ssh-silence", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._send_heartbeats, name="ssh-heartbeat", daemon=True).start()

    @property
    def silent(self) -> bool:
        """Whether nothing was received for too long."""
        return self._silence.seconds > _MISSED * self._interval

    @contextlib.contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Pause heartbeats while another kind of global request is in progress."""
        held = self._requests.acquire(timeout=timeout)
        try:
            yield
        finally:
            if held:
                self._requests.release()

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._pause) and self._transport.is_active():
            self._silence.update(time.monotonic(), self._wire.last_heard)
            if self.silent:
                self._transport.close()

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(self._interval) and self._transport.is_active():
            if self._requests.acquire(timeout=self._interval):
                try:
                    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                        # Blocks until the reply, or until the transport is closed.
                        self._transport.global_request("keepalive@openssh.com")
                finally:
                    self._requests.release()


class Forward:
    """A forwarded port; closing it ends new and existing connections.

    ``port`` is the listening port: on this machine for a local forward, on the remote one for a remote forward.
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

    def join(self, local: Any, remote: Any) -> None:
        """Copy bytes between two streams until both directions have ended."""
        with self._lock:
            if self._closed:
                _close(local, remote)
                return
            self._open |= {local, remote}
        back = threading.Thread(target=_carry, args=(remote, local), daemon=True)
        back.start()
        _carry(local, remote)
        back.join()
        _close(local, remote)
        with self._lock:
            self._open -= {local, remote}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._open)
        self._stop()
        for stream in streams:
            with contextlib.suppress(OSError, EOFError):
                stream.shutdown(socket.SHUT_RDWR)
            _close(stream)


class RemotePorts:
    """The ports on which the remote side listens for us."""

    def __init__(self, transport: Any, heartbeat: Heartbeat) -> None:
        self._transport = transport
        self._heartbeat = heartbeat
        self._forwards: dict[int, tuple[Forward, tuple[str, int]]] = {}
        self._leaving = False

    def open(self, address: tuple[str, int], remote_port: int) -> Forward:
        """Make the remote side listen on a loopback port, 0 for any, and forward its connections to ``address``.

        Raises:
            paramiko.SSHException: it refuses, or the connection is lost.
        """
        with self._heartbeat.exclusive(_TIMEOUT):
            port = self._transport.request_port_forward(LOOPBACK, remote_port, self._accept)
        forward = Forward(port, lambda: self._cancel(port))
        self._forwards[port] = (forward, address)
        return forward

    def leave(self) -> None:
        """Prepare for closing: the ports end with the connection and need not be cancelled one by one."""
        self._leaving = True

    def _accept(self, channel: Any, origin: tuple[str, int], server: tuple[str, int]) -> None:
        """Handle a new connection; called by paramiko's own thread, which must not block."""
        target, channel = self._forwards.get(server[1]), ordered(channel)
        if target is None:
            channel.close()
        else:
            threading.Thread(target=_connect_and_join, args=(*target, channel), name="ssh-forward", daemon=True).start()

    def _cancel(self, port: int) -> None:
        """Cancel one port; paramiko's own method would drop the handlers of all others."""
        self._forwards.pop(port, None)
        if self._leaving:
            return
        quiet = contextlib.suppress(paramiko.SSHException, EOFError, OSError)
        with quiet, self._heartbeat.exclusive(_TIMEOUT):
            self._transport.global_request("cancel-tcpip-forward", (LOOPBACK, port), wait=True)


def _connect_and_join(forward: Forward, address: tuple[str, int], channel: Any) -> None:
    try:
        local = socket.create_connection(address, timeout=_TIMEOUT)
    except OSError:
        _close(channel)
        return
    local.settimeout(None)
    with contextlib.suppress(OSError):  # macOS: the peer has disconnected already
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    forward.join(local, channel)


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
