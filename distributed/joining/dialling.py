"""The side that joins: dials a door, and pairs with the one that knows the code."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Callable, Iterator

from distributed.hosts.file import split_address
from distributed.hosts.joined import DEFAULT_PORT
from distributed.joining.lending.terms import LendingTerms
from distributed.joining.pairing.codes import Code
from distributed.joining.pairing.exchange import (
    DECISION,
    LONGEST_FRAME,
    MESSAGE_BYTES,
    BadPeer,
    Introduction,
    Pairing,
)
from distributed.joining.pairing.frames import frame
from distributed.joining.pairing.introductions import address_text
from distributed.joining.pairing.keys import JoiningKey
from distributed.joining.pools import JoinedPool, save_pool
from profiles.errors import BadInput, MachinesNotReady
from training.exchange.links.dialling import keep_alive
from training.exchange.unauthenticated import HANDSHAKE_SECONDS

CONNECT_SECONDS = 10.0
_UNACKNOWLEDGED = 20.0
"""Seconds of unacknowledged data after which a connection is closed, as for connections that we dial over SSH."""


def split_door(text: str) -> tuple[str, int]:
    """Return host and port of ``host[:port]``."""
    address = split_address(text)
    return str(address["name"]), int(address["port"] or DEFAULT_PORT)


def dial_door(address: str, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """Return a connection to a door.

    Raises:
        OSError: it cannot be reached.
    """
    try:
        stream = socket.create_connection(split_door(address), timeout=seconds)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "that is no host name") from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_cut(stream)
    return stream


def end_when_cut(stream: socket.socket) -> None:
    """Have a connection end within half a minute once its other side cannot be reached."""
    keep_alive(stream)
    if sys.platform == "linux":  # while data are unacknowledged, no probe is sent
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNACKNOWLEDGED))


class Meeting:
    """A door that knows the code; both sides have introduced themselves, and nobody has agreed yet.

    Args:
        address: ``host[:port]`` of the door.
        identity: the key of this computer, which its introduction names.
        introduction: what the other one is told of this computer.

    Raises:
        BadInput: the code is wrong, or closed.
        MachinesNotReady: no door is there.
    """

    def __init__(self, code: Code, address: str, identity: JoiningKey, introduction: Introduction) -> None:
        host, port = split_door(address)
        self.door = address_text(host, port)
        try:
            self._stream = dial_door(address)
        except OSError as error:
            raise _unreachable(self.door, error) from None
        with contextlib.ExitStack() as unless_met:
            unless_met.callback(self._stream.close)
            self._pairing = Pairing(code, is_helper=True)
            with _explained(self.door):
                self.pool = self._introduce(code, identity, introduction)
            unless_met.pop_all()

    def _introduce(self, code: Code, identity: JoiningKey, introduction: Introduction) -> Introduction:
        end = time.monotonic() + HANDSHAKE_SECONDS
        self._stream.sendall(f"muster 1 pair {code.slot}\n".encode() + self._pairing.message)
        self._pairing.finish(_exactly(self._stream, MESSAGE_BYTES, end))
        self._stream.sendall(frame(self._pairing.seal_introduction(introduction, identity)))
        return self._pairing.open_introduction(_frame(self._stream, end))

    def agree(self, decide: Callable[[Introduction], bool], terms: LendingTerms | None = None) -> JoinedPool:
        """Join the computer, and remember it once both people have agreed; ends the connection.

        Args:
            decide: asks the person here.
            terms: what it may run here; default: everything.

        Raises:
            MachinesNotReady: somebody has not agreed, or the connection was lost.
        """
        with self._stream, _explained(self.door):
            is_willing = decide(self.pool)
            self._stream.sendall(frame(self._pairing.seal({"yes": is_willing})))
            if not is_willing:
                raise MachinesNotReady("not joined: you did not agree", "")
            answer = self._pairing.open(_frame(self._stream, time.monotonic() + DECISION))
        if answer.get("admitted") is not True:
            problem = f"{self.pool.name} has not admitted this computer"
            raise MachinesNotReady(problem, "ask the person there", machine=self.door)
        addresses = tuple(dict.fromkeys((self.door, *self.pool.addresses)))
        known_as = str(answer.get("as", ""))[:64]
        joined = JoinedPool(self.pool.name, self.pool.key, addresses, known_as, terms or LendingTerms())
        save_pool(joined)
        return joined

    def close(self) -> None:
        self._stream.close()


@contextlib.contextmanager
def _explained(door: str) -> Iterator[None]:
    """Raise what a peer's end or silence means as errors that a person can act on."""
    try:
        yield
    except _Refused:
        hint = "read it once more; a code is good once, for ten minutes, and share makes another one there"
        raise BadInput("this is not an open code of that computer", hint, machine=door) from None
    except (BadPeer, EOFError):
        hint = "does the address lead to the computer that shares the code?"
        raise MachinesNotReady("the connection ended before this computer had joined", hint, machine=door) from None
    except OSError as error:
        raise _unreachable(door, error) from None


def _unreachable(door: str, error: OSError) -> MachinesNotReady:
    reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    hint = "is that its address, and does its firewall let this port in? The computer that shares shows the address"
    return MachinesNotReady(f"cannot reach a door there: {reason}", hint, machine=door)


class _Refused(Exception):
    """The door does not take the code."""


def _exactly(stream: socket.socket, size: int, end: float) -> bytes:
    """Return so many bytes, however slowly they come.

    Args:
        end: on the monotonic clock.

    Raises:
        TimeoutError: they did not come in time; EOFError: the connection ended.
    """
    data = b""
    while len(data) < size:
        stream.settimeout(max(end - time.monotonic(), 0.001))
        piece = stream.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _frame(stream: socket.socket, end: float) -> bytes:
    length = int.from_bytes(_exactly(stream, 2, end), "big")
    if length == 0:
        raise _Refused
    if length > LONGEST_FRAME:
        raise BadPeer
    return _exactly(stream, length, end)
