"""How members find one another on the network: a listening socket, TLS 1.3 with the run's certificates, a hello.

Every direction of every pair has a connection of its own. The sender dials; where it cannot (a firewall, a machine
behind a router), the receiver dials and says so. Both ends check that the other's certificate is of this run and of the
rank that it says it is.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from profiles.errors import BadInput
from training.exchange.base import ExchangeError, ExchangeTimeout
from training.exchange.certificates import member_uri
from training.exchange.link import Connection
from training.exchange.sealing import SECRET, Cipher, faster_cipher

Address = tuple[str, int]
Transport = Literal["auto", "tls"]

_HELLO = struct.Struct(f"<8sIIBB{SECRET}sH")
_MAGIC = b"muster 1"
_CIPHERS: tuple[Cipher, ...] = ("aes", "chacha")
_SENDS, _RECEIVES = 0, 1
_YES, _NO = b"+", b"-"
_MAX_CHANNEL = 128
_HANDSHAKE_SECONDS = 10.0
_MOST_HANDSHAKES = 64
_MOST_WAITING = 256
_REVERSE_AFTER = 2.0
"""Seconds after which a receiver that was not dialled dials itself."""
_RETRY = 0.2


@dataclass(frozen=True)
class Identity:
    """Who this member is.

    Args:
        certificates: folder of :func:`~training.exchange.certificates.issue_run_certificates`; ``None``: in clear, on
            loopback only.
        transport: ``tls`` sends all through TLS instead of sealed frames.
    """

    run_id: str
    rank: int
    certificates: Path | None
    transport: Transport = "auto"


Key = tuple[str, int, int]
"""Channel, peer, and what this end does."""


class Listener:
    """A member's listening socket; it outlives the groups that are formed with it.

    Args:
        host: literal address to listen on.

    Raises:
        BadInput: the certificates cannot be read, or there are none and ``host`` is not loopback.
        ExchangeError: the address is not this machine's.
    """

    def __init__(self, host: str, identity: Identity, port: int = 0) -> None:
        self.identity = identity
        self._server, self._client = _contexts(identity.certificates)
        if self._server is None and not ipaddress.ip_address(host).is_loopback:
            raise BadInput(f"{host}: without certificates only a loopback address is allowed", "issue certificates")
        self._cipher = faster_cipher()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise ExchangeError(
                f"cannot listen on {host}: {error.strerror}; name an address of this machine"
            ) from error
        self.address: Address = self._socket.getsockname()[:2]
        self._changed = threading.Condition()
        self._waiting: dict[Key, Connection] = {}
        self._refusing: set[Key] = set()
        self._closed = False
        self._handshakes = threading.Semaphore(_MOST_HANDSHAKES)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def connect(
        self, channel: str, peers: Mapping[int, Sequence[Address]], deadline: float, names: Mapping[int, str]
    ) -> tuple[dict[int, Connection], dict[int, Connection]]:
        """Meet ``peers`` on ``channel``, a name that is used once; return the connections out and in, by rank.

        Args:
            peers: where each listens, the fastest way first; empty: it cannot be dialled.
            deadline: of :func:`time.monotonic`.

        Raises:
            ExchangeTimeout: somebody is missing; the message says who and what was tried last.
        """
        if len(channel.encode()) > _MAX_CHANNEL:
            raise ValueError(f"the channel's name '{channel}' is too long")
        problems: dict[int, str] = {}

        def meet(peer: int, sends: int) -> Connection | None:
            return self._meet((channel, peer, sends), peers[peer], deadline, problems)

        with ThreadPoolExecutor(max(1, 2 * len(peers))) as pool:
            out = {peer: pool.submit(meet, peer, _SENDS) for peer in peers}
            into = {peer: pool.submit(meet, peer, _RECEIVES) for peer in peers}
            found = {peer: future.result() for peer, future in out.items()}
            coming = {peer: future.result() for peer, future in into.items()}
        missing = [peer for peer in peers if found[peer] is None or coming[peer] is None]
        if missing:
            for one in (*found.values(), *coming.values()):
                if one is not None:
                    one.socket.close()
            told = "; ".join(f"{names[peer]}: {problems.get(peer, 'it did not come')}" for peer in missing)
            raise ExchangeTimeout(f"no connection with {told}")
        return (
            {peer: one for peer, one in found.items() if one is not None},
            {peer: one for peer, one in coming.items() if one is not None},
        )

    def meet(self, channel: str, peer: int, sends: bool, addresses: Sequence[Address], deadline: float) -> Connection:
        """Return one direction to or from one peer, as :meth:`connect` does for all."""
        problems: dict[int, str] = {}
        found = self._meet((channel, peer, _SENDS if sends else _RECEIVES), addresses, deadline, problems)
        if found is None:
            raise ExchangeTimeout(f"no connection with rank {peer}: {problems.get(peer, 'it did not come')}")
        return found

    def close(self) -> None:
        """Stop listening, and hang up what nobody has taken. Idempotent."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or accept() would go on waiting
        self._socket.close()
        for one in waiting:
            one.socket.close()

    # ------------------------------------------------------------------------------------------------------- dialling

    def _meet(
        self, key: Key, addresses: Sequence[Address], deadline: float, problems: dict[int, str]
    ) -> Connection | None:
        """Get one direction: by dialling, or by being dialled."""
        sends = key[2]
        dials_from = time.monotonic() + (0.0 if sends == _SENDS else _REVERSE_AFTER)
        while not self._closed and time.monotonic() < deadline:
            if addresses and time.monotonic() >= dials_from:
                with self._changed:
                    if sends == _SENDS:  # two connections at once would leave both ends unsure which one it is
                        self._refusing.add(key)
                    taken = self._waiting.pop(key, None)
                dialled = taken or self._dial(key, addresses, deadline, problems)
                with self._changed:
                    self._refusing.discard(key)
                if dialled is not None:
                    return dialled
            with self._changed:
                self._changed.wait_for(lambda: key in self._waiting or self._closed, self._pause(deadline, dials_from))
                if key in self._waiting:
                    return self._waiting.pop(key)
        return None

    @staticmethod
    def _pause(deadline: float, dials_from: float) -> float:
        now = time.monotonic()
        return max(0.0, min(deadline - now, max(_RETRY, dials_from - now)))

    def _dial(
        self, key: Key, addresses: Sequence[Address], deadline: float, problems: dict[int, str]
    ) -> Connection | None:
        channel, peer, sends = key
        for host, port in addresses:
            seconds = min(_HANDSHAKE_SECONDS, deadline - time.monotonic())
            if seconds <= 0:
                return None
            connection: socket.socket | None = None
            try:
                begin = time.perf_counter()
                connection = socket.create_connection((host, port), seconds)
                round_trip = time.perf_counter() - begin
                if self._client is not None:
                    connection = self._client.wrap_socket(connection)
                    self._check(connection, peer)
                secret = os.urandom(SECRET)
                name = channel.encode()
                cipher = _CIPHERS.index(self._cipher)
                hello = _HELLO.pack(_MAGIC, self.identity.rank, peer, sends, cipher, secret, len(name))
                connection.sendall(hello + name)
                if _exactly(connection, 1) == _YES:
                    return self._accepted(connection, secret, self._cipher, round_trip)
                connection.close()
                problems[peer] = "it dials itself"
            except (OSError, EOFError, ExchangeError) as error:
                problems[peer] = f"{host}:{port}: {error}"
                if connection is not None:
                    connection.close()
        return None

    # ------------------------------------------------------------------------------------------------ being dialled

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY)  # out of descriptors: strangers go again
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="handshake", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Learn who has dialled; whoever is not of the run is hung up on."""
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            if self._server is not None:
                connection = self._server.wrap_socket(connection, server_side=True)
            self._hear(connection)
        except (OSError, EOFError, ExchangeError, UnicodeDecodeError):
            connection.close()
        finally:
            self._handshakes.release()

    def _hear(self, connection: socket.socket) -> None:
        magic, rank, to, does, cipher, secret, length = _HELLO.unpack(_exactly(connection, _HELLO.size))
        if magic != _MAGIC or to != self.identity.rank or does > 1 or cipher >= len(_CIPHERS) or length > _MAX_CHANNEL:
            raise ExchangeError("not a hello")
        self._check(connection, rank)
        key = (_exactly(connection, length).decode(), rank, _RECEIVES if does == _SENDS else _SENDS)
        with self._changed:
            welcome = not self._closed and key not in self._refusing and len(self._waiting) < _MOST_WAITING
            if welcome:
                connection.sendall(_YES)
                older = self._waiting.pop(key, None)
                self._waiting[key] = self._accepted(connection, secret, _CIPHERS[cipher], 0.0)
                self._changed.notify_all()
                if older is not None:
                    older.socket.close()
        if not welcome:
            connection.sendall(_NO)
            connection.close()

    def _check(self, connection: socket.socket, rank: int) -> None:
        """Raise unless the other end's certificate is that of ``rank`` in this run."""
        if self._server is None or not isinstance(connection, ssl.SSLSocket):
            return
        names = (connection.getpeercert() or {}).get("subjectAltName", ())
        if ("URI", member_uri(self.identity.run_id, rank)) not in names:
            raise ExchangeError(f"its certificate is not that of rank {rank}")

    def _accepted(self, connection: socket.socket, secret: bytes, cipher: Cipher, round_trip: float) -> Connection:
        sealed = isinstance(connection, ssl.SSLSocket) and self.identity.transport == "auto"
        if sealed:
            connection = socket.socket(fileno=connection.detach())
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Connection(connection, secret, cipher, sealed, round_trip)


def _contexts(folder: Path | None) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return what this end says and demands when it is dialled, and when it dials."""
    if folder is None:
        return None, None
    server, client = (ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the rank in the certificate is checked instead of the address
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
            context.load_verify_locations(folder / "ca.pem")
        except OSError as error:
            raise BadInput(f"{folder}: {error}", "name the folder with the certificates of this end") from error
    server.num_tickets = 0  # tickets that nobody reads turn a close into a reset, and the end of the data is lost
    return server, client


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("it hung up during the hello")
        data += piece
    return data
