"""One direction between two members once they have met."""

from __future__ import annotations

import os
import socket
import weakref
from dataclasses import dataclass

from training.exchange.dialling import Route
from training.exchange.sealing import Cipher

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def let_go_in_child(connection: socket.socket) -> None:
    """Have a forked process (a data loader's worker) close it: or nobody hears of its parent's end."""
    _open.add(connection)


def _let_go() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class Connection:
    """One direction after its hello.

    Args:
        socket: connected, blocking.
        sealed: whether frames are encrypted; not where the socket itself is, or in clear on loopback.
        round_trip: seconds to the peer and back; 0 if that is not known.
        address: of the peer; empty: the relay passes everything on.
        route: how the two have met, as seen from this end.
        loses_large: whether large packets were lost on a way between the two, so that this one was taken, or is used
            with small ones only.
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
        let_go_in_child(self.socket)
