"""A member's connection to the coordinator: a thread of its own, which redials when the connection breaks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from profiles.schema import Transport
from training.exchange.base import ExchangeTimeout
from training.exchange.coordinator_protocol import (
    BEAT,
    LEASE,
    MAX_STATUS,
    PROTOCOL_VERSION,
    GroupStatus,
    Hello,
    ProtocolError,
    Report,
    encode_line,
    parse,
)
from training.exchange.event_loop import end_other_tasks
from training.exchange.links.certificates import COORDINATOR_NAME
from training.exchange.links.dialling import send_small_segments
from training.exchange.links.handshake import tls_contexts

REDIAL_FOR = 60.0
"""Seconds within which a lost coordinator must be back."""
_RETRY = 0.2
_MIN_PAUSE, _PROGRESS_PAUSE = 0.02, 0.2
"""Minimum seconds between two reports, and from one to the next that is about operations alone: each takes processor
time from training and from the exchange."""
_UNREACHED_AFTER, _UNREACHED_EVERY = 3.0, 10.0
"""Seconds of failed dialling after which it is reported, and between further reports."""
_LEAVE_SECONDS = 5.0
"""Seconds the coordinator has to confirm that a member leaves."""


@dataclass(frozen=True)
class JoinConfig:
    """Which group a member joins, and under which rank and name.

    Args:
        address: ``host:port`` of the coordinator, a literal address.
        certificates: folder of this member's certificates; ``None`` for traffic in clear on loopback.
        listen: literal address on which other members dial this one.
        hosts: literal addresses under which it is announced, the fastest route first; empty: those of its interfaces.
        shards: how much of every vector each member owns, by rank; see
            :func:`~training.exchange.mean.owners.shard_bounds`.
        local: the coordinator is on this machine, see :class:`training.records.plan.MemberPlan`.
        on_return: called when the group, which had continued without this member, has taken it back.
        interface: the network interface over which most others reach this member fastest, if that was measured.
        rendezvous: returns ``host:port`` of the coordinator and of the relay, where they may change during the run; a
            relay without an address is on the coordinator's host, on the port the coordinator announces.
        on_unreachable: called with the coordinator's address and the reason while it cannot be reached.
        transport: the same for all members, see :class:`~training.exchange.links.handshake.Identity`.
        lease: seconds of silence after which the coordinator counts as lost.
        redial_for: seconds within which a lost coordinator must be back.
    """

    address: str
    certificates: Path | None
    run_id: str
    rank: int
    world_size: int
    name: str
    listen: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    shards: Mapping[int, float] | None = None
    local: bool = False
    on_return: Callable[[], None] = lambda: None
    rendezvous: Callable[[], tuple[str, str]] | None = None
    on_unreachable: Callable[[str, str], None] = lambda address, why: None
    interface: str = ""
    transport: Transport = "auto"
    lease: float = LEASE
    redial_for: float = REDIAL_FOR

    @property
    def endpoints(self) -> tuple[str, str]:
        """Current addresses of the coordinator and of the relay."""
        return (self.address, "") if self.rendezvous is None else self.rendezvous()

    def hello(self, listening: tuple[str, int]) -> Hello:
        """Return the member's first message, which announces the address that it listens on."""
        return Hello(
            version=PROTOCOL_VERSION,
            run_id=self.run_id,
            rank=self.rank,
            world_size=self.world_size,
            name=self.name,
            incarnation=os.urandom(8).hex(),
            port=listening[1],
            hosts=self.reached_at(listening[0]),
        )

    def reached_at(self, listening: str) -> tuple[str, ...]:
        """Return the addresses at which this member can currently be dialled."""
        return tuple(self.hosts) or dialable_addresses(listening, self.interface)


class CoordinatorClient:
    """Reports this member's state to the coordinator, and receives the group's status.

    Args:
        listening: address at which other members dial this one.
        report: returns the member's state; called in this connection's thread.
        on_status: called with every status; must not block.
        on_end: called at most once, with why the group is lost for this member and whether it may return as a newcomer.
    """

    def __init__(
        self,
        joining: JoinConfig,
        listening: tuple[str, int],
        report: Callable[[], Report],
        on_status: Callable[[GroupStatus], None],
        on_end: Callable[[str, bool], None],
    ) -> None:
        self._joining = joining
        self._local = joining.local
        self._lease, self._redial_for = joining.lease, joining.redial_for
        _, self._context = tls_contexts(joining.certificates)
        if self._context is not None:
            self._context.check_hostname = True
        self._hello = joining.hello(listening)
        self._addresses = functools.partial(joining.reached_at, listening[0])
        self._report = report
        self._on_status = on_status
        self._on_end = on_end
        self._connected = False
        self._closing = self._may_return = self._report_is_due = self._is_urgent = False
        self._loop = asyncio.new_event_loop()
        self._wake_up = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="control", daemon=True)

    def start(self, seconds: float) -> None:
        """Start dialling; keep trying for up to ``seconds`` until the first connection."""
        self._deadline = time.monotonic() + seconds
        self._thread.start()

    def notify(self, urgent: bool = True) -> None:
        """Schedule a report: the member's state has changed.

        Args:
            urgent: ``False``: an operation has begun or ended, and others may follow soon.
        """
        if self._is_urgent or (self._report_is_due and not urgent):
            return  # not sent yet: another wake-up would cost more than the operation
        self._report_is_due, self._is_urgent = True, urgent
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake_up.set)

    def close(self) -> None:
        """Announce that this member leaves, and hang up. Idempotent."""
        self._closing = True
        self.notify()
        if self._thread.ident is None:
            self._loop.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)

    def _main(self) -> None:
        try:
            why = self._loop.run_until_complete(self._run())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - ending silently would hang the run
            why = f"the connection with the coordinator failed: {error}"
        self._loop.run_until_complete(end_other_tasks())
        self._loop.close()
        if not self._closing:
            self._on_end(why, self._may_return)

    @property
    def address(self) -> str:
        """Current ``host:port`` of the coordinator."""
        return self._joining.endpoints[0]

    async def _run(self) -> str:
        """Maintain the connection; return why it is given up."""
        report_at = time.monotonic() + _UNREACHED_AFTER
        while True:
            address = self.address
            try:
                reader, writer = await self._dial(address)
            except ssl.SSLError:
                problem = "its certificate does not match"
                if not self._connected:  # else another process has its port while it restarts
                    return f"the coordinator at {address} is of another run: {problem}"
            except (OSError, asyncio.TimeoutError) as error:
                problem = getattr(error, "strerror", None) or "it does not answer"
            else:
                try:
                    problem, final = await self._exchange_messages(reader, writer)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError, asyncio.TimeoutError):
                        await asyncio.wait_for(writer.wait_closed(), _RETRY)
                    writer.transport.abort()
                if final:
                    return problem
                report_at = time.monotonic() + _UNREACHED_AFTER
            if time.monotonic() >= report_at and not self._closing:
                report_at = time.monotonic() + _UNREACHED_EVERY
                self._joining.on_unreachable(address, problem)
            lost = "lost" if self._connected else "cannot reach"
            if self._closing or time.monotonic() + _RETRY >= self._deadline:
                return f"{lost} the coordinator at {address}: {problem}"
            await asyncio.sleep(_RETRY)

    async def _dial(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, as long as ``address`` is the coordinator's.

        Raises:
            OSError, asyncio.TimeoutError: it does not answer there, or its address has changed.
        """
        dialling = asyncio.ensure_future(self._open(parse_endpoint(address)))
        end = time.monotonic() + max(_RETRY, min(self._lease, self._deadline - time.monotonic()))
        while not dialling.done() and time.monotonic() < end and self.address == address:
            await asyncio.wait({dialling}, timeout=_RETRY)
        if not dialling.done():
            dialling.cancel()
            raise asyncio.TimeoutError
        return dialling.result()

    async def _open(self, address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        (family, _, _, _, socket_address), *_ = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
        connection = socket.socket(family)
        try:
            connection.setblocking(False)
            send_small_segments(connection)  # messages are small anyway, and large packets may get lost
            await loop.sock_connect(connection, socket_address)
            name = COORDINATOR_NAME if self._context is not None else None
            return await asyncio.open_connection(
                sock=connection, ssl=self._context, server_hostname=name, limit=MAX_STATUS
            )
        except BaseException:
            connection.close()
            raise

    def overdue(self, status: GroupStatus) -> ExchangeTimeout:
        """Return the error that names the members that did not connect in time; ``status`` is the last one received."""
        if not self._connected:
            return ExchangeTimeout(f"cannot reach the coordinator at {self.address}")
        missing = ", ".join(status.missing) or "somebody"
        return ExchangeTimeout(f"the group is not complete: {missing} did not connect")

    async def _exchange_messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool]:
        """Send and receive until the connection ends; return why, and whether that is final."""
        writer.write(encode_line(self._hello.model_copy(update={"hosts": self._addresses()})))
        sending = asyncio.create_task(self._send(writer))
        try:
            while True:
                data = await self._next(reader)
                if not data:
                    if sending.done():
                        sending.result()  # raises why it ended
                    return "it ended the connection", self._closing
                status = parse(GroupStatus, data)
                if status.failed:
                    self._may_return = status.again
                    return status.failed, True
                self._connected, self._deadline = True, time.monotonic() + self._redial_for
                self._on_status(status)
        except (asyncio.TimeoutError, TimeoutError):
            return f"silent for {self._lease:g} s", False
        except ssl.SSLError as error:
            return (
                f"it is of another run, or refuses this member's certificate ({error.reason})",
                not self._connected,
            )
        except OSError as error:
            return error.strerror or "the connection broke", False
        except (ProtocolError, ValueError) as error:
            return str(error), True
        finally:
            sending.cancel()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        """Wait for the next line, in two steps: if the process is stopped during the first, its timeout expires before
        lines that arrived meanwhile have been looked at.

        Raises:
            asyncio.TimeoutError: no line arrived during the lease.
        """
        if self._local:
            return await reader.readline()
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            return await asyncio.wait_for(reader.readline(), self._lease - BEAT)
        return await asyncio.wait_for(reader.readline(), BEAT)

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        """Send reports; a member that ceases to, whatever ends it, must not look alive to the coordinator."""
        try:
            await self._send_reports(writer)
        except BaseException:
            writer.transport.abort()
            raise

    async def _send_reports(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._wake_up.clear()
            self._report_is_due = self._is_urgent = False
            leaves = self._closing
            writer.write(encode_line(self._report().model_copy(update={"leaves": leaves})))
            with contextlib.suppress(OSError):
                await writer.drain()
            if leaves:  # the coordinator hangs up: closing with unread data would discard what was sent
                return
            await asyncio.sleep(_MIN_PAUSE)
            await self._wait_for_news(BEAT)
            if self._report_is_due and not self._is_urgent:
                self._wake_up.clear()
                await self._wait_for_news(_PROGRESS_PAUSE)

    async def _wait_for_news(self, seconds: float) -> None:
        """Wait for the next wake-up, up to ``seconds``."""
        timer = self._loop.call_later(seconds, self._wake_up.set)
        await self._wake_up.wait()
        timer.cancel()


def parse_endpoint(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, the host in brackets if it is IPv6."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def dialable_addresses(listening: str, best: str = "") -> tuple[str, ...]:
    """Return the addresses of this machine's interfaces that others may dial, ``best`` and the fastest interface first.

    Empty if it listens on loopback; only the address itself if it listens on one.
    """
    if listening not in ("0.0.0.0", "::"):
        return () if listening.startswith("127.") or listening == "::1" else (listening,)
    states = psutil.net_if_stats()
    interfaces = psutil.net_if_addrs()
    up = sorted(
        (name for name in interfaces if name in states and states[name].isup),
        key=lambda n: (n != best, -states[n].speed),
    )
    kinds = (socket.AF_INET, socket.AF_INET6) if listening == "::" else (socket.AF_INET,)
    candidates = (a.address.split("%")[0] for name in up for a in interfaces[name] if a.family in kinds)
    # A link-local address (169.254...), as on a cable between two machines, is of use to one other machine only.
    addresses = sorted((a for a in candidates if not a.startswith(("127.", "fe80")) and a != "::1"), key=_is_link_local)
    return tuple(addresses[:16])


def _is_link_local(address: str) -> bool:
    return address.startswith("169.254.")
