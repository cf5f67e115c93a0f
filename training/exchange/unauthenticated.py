"""Limits of connections whose peer has not authenticated yet: a total, and a limit for each host."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter

HANDSHAKE_SECONDS = 10.0
"""Seconds after which an unauthenticated connection is closed."""
MAX_CONNECTIONS = 64
MAX_PER_HOST = 32
"""One host alone cannot lock out the others; members behind one router can still connect together."""


class UnauthenticatedConnections:
    """Counts connections whose handshake is in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._hosts.total()

    def enter(self, host: str) -> bool:
        """Count one more connection of ``host``, a literal address; return whether it is within the limits."""
        with self._lock:
            if self._hosts.total() >= MAX_CONNECTIONS or self._hosts[network_of(host)] >= MAX_PER_HOST:
                return False
            self._hosts[network_of(host)] += 1
            return True

    def leave(self, host: str) -> None:
        """Uncount a connection that has entered."""
        with self._lock:
            self._hosts[network_of(host)] -= 1
            if not self._hosts[network_of(host)]:
                del self._hosts[network_of(host)]


def network_of(host: str) -> str:
    """Return the network of one host: its IPv4 address, or the 64 bits of IPv6 that a provider hands out."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return host if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
