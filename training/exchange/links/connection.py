"""One direction of a link between two members, once it is established."""

from __future__ import annotations

import os
import socket
import weakref
from dataclasses import dataclass

from training.exchange.links.dialling import Route
from training.exchange.links.sealing import Cipher

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(connection: socket.socket) -> None:
    """Have forked processes (data loader workers) close the socket, or peers would not notice the parent's end."""
    _open.add(connection)


def _close_open_sockets() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_open_sockets)


@dataclass(frozen=True)
class Connection:
    """One direction after its handshake.

    Args:
        socket: connected, blocking.
        sealed: whether frames are encrypted; not where the socket itself is, or in clear on loopback.
        round_trip: seconds to the peer and back; 0 if unknown.
        address: of the peer; empty: everything goes through the relay.
        route: how the connection was established, as seen from this end.
        loses_large: whether large packets were lost on a route between the two, so that this one was chosen, or only
            small packets are sent.
    """

    socket: socket.socket
    secret: bytes
    cipher: Cipher
    sealed: bool
    round_trip: float = 0.0
    address: str = ""
    route: Route = "dialled"
    loses_large: bool = False

    def __post_init__(self) -> None:
        close_in_child(self.socket)
