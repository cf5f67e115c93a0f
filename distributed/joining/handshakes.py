"""Connections to the door whose peer has not shown who it is: bounded, and nobody can occupy them."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter

from training.exchange.unauthenticated import MAX_CONNECTIONS, network_of


class PendingHandshakes:
    """Handshakes in progress. Where there are too many, the oldest one of the network that has most of them gives way.

    So who opens many connections and says nothing keeps nobody out. Not thread-safe.
    """

    def __init__(self) -> None:
        self._networks: dict[socket.socket, str] = {}
        """In the order in which they came."""

    def __len__(self) -> int:
        return len(self._networks)

    def enter(self, stream: socket.socket, host: str) -> None:
        """Take a connection of ``host``, a literal address."""
        self._networks[stream] = network_of(host)
        if len(self._networks) > MAX_CONNECTIONS:
            counts = Counter(self._networks.values())
            oldest = max(self._networks, key=lambda one: counts[self._networks[one]])  # the first of equal ones
            self.leave(oldest)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its reader is woken, and closes it

    def leave(self, stream: socket.socket) -> None:
        """Forget a connection that is over, or has shown who it is. Idempotent."""
        self._networks.pop(stream, None)
