"""The handshake of a connection: TLS 1.3 with the run's certificates, and a hello that says what the connection is for.

Regardless of which end dialled, the sender decides which of several connections is used, so that both ends use the
same one. Both check that the other's certificate is of this run and of the rank it claims. The sender's decision is
padded to the length of a large packet: a route that carries only small ones is detected here, not in the first
exchange (RFC 2923, 2.1).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from profiles.errors import BadInput
from profiles.schema import Transport
from training.exchange.base import ExchangeError
from training.exchange.links.certificates import member_uri
from training.exchange.links.connection import Connection
from training.exchange.links.dialling import keep_alive, unacknowledged
from training.exchange.links.sealing import SECRET, Cipher, faster_cipher
from training.exchange.unauthenticated import HANDSHAKE_SECONDS

SENDS, RECEIVES, ASKS = 0, 1, 2
"""What the end that dials does; one that asks gets a line, see :attr:`Handshakes.answer_question`."""
MAX_CHANNEL = 128
POLL_SECONDS = 0.2
_POLL_SECONDS = 0.05
"""Seconds between two checks, while waiting, that the connection is still needed."""
_HELLO = struct.Struct(f"<8sIIBB{SECRET}sH")
_MAGIC: dict[Transport, bytes] = {"auto": b"muster 1", "tls": b"muster t"}
_CIPHERS: tuple[Cipher, ...] = ("aes", "chacha")
_ACCEPTED, _CHOSEN, _OTHER_TRANSPORT = b"+", b"!", b"-"
PADDING = bytes(9216)
"""Padding of the sender's decision: longer than a packet of any network card (jumbo frames have 9000)."""
_CARRIES_WITHIN = 2.0
"""Seconds without an acknowledged byte of it after which a route counts as not carrying packets of that size."""
_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME."""


@dataclass(frozen=True)
class ConnectTimeouts:
    """Timeouts of connecting to a peer, in seconds."""

    handshake: float = HANDSHAKE_SECONDS
    """For each message of the handshake."""
    connect: float = 3.0
    hurried: float = 3.0
    """For the handshake while there are other addresses to try."""
    reverse_after: float = 1.0
    """After which a receiver that was not dialled dials itself."""
    relay_after: float = 4.0
    """After which both ends go to the relay."""
    relay_again_after: float = 0.5
    """The same if only the relay has worked recently."""
    is_watched: bool = False
    """Whether a peer counts as lost after 5 seconds of silence of its machine, instead of half a minute."""


@dataclass(frozen=True)
class Identity:
    """A member's identity.

    Args:
        certificates: folder of :func:`~training.exchange.links.certificates.issue_run_certificates`; ``None``: in
            clear, on loopback only.
        transport: ``tls`` sends everything through TLS itself instead of sealed frames.
    """

    run_id: str
    rank: int
    certificates: Path | None
    transport: Transport = "auto"


Key = tuple[str, int, int]
"""Channel, peer, and whether this end sends or receives."""


@dataclass(frozen=True)
class Arrival:
    """An incoming connection after its handshake."""

    socket: socket.socket
    secret: bytes
    cipher: Cipher
    address: str

    def is_abandoned(self, direction: int) -> bool:
        """Whether the other end has abandoned this connection.

        A sender that was told that it is used and hung up afterwards has not: it was there, and has left since, and
        this end would wait in vain for another. One that gave up before answers with a reset.
        """
        ready = select.poll()
        ready.register(self.socket, select.POLLIN)
        try:
            gone = bool(ready.poll(0)) and not socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
        except OSError:
            return True
        return gone and direction == SENDS


class BlackHole(ExchangeError):
    """A route delivers small packets and loses large ones."""

    def __init__(self) -> None:
        super().__init__("small packets pass, large ones do not")


class _Unwanted(EOFError):
    """This end does not need the connection any more."""


@dataclass(frozen=True)
class HandshakeTimeout:
    """How long this end waits for the other.

    Args:
        seconds: for each message.
        over: whether no connection is needed any more.
        another: whether another connection for the same purpose has arrived.
    """

    seconds: float
    over: Callable[[], bool]
    another: Callable[[], bool]

    def wait(self, connection: socket.socket, step: Callable[[], None], whatever_comes: bool = False) -> None:
        """Run a step that waits for the other end, and check repeatedly whether its result is still needed.

        Raises:
            TimeoutError: the other end is silent.
            _Unwanted: no connection is needed, or, unless ``whatever_comes``, another has arrived.
        """
        connection.settimeout(_POLL_SECONDS)
        end = time.monotonic() + self.seconds
        while not self.over() and (whatever_comes or not self.another()):
            try:
                return step()
            except TimeoutError:
                if time.monotonic() >= end:
                    raise
        raise _Unwanted


class Handshakes:
    """Both sides of the handshake, for one member.

    Raises:
        BadInput: the certificates cannot be read.
    """

    def __init__(self, identity: Identity, timeouts: ConnectTimeouts) -> None:
        self.identity = identity
        self._step_seconds = timeouts.handshake
        self._is_watched = timeouts.is_watched
        self._server, self._client = tls_contexts(identity.certificates)
        self._cipher = faster_cipher()
        self.answer_question: Callable[[int], bytes] = lambda term: b"{}\n"
        """Returns what a member that asks is told, a line; called with the term that it names."""

    def answer(self, connection: socket.socket, address: str) -> tuple[Key, Arrival]:
        """Answer an incoming connection: learn its peer and purpose; close it if it does not belong to the run.

        Raises:
            OSError, EOFError, ExchangeError, ValueError: it was closed.
        """
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(lambda: connection.close())
            connection.settimeout(self._step_seconds)
            if self._server is not None:
                connection = self._server.wrap_socket(connection, server_side=True)
            magic, rank, to, direction, cipher, secret, length = _HELLO.unpack(
                _exactly(connection, _HELLO.size, self._step_seconds)
            )
            if magic not in _MAGIC.values() or to != self.identity.rank or direction > ASKS or cipher >= len(_CIPHERS):
                raise ExchangeError("not a valid handshake")
            self._check(connection, rank)
            if length > MAX_CHANNEL:
                raise ExchangeError("not a channel's name")
            channel = _exactly(connection, length, self._step_seconds).decode()
            if direction == ASKS:
                connection.sendall(self.answer_question(int(channel)))
                raise EOFError("it has its answer")
            if magic != _MAGIC[self.identity.transport]:
                connection.sendall(_OTHER_TRANSPORT)
                raise ExchangeError("its transport is another one")
            if direction == SENDS:
                connection.sendall(_ACCEPTED)
                _expect(connection, _CHOSEN)
                _exactly(connection, len(PADDING), self._step_seconds)
                connection.sendall(_ACCEPTED)
            cleanup.pop_all()
            return (channel, rank, RECEIVES if direction == SENDS else SENDS), Arrival(
                connection, secret, _CIPHERS[cipher], address
            )

    def open_handshake(
        self, connection: socket.socket, key: Key, address: str, round_trip: float, timeout: HandshakeTimeout
    ) -> Connection | None:
        """Open the handshake on a dialled connection; ``None`` if it is no longer needed.

        Raises:
            OSError, EOFError, ExchangeError: the other end does not answer, or is another member.
            BlackHole: small messages pass in either direction, but large ones do not.
        """
        channel, peer, direction = key
        with contextlib.suppress(_Unwanted), contextlib.ExitStack() as cleanup:
            cleanup.callback(lambda: connection.close())
            if self._client is not None:
                connection = secured = self._client.wrap_socket(connection, do_handshake_on_connect=False)
                timeout.wait(connection, secured.do_handshake)
                self._check(connection, peer)
            secret, name = os.urandom(SECRET), channel.encode()
            cipher = _CIPHERS.index(self._cipher)
            magic = _MAGIC[self.identity.transport]
            hello = _HELLO.pack(magic, self.identity.rank, peer, direction, cipher, secret, len(name))
            connection.sendall(hello + name)
            if direction == SENDS:
                timeout.wait(connection, lambda: _expect(connection, _ACCEPTED))
                _choose(connection, timeout)
            else:
                try:
                    timeout.wait(connection, lambda: _expect(connection, _CHOSEN))
                except TimeoutError:  # the sender uses another connection so far; the route may be fine
                    raise _Unwanted from None
                _read_padding(connection, timeout)
                connection.sendall(_ACCEPTED)
            established = self._ready(Arrival(connection, secret, self._cipher, address), round_trip)
            cleanup.pop_all()
            return established
        return None

    def take(self, arrival: Arrival, direction: int, timeout: HandshakeTimeout) -> Connection:
        """Use an incoming connection; a sender notifies the other end.

        Raises:
            OSError, EOFError, ExchangeError: the other end is gone.
            BlackHole: as in :meth:`open_handshake`.
        """
        if direction == SENDS:
            _choose(arrival.socket, timeout)
        return self._ready(arrival, 0.0)

    def _check(self, connection: socket.socket, rank: int) -> None:
        """Raise unless the other end's certificate is that of ``rank`` in this run."""
        if self._server is None or not isinstance(connection, ssl.SSLSocket):
            return
        names = (connection.getpeercert() or {}).get("subjectAltName", ())
        if ("URI", member_uri(self.identity.run_id, rank)) not in names:
            raise ExchangeError(f"its certificate is not that of rank {rank}")

    def _ready(self, arrival: Arrival, round_trip: float) -> Connection:
        connection = arrival.socket
        sealed = isinstance(connection, ssl.SSLSocket) and self.identity.transport == "auto"
        if sealed:
            connection = socket.socket(fileno=connection.detach())
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection, self._is_watched)
        return Connection(connection, arrival.secret, arrival.cipher, sealed, round_trip, arrival.address)


def question(identity: Identity, peer: int, term: int) -> bytes:
    """Return what a member sends to ask another one."""
    channel = str(term).encode()
    return _HELLO.pack(_MAGIC[identity.transport], identity.rank, peer, ASKS, 0, bytes(SECRET), len(channel)) + channel


def tls_contexts(folder: Path | None) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the TLS contexts for incoming connections, and for those that this end dials."""
    if folder is None:
        return None, None
    server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the rank in the certificate is checked instead of the address
        context.verify_mode = ssl.CERT_REQUIRED
        # Only this run's certificates have this authority; machines without a clock battery start in 1970.
        context.verify_flags = ssl.VerifyFlags(context.verify_flags | _NO_CHECK_TIME)
        try:
            context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
            context.load_verify_locations(folder / "ca.pem")
        except OSError as error:
            raise BadInput(f"{folder}: {error}", "name the folder with the certificates of this end") from error
    server.num_tickets = 0  # unread tickets would turn a close into a reset, and the last data would be lost
    return server, client


def _choose(connection: socket.socket, timeout: HandshakeTimeout) -> None:
    """Choose a connection, as its sender, and wait until the receiver knows: it listens to this one from then on."""
    connection.settimeout(timeout.seconds)
    connection.sendall(_CHOSEN + PADDING)
    left, since = len(PADDING), time.monotonic()

    def answer() -> None:
        nonlocal left, since
        try:
            _expect(connection, _ACCEPTED)
        except TimeoutError:
            before, left = left, unacknowledged(connection) or 0
            if not left or left < before:
                since = time.monotonic()
            elif time.monotonic() > since + _CARRIES_WITHIN:
                raise BlackHole from None
            raise

    timeout.wait(connection, answer, whatever_comes=True)


def _read_padding(connection: socket.socket, timeout: HandshakeTimeout) -> None:
    """Read the padding after the sender's decision; a sender whose padding is not acknowledged hangs up."""
    left, since = len(PADDING), time.monotonic()

    def take() -> None:
        nonlocal left
        while left:
            piece = connection.recv(left)
            if not piece:
                raise EOFError("it closed the connection during the handshake")
            left -= len(piece)

    try:
        timeout.wait(connection, take)
    except (TimeoutError, EOFError) as error:
        if isinstance(error, _Unwanted) or time.monotonic() < since + _CARRIES_WITHIN / 2:
            raise
        raise BlackHole from None


def _expect(connection: socket.socket, word: bytes) -> None:
    """Wait for a message of one byte."""
    answer = _exactly(connection, 1)
    if answer == _OTHER_TRANSPORT:
        raise ExchangeError("one of the two has transport = tls, the other one auto; give all the same")
    if answer != word:
        raise ExchangeError("it gave an unexpected answer")


def _exactly(connection: socket.socket, size: int, seconds: float = HANDSHAKE_SECONDS) -> bytes:
    data, end = b"", time.monotonic() + seconds
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("it closed the connection during the handshake")
        if time.monotonic() > end:
            raise EOFError("its handshake took too long")
        data += piece
    return data
