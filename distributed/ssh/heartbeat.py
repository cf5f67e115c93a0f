"""Heartbeats of our own on an SSH connection: a cut cable is noticed in seconds, not minutes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import paramiko
from paramiko.common import cMSG_GLOBAL_REQUEST

from distributed.ssh.wire import Wire

_MISSED = 4
"""Heartbeats in silence after which the connection counts as lost."""


class Heartbeat:
    """Asks the far side for an answer every ``interval`` seconds and closes the transport after four in silence.

    Closing wakes whoever waits on the connection. Bytes of any kind count as a sign of life, so that a slow link full
    of bulk data is not taken for a dead one. Asking waits behind what others write and, on a cut link, for ever; so
    another thread watches the silence.
    """

    def __init__(self, transport: Any, wire: Wire, interval: float) -> None:
        self._transport = transport
        self._wire = wire
        self._interval = interval
        self._limit = _MISSED * interval
        self._requests = threading.Lock()
        """paramiko has room for one unanswered global request."""
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ssh-silence", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._ask_again, name="ssh-heartbeat", daemon=True).start()

    @property
    def silence(self) -> float:
        """Seconds since anything was heard."""
        return time.monotonic() - self._wire.last_heard

    @property
    def silent(self) -> bool:
        return self.silence > self._limit

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
        while not self._stopped.wait(min(self._interval, 0.25)) and self._transport.is_active():
            if self.silent:
                self._transport.close()

    def _ask_again(self) -> None:
        while not self._stopped.wait(self._interval) and self._transport.is_active():
            if self._requests.acquire(timeout=self._interval):
                try:
                    self._ask()
                finally:
                    self._requests.release()

    def _ask(self) -> None:
        """Send one request and wait for its answer, or until the silence is too long."""
        answered = threading.Event()
        self._transport.completion_event = answered
        message = paramiko.Message()
        message.add_byte(cMSG_GLOBAL_REQUEST)
        message.add_string("keepalive@openssh.com")
        message.add_boolean(True)
        try:
            self._transport._send_user_message(message)
        except (paramiko.SSHException, EOFError, OSError):
            return
        while not answered.wait(min(self._interval, 0.2)):
            if self._stopped.is_set() or self.silent or not self._transport.is_active():
                return
