"""What an SSH connection carries beside commands: heartbeats, and TCP ports, on loopback only."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko

from distributed.ssh.channel import in_order
from distributed.ssh.wire import SshStream

_CHUNK = 64 * 1024
_TIMEOUT = 10.0
_MISSED = 4
"""Heartbeats in silence after which the connection counts as lost."""
LOOPBACK = "127.0.0.1"


class Silence:
    """How long nothing was heard of the time in which somebody listened.

    A computer that slept, or had no processor for this program, has not listened meanwhile: what came is still to be
    read. So between two looks, which should be ``pause`` seconds apart, twice as long counts at most.
    """

    def __init__(self, pause: float) -> None:
        self.seconds = 0.0
        self._pause = pause
        self._looked = self._heard = 0.0

    def look(self, now: float, heard: float) -> None:
        """Count on; ``heard`` is when something was heard last."""
        self.seconds = self.seconds + min(now - self._looked, 2 * self._pause) if heard == self._heard else 0.0
        self._looked, self._heard = now, heard


class Heartbeat:
    """Asks the far side for an answer every ``interval`` seconds and closes the transport after four in silence.

    Closing wakes whoever waits on the connection. Bytes of any kind count as a sign of life, so that a slow link full
    of bulk data is not taken for a dead one. Asking waits behind what others write and, on a cut link, for ever; so
    another thread watches the silence.
    """

    def __init__(self, transport: Any, wire: SshStream, interval: float) -> None:
        self._transport = transport
        self._wire = wire
        self._interval = interval
        self._pause = min(interval, 0.25)
        self._silence = Silence(self._pause)
        self._requests = threading.Lock()
        """paramiko has room for one unanswered global request."""
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ssh-silence", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._ask_again, name="ssh-heartbeat", daemon=True).start()

    @property
    def silent(self) -> bool:
        """Whether nothing was heard for too long."""
        return self._silence.seconds > _MISSED * self._interval

    @contextlib.contextmanager
    def exclusive(self, timeout: float) -> Iterator[None]:
        """Hold heartbeats back while a global request of another kind is under way."""
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
            self._silence.look(time.monotonic(), self._wire.last_heard)
            if self.silent:
                self._transport.close()

    def _ask_again(self) -> None:
        while not self._stopped.wait(self._interval) and self._transport.is_active():
            if self._requests.acquire(timeout=self._interval):
                try:
                    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                        self._transport.global_request("keepalive@openssh.com")  # until it answers, or is closed
                finally:
                    self._requests.release()


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
            if self._closed:
                _close(near, far)
                return
            self._open |= {near, far}
        back = threading.Thread(target=_carry, args=(far, near), daemon=True)
        back.start()
        _carry(near, far)
        back.join()
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
        with self._heartbeat.exclusive(_TIMEOUT):
            port = self._transport.request_port_forward(LOOPBACK, far_port, self._arrived)
        forward = Forward(port, lambda: self._give_back(port))
        self._known[port] = (forward, address)
        return forward

    def leave(self) -> None:
        """The connection is about to close: its ports end with it and need not be given back one by one."""
        self._leaving = True

    def _arrived(self, channel: Any, origin: tuple[str, int], server: tuple[str, int]) -> None:
        """Called by paramiko's own thread, which must not wait."""
        target, channel = self._known.get(server[1]), in_order(channel)
        if target is None:
            channel.close()
        else:
            threading.Thread(target=_join_new, args=(*target, channel), name="ssh-forward", daemon=True).start()

    def _give_back(self, port: int) -> None:
        """End one port; paramiko's own way would forget the handler of all the others."""
        self._known.pop(port, None)
        if self._leaving:
            return
        quiet = contextlib.suppress(paramiko.SSHException, EOFError, OSError)
        with quiet, self._heartbeat.exclusive(_TIMEOUT):
            self._transport.global_request("cancel-tcpip-forward", (LOOPBACK, port), wait=True)


def _join_new(forward: Forward, address: tuple[str, int], channel: Any) -> None:
    try:
        near = socket.create_connection(address, timeout=_TIMEOUT)
    except OSError:
        _close(channel)
        return
    near.settimeout(None)
    with contextlib.suppress(OSError):  # macOS: it has left already
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
