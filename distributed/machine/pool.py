"""The living SSH connections of one process: whoever asks for a machine's connection gets the one that is there.

A log-in takes a second on a slow machine, and its server may limit them (MaxStartups, fail2ban). So the guided set-up
and the process of a run hold one pool each, and log in to every machine once, until its connection is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.ssh.connection import CONNECT_TIMEOUT, SshConnection, SshTarget, Trust
from profiles.errors import BadInput


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the connection is made, so that others wait for it and do not log in beside it."""
    connection: SshConnection | None = None
    abandoned: bool = False
    """Whether the pool was closed; nobody waits for a log-in under way then."""


class _Dialling(threading.local):
    """The targets that a thread is dialling, one through the other."""

    def __init__(self) -> None:
        self._targets: list[SshTarget] = []

    @contextlib.contextmanager
    def entered(self, target: SshTarget) -> Iterator[None]:
        """Add a target for the duration of the context.

        Raises:
            BadInput: it is reached through itself.
        """
        if target in self._targets:
            raise BadInput(
                "it is its own jump host", "does ProxyJump in ~/.ssh/config go in a circle?", machine=target.name
            )
        self._targets.append(target)
        try:
            yield
        finally:
            self._targets.pop()


class ConnectionPool:
    """Connections by target; thread-safe, and a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[SshTarget, _Slot] = {}
        self._dialling = _Dialling()

    def get(
        self,
        target: SshTarget,
        trust: Trust | None = None,
        timeout: float = CONNECT_TIMEOUT,
        login: SshTarget | None = None,
    ) -> SshConnection:
        """Return the living connection to a target; made where there is none, or where it was lost. The connection to
        a jump host before it is one of the pool as well.

        Args:
            login: the target with another key to log in with now.

        Raises:
            SshError, BadInput: as :meth:`SshConnection.connect`.
        """
        with self._lock:
            slot = self._slots.setdefault(target, _Slot())
        with self._dialling.entered(target), slot.lock:
            if slot.connection is not None and not slot.connection.alive():
                slot.connection.close()
                slot.connection = None
            if slot.connection is None:
                connection = SshConnection.connect(
                    login or target,
                    trust=trust,
                    timeout=timeout,
                    gateways=lambda jump: self.get(replace(jump, name=jump.host), trust, timeout),
                )
                with self._lock:
                    slot.connection = connection
                if slot.abandoned:
                    connection.close()
            return slot.connection

    @contextlib.contextmanager
    def using(self, target: SshTarget, **options: Any) -> Iterator[SshConnection]:
        """Yield :meth:`get`'s connection, which stays open: stands in for :meth:`SshConnection.connect`."""
        yield self.get(target, **options)

    def close(self) -> None:
        """Close all connections; one that is asked for later is made again. Idempotent."""
        with self._lock:
            slots, self._slots = list(self._slots.values()), {}
            for slot in slots:
                slot.abandoned = True
        for slot in slots:
            if slot.connection is not None:
                slot.connection.close()

    def __enter__(self) -> ConnectionPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
