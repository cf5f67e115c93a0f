"""Relay for two members neither of which can be dialled: both dial the relay, which forwards bytes between them.

They do their TLS handshake with one another through it, so it sees only what they encrypt for each other. Every
client first has to prove that it holds the run's relay key:

1. The relay sends 16 random bytes.
2. The member sends its side (1 byte: 0 sends, 1 receives), the token of the connection that it wants, and
   ``HMAC-SHA256(key, "muster relay proof" || the 16 bytes || side || token)``. The token is
   ``HMAC-SHA256(key, "muster relay token" || sender || receiver || channel)``; a channel's name is used once.
3. When the other side is there too, each receives ``+``, and from then on the other's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

from training.exchange.links.dialling import Address, first_to_answer, keep_alive, listen_on
from training.exchange.unauthenticated import HANDSHAKE_SECONDS, UnauthenticatedConnections

_NONCE = 16
_CLAIM = struct.Struct("<B32s32s")
_PAIRED = b"+"
_PARTNER_SECONDS = 15.0
_MAX_WAITING = 64
_MAX_PAIRS = 128
_PIECE = 64 << 10
_LAST_SECONDS = 60.0
"""Seconds within which bytes that one side sent before it hung up must reach the other."""
_POLL_SECONDS = 0.2


class _End:
    """A member's connection, and its partner's once that is there."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.partner: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()


class Relay:
    """Runs in the event loop in which it is started. Uses at most about 1 MiB for each forwarded connection.

    Args:
        key: of :func:`~training.exchange.links.certificates.relay_key`.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._unauthenticated = UnauthenticatedConnections()
        self._waiting: dict[tuple[bytes, int], _End] = {}
        self._pairs = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def waiting(self) -> int:
        """Number of members whose partner has not connected yet."""
        return len(self._waiting)

    @property
    def connections(self) -> int:
        """Number of connections, unauthenticated ones included."""
        return len(self._tasks)

    async def start(self, host: str, port: int = 0) -> Address:
        """Listen; return the address.

        Raises:
            OSError: the address is not this machine's, or taken.
        """
        listening = listen_on(host, port)
        address: Address = listening.getsockname()[:2]
        self._server = await asyncio.start_server(self._handle, sock=listening, limit=_PIECE)
        return address

    async def close(self) -> None:
        """Stop listening, and close all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if (key := await self._authenticate(reader, writer)) is not None:
                keep_alive(writer.get_extra_info("socket"))
                await self._serve(*key, _End(reader, writer))
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[bytes, int] | None:
        """Return token and side of a client that holds the key."""
        host = (writer.get_extra_info("peername") or ("::",))[0]
        if not self._unauthenticated.enter(host):
            return None
        try:
            writer.write(nonce := secrets.token_bytes(_NONCE))
            claim = await asyncio.wait_for(reader.readexactly(_CLAIM.size), HANDSHAKE_SECONDS)
        finally:
            self._unauthenticated.leave(host)
        side, token, proof = _CLAIM.unpack(claim)
        return (
            (token, side) if side <= 1 and hmac.compare_digest(proof, _proof(self._key, nonce, side, token)) else None
        )

    async def _serve(self, token: bytes, side: int, end: _End) -> None:
        """Wait for the other side; the task of the side that came first forwards bytes for both."""
        if (partner := self._waiting.pop((token, 1 - side), None)) is not None:
            partner.partner.set_result(end)
            await end.over.wait()
            return
        if len(self._waiting) >= _MAX_WAITING or self._pairs >= _MAX_PAIRS:
            return
        before, self._waiting[token, side] = self._waiting.get((token, side)), end
        if before is not None:
            before.writer.transport.abort()
        gone = asyncio.ensure_future(end.reader.read(1))  # neither side sends before the other is there
        either: tuple[asyncio.Future[Any], ...] = (gone, end.partner)
        try:
            await asyncio.wait(either, timeout=_PARTNER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if self._waiting.get((token, side)) is end:
                del self._waiting[token, side]
        await asyncio.wait({gone})
        if end.partner.done():
            await self._forward_pair(end, end.partner.result())

    async def _forward_pair(self, left: _End, right: _End) -> None:
        self._pairs += 1
        for end in (left, right):
            end.writer.write(_PAIRED)
        directions = [asyncio.ensure_future(_forward(*pair)) for pair in ((left, right), (right, left))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(directions, timeout=_LAST_SECONDS)
        finally:
            for direction in directions:
                direction.cancel()
            self._pairs -= 1
            right.over.set()


async def _forward(source: _End, to: _End) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.reader.read(_PIECE):
            to.writer.write(piece)
            await to.writer.drain()
    with contextlib.suppress(OSError):
        to.writer.write_eof()


def connect_through_relay(
    relay: Address, key: bytes, sides: tuple[str, int, int], sends: bool, stop: Callable[[], bool]
) -> socket.socket | None:
    """Return a connection with the other side through the relay; ``None`` if ``stop``, polled regularly, returned true.

    Args:
        sides: channel, sender and receiver.

    Raises:
        OSError, EOFError: the relay cannot be reached, or refuses this end, or the other side did not connect.
    """
    why = ["it does not answer"]
    answer = first_to_answer(
        [relay], HANDSHAKE_SECONDS, lambda _, problem: why.append(problem), stop, lambda _: not _is_loopback(relay)
    )  # in small segments, because there is no other route
    if answer is None and not stop():
        raise OSError(why[-1])
    if answer is None:
        return None
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(connection := answer.socket)
        connection.settimeout(HANDSHAKE_SECONDS)
        side, token = 0 if sends else 1, _token(key, *sides)
        nonce = connection.recv(_NONCE, socket.MSG_WAITALL)
        connection.sendall(_CLAIM.pack(side, token, _proof(key, nonce, side, token)))
        connection.settimeout(_POLL_SECONDS)
        while not stop():
            with contextlib.suppress(TimeoutError):
                if connection.recv(1) != _PAIRED:
                    raise EOFError("the other side did not connect")
                cleanup.pop_all()
                return connection
    return None


def _is_loopback(address: Address) -> bool:
    return ipaddress.ip_address(address[0]).is_loopback


def _token(key: bytes, channel: str, sender: int, receiver: int) -> bytes:
    name = struct.pack("<II", sender, receiver) + channel.encode()
    return hmac.digest(key, b"muster relay token" + name, "sha256")


def _proof(key: bytes, nonce: bytes, side: int, token: bytes) -> bytes:
    return hmac.digest(key, b"muster relay proof" + nonce + bytes([side]) + token, "sha256")
