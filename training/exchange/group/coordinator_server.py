"""The coordinator's server, which all members dial. It carries small messages only; tensors go between the members.

It runs in a process of its own, :mod:`training.exchange.group.coordinator_main`, on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any

from profiles.errors import BadInput
from training.exchange.coordinator_protocol import (
    MAX_LINE,
    GroupStatus,
    Hello,
    ProtocolError,
    Report,
    encode_line,
    parse,
)
from training.exchange.event_loop import end_other_tasks
from training.exchange.group.coordinator_state import CoordinatorConfig, Member
from training.exchange.group.group_membership import GroupMembership, Log
from training.exchange.links.certificates import member_uri, relay_key
from training.exchange.links.dialling import listen_on
from training.exchange.links.handshake import tls_contexts
from training.exchange.links.relay import Relay
from training.exchange.unauthenticated import HANDSHAKE_SECONDS, UnauthenticatedConnections
from training.records.events import WarningEvent

_TICK = 0.1
MAX_HELLOS_PER_MINUTE = 30
_MAX_REFUSALS_PER_MINUTE = 120
_MAX_UNSENT_BYTES = 8 << 20
_STOP_WITHIN = 5.0


class Coordinator:
    """A running coordinator.

    Args:
        log: receives member and warning events, in the coordinator's thread.
        handshake: seconds within which a dialling peer must identify itself.
        decides: constructs the object that decides about the group.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        log: Log | None = None,
        handshake: float = HANDSHAKE_SECONDS,
        decides: Callable[[CoordinatorConfig, Log], GroupMembership] = GroupMembership,
    ) -> None:
        self._config = config
        self._handshake = handshake
        self._log: Log = log or (lambda event: None)
        self.group = decides(config, self._log)
        self.group.orphaned = config.term > 0  # members have elected it
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True)
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self.unauthenticated = UnauthenticatedConnections()
        self._relay = Relay(relay_key(config.certificates)) if config.certificates is not None else None
        self._refusals = _PerMinute(_MAX_REFUSALS_PER_MINUTE)
        self._hellos = defaultdict[int, _PerMinute](lambda: _PerMinute(MAX_HELLOS_PER_MINUTE))
        self._stopped = False

    def start(self) -> int:
        """Listen, and return the port.

        Raises:
            BadInput: the port is taken, or traffic in clear was asked for on a network address.
        """
        config = self._config
        self._thread.start()
        try:
            server, _ = tls_contexts(config.certificates)
            if server is None and not ipaddress.ip_address(config.address).is_loopback:
                problem = f"{config.address}: without certificates only a loopback address is allowed"
                raise BadInput(problem, "name the folder of the run's certificates")
            return int(self._run(self._listen(server)))
        except BadInput:
            self.stop()
            raise
        except OSError as error:
            self.stop()
            hint = "choose another coordinator_port, or 0 for any free one"
            option = "coordinator_port" if error.errno == errno.EADDRINUSE else ""
            raise BadInput(f"cannot listen on {config.address}:{config.port}", hint, option=option) from None

    def ban(self, rank: int) -> None:
        """Drop a member and refuse it from now on."""
        self._loop.call_soon_threadsafe(self.group.ban, rank)

    def admit(self, rank: int) -> None:
        """Revoke a ban."""
        self._loop.call_soon_threadsafe(self.group.admit, rank)

    def note_end(self, rank: int) -> None:
        """Note that the process of a member has ended."""
        self._loop.call_soon_threadsafe(self.group.note_end, rank)

    def stop(self, reason: str = "the coordinator was stopped") -> None:
        """Notify all members, end all connections and stop serving. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(TimeoutError):
            self._run(self._end(reason), _STOP_WITHIN)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_WITHIN)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    async def _listen(self, context: ssl.SSLContext | None) -> int:
        self._listening = listening = listen_on(self._config.address, self._config.port)
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(listening, context))
        if self._relay is not None:
            _, self.group.relay = await self._relay.start(self._config.address, self._config.relay_port)
        self._ticking = asyncio.create_task(self._tick())
        port: int = listening.getsockname()[1]
        return port

    async def _end(self, reason: str) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._accepting is not None and self._listening is not None:
            self._accepting.cancel()
            self._listening.close()
        for task in self._handshakes:
            task.cancel()
        self.group.close(reason)
        if self._relay is not None:
            await self._relay.close()
        for writer in list(self._connections):
            writer.close()
        for writer in list(self._connections):
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)
        await end_other_tasks()

    async def _tick(self) -> None:
        last_tick = time.monotonic()
        while True:
            await asyncio.sleep(_TICK)
            now = time.monotonic()
            try:
                self.group.tick(min(now - last_tick, 3 * _TICK))
            except Exception as error:  # a group whose leases and deadlines are not enforced would hang
                self.group.close(f"the coordinator failed: {error}")
                raise
            last_tick = now

    # -- one connection ------------------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listening)
            except OSError:  # out of descriptors until unauthenticated connections end
                await asyncio.sleep(_TICK)
                continue
            host = _plain_address(host)
            if not self.unauthenticated.enter(host):
                connection.close()
                continue
            handshake = asyncio.create_task(self._start_handshake(connection, host, context))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _start_handshake(self, connection: socket.socket, host: str, context: ssl.SSLContext | None) -> None:
        """Serve a dialling peer; it counts as unauthenticated from its first byte, the handshake included."""
        loop, seconds = asyncio.get_running_loop(), self._handshake if context is not None else None

        def protocol() -> asyncio.StreamReaderProtocol:
            reader = asyncio.StreamReader(MAX_LINE, loop)
            return asyncio.StreamReaderProtocol(reader, lambda *ends: self._serve(ends[0], ends[1], host), loop)

        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=context, ssl_handshake_timeout=seconds)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            self.unauthenticated.leave(host)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._connections.add(writer)
        member: Member | None = None
        reason, hung_up = "its connection broke", True
        try:
            try:
                member = await self._identify(reader, writer)
            finally:
                self.unauthenticated.leave(host)
            while data := await _next_line(reader):
                self.group.on_report(member, parse(Report, data))
        except ProtocolError as error:
            reason, hung_up = str(error), False
            if member is None:
                self._refuse(writer, reason)
        except (OSError, asyncio.TimeoutError, EOFError, asyncio.CancelledError):
            pass  # cancelled at the end only; before Python 3.12 a handler that ends so is logged with a traceback
        finally:
            if member is not None:
                self.group.lose(member, reason, hung_up)
            self._connections.discard(writer)
            writer.close()

    async def _identify(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Member:
        """Identify a dialling peer.

        Raises:
            ProtocolError: it is no member.
        """
        try:
            lines = [await asyncio.wait_for(reader.readline(), self._handshake) for _ in range(2)]
        except ValueError:
            raise ProtocolError("a line that is too long") from None
        hello = parse(Hello, lines[0])
        self._check_peer(writer, hello.rank)
        if hello.rank < len(self._config.names):  # or it could act under another member's name
            hello = hello.model_copy(update={"name": self._config.names[hello.rank]})
        if not self._hellos[hello.rank].take():
            raise ProtocolError("it reconnects too often")
        transport = writer.transport

        def send(status: GroupStatus) -> None:
            if transport.is_closing():
                return
            transport.write(encode_line(status))
            if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                transport.abort()

        peer_address, local_address = (
            _plain_address(transport.get_extra_info(name)[0]) for name in ("peername", "sockname")
        )
        member = Member(hello, send, writer.close, peer_address, local_address, report=parse(Report, lines[1]))
        self.group.register(member)
        return member

    def _check_peer(self, writer: asyncio.StreamWriter, rank: int) -> None:
        """Raise ``ProtocolError`` unless the peer's certificate is that of ``rank`` in this run."""
        if self._config.certificates is None:
            return
        names = (writer.get_extra_info("peercert") or {}).get("subjectAltName", ())
        if ("URI", member_uri(self._config.run_id, rank)) not in names:
            raise ProtocolError(f"its certificate is not that of rank {rank}")

    def _refuse(self, writer: asyncio.StreamWriter, reason: str) -> None:
        if self._refusals.take():
            peer = writer.get_extra_info("peername")
            self._log(WarningEvent(message=f"refused a connection from {peer and peer[0]}: {reason}"))
        if not writer.transport.is_closing():
            writer.transport.write(encode_line(GroupStatus(failed=reason)))


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        raise ProtocolError("it sent a line that is too long") from None


def _plain_address(address: str) -> str:
    """Return an IPv4 address as such where a dual-stack socket gives it as IPv6."""
    return address.removeprefix("::ffff:")


class _PerMinute:
    """A rate limit: at most so many in a minute, so that what is logged about them does not grow without bound."""

    def __init__(self, limit: int) -> None:
        self._times: deque[float] = deque(maxlen=limit)

    def take(self) -> bool:
        """Return whether there is one left, and take it."""
        now = time.monotonic()
        if len(self._times) == self._times.maxlen and now - self._times[0] < 60.0:
            return False
        self._times.append(now)
        return True
