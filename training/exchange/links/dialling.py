"""Dialling a peer: its addresses are tried in short succession (Happy Eyeballs), those that failed recently last."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import selectors
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Literal

import psutil

Address = tuple[str, int]
Route = Literal["dialled", "came", "relayed"]

HEAD_START = 0.25
"""Seconds that an address has before the next one is tried in parallel (RFC 8305, section 5)."""
SILENT, ASK_EVERY, ASK_TIMES = 10, 5, 4
"""Seconds of silence before a peer is probed, seconds between probes, and number of probes."""
WATCHED = 1, 1, 4
"""The same for a peer without which nothing goes on: half a minute would be lost."""
_NOT_OUTGOING, _TRIES = range(10_000, 30_000) if sys.platform == "linux" else range(0), 20
"""Ports below those that Linux gives to outgoing connections by default (ip_local_port_range). Elsewhere such a socket
may take over the port of a program that listens on all addresses, so the system chooses."""
SMALL_SEGMENT = 1200
"""TCP segment size in bytes that passes wherever IPv6 does: its packets of 1280 bytes need no path MTU discovery
(RFC 8200)."""
_POLL_SECONDS = 0.05
_FORGIVEN_AFTER = 60.0
_KNOWN_FOR = 300.0


@dataclass(frozen=True)
class DialResult:
    """A TCP connection with the first address that answered."""

    socket: socket.socket
    address: Address
    round_trip: float
    """Seconds."""


class DialHistory:
    """What this end remembers about dialling its peers, from one group to the next. Thread-safe.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: dict[tuple[int, Address], float] = {}
        self._routes: dict[tuple[int, int], tuple[Route, float]] = {}
        self._black_holes: dict[tuple[int, Address], float] = {}

    def sort_addresses(self, peer: int, addresses: Sequence[Address]) -> list[Address]:
        """Return a peer's addresses in the order in which to try them: those that failed in the last minute last, and
        before them those that carry small packets only."""
        with self._lock:
            failed = self._recent_failures()
            return sorted(
                dict.fromkeys(addresses),
                key=lambda address: ((peer, address) in failed, self._is_black_hole(peer, address)),
            )

    def record_black_hole(self, peer: int, address: Address) -> None:
        """Record that small packets reach an address and large ones do not."""
        with self._lock:
            self._black_holes[peer, address] = self._clock()

    def is_black_hole(self, peer: int, address: Address) -> bool:
        """Whether large packets to an address were lost recently."""
        with self._lock:
            return self._is_black_hole(peer, address)

    def loses_large(self, peer: int) -> bool:
        """Whether large packets to any address of a peer were lost recently."""
        with self._lock:
            return any(rank == peer and self._is_black_hole(rank, address) for rank, address in self._black_holes)

    def _is_black_hole(self, peer: int, address: Address) -> bool:
        return self._black_holes.get((peer, address), -_KNOWN_FOR) + _KNOWN_FOR > self._clock()

    def record_failure(self, peer: int, address: Address) -> None:
        """Record that an address did not answer, was slower than a later one, or belongs to another machine."""
        with self._lock:
            self._failed = {**self._recent_failures(), (peer, address): self._clock()}

    def record_success(self, peer: int, address: Address) -> None:
        """Record that an address works again."""
        with self._lock:
            self._failed.pop((peer, address), None)

    def record_route(self, peer: int, direction: int, route: Route) -> None:
        """Remember the route of a direction; after some minutes it is forgotten, and all routes are tried again."""
        with self._lock:
            before, since = self._routes.get((peer, direction), (route, 0.0))
            if before != route or since + _KNOWN_FOR < self._clock():
                self._routes[peer, direction] = route, self._clock()

    def recent_route(self, peer: int, direction: int) -> Route | None:
        """Return the recent route of a direction, if there was one."""
        with self._lock:
            route, since = self._routes.get((peer, direction), (None, 0.0))
            return route if since + _KNOWN_FOR >= self._clock() else None

    def _recent_failures(self) -> dict[tuple[int, Address], float]:
        oldest = self._clock() - _FORGIVEN_AFTER
        return {key: since for key, since in self._failed.items() if since > oldest}


def listen_on(host: str, port: int) -> socket.socket:
    """Return a listening socket on a literal address; ``::`` is all there are, of IPv4 too.

    Args:
        port: 0: a free one that Linux gives to no outgoing connection by default, so that a process that ends can
            listen on it again; otherwise any connection, or one that dials it meanwhile, could occupy it.

    Raises:
        OSError: the address is not this machine's, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual_stack = host == "::" and socket.has_dualstack_ipv6()
    for candidate in () if port else SystemRandom().sample(_NOT_OUTGOING, min(_TRIES, len(_NOT_OUTGOING))):
        with contextlib.suppress(OSError):
            return socket.create_server((host, candidate), family=family, backlog=64, dualstack_ipv6=dual_stack)
    return socket.create_server((host, port), family=family, backlog=64, dualstack_ipv6=dual_stack)


def keep_alive(connection: socket.socket, is_watched: bool = False) -> None:
    """Probe a silent peer regularly: cut cables give no signal, and routers forget silent connections.

    The kernels send and answer the probes, also for a process that is busy or stopped. Without an answer for half a
    minute, or 5 seconds where the peer ``is_watched``, the connection ends.
    """
    silent, every, times = WATCHED if is_watched else (SILENT, ASK_EVERY, ASK_TIMES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", 0x10)  # on macOS TCP_KEEPALIVE, which Python 3.10 has no name for
    for option, value in ((idle, silent), (socket.TCP_KEEPINTVL, every), (socket.TCP_KEEPCNT, times)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def first_to_answer(
    addresses: Sequence[Address],
    seconds: float,
    failed: Callable[[Address, str], None],
    stop: Callable[[], bool] = lambda: False,
    in_small_segments: Callable[[Address], bool] = lambda address: False,
) -> DialResult | None:
    """Connect with one of ``addresses``, literal ones, the best first (RFC 8305, "Happy Eyeballs", section 5).

    Each has a head start of :data:`HEAD_START` before the next; after a failure the next starts at once.

    Args:
        failed: called for each address that refused and, once another has answered or the time is up, for each that did
            not answer.
        stop: polled twenty times a second: whether to give up.
        in_small_segments: whether both ends are to send segments of :data:`SMALL_SEGMENT` bytes on an address.
    """
    begin = next_at = time.monotonic()
    waiting, left = list(addresses), dict[Address, tuple[socket.socket, float]]()
    with selectors.PollSelector() as selector:
        try:
            while (waiting or left) and time.monotonic() < begin + seconds and not stop():
                if waiting and (time.monotonic() >= next_at or not left):
                    next_at = time.monotonic() + HEAD_START
                    small = in_small_segments(address := waiting.pop(0))
                    if (connection := _start(address, failed, small)) is not None:
                        left[address] = connection, time.monotonic()
                        selector.register(connection, selectors.EVENT_WRITE, address)
                ready = {key.data for key, _ in selector.select(_POLL_SECONDS if left else 0.0)}
                for address in [pending for pending in left if pending in ready]:
                    connection, since = left.pop(address)
                    selector.unregister(connection)
                    if not (error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                        connection.setblocking(True)
                        return DialResult(connection, address, time.monotonic() - since)
                    connection.close()
                    failed(address, os.strerror(error))
            return None
        finally:
            for address, (connection, since) in left.items():
                connection.close()
                if time.monotonic() - since >= HEAD_START:
                    failed(address, "it does not answer")


def send_small_segments(connection: socket.socket) -> None:
    """Have both ends send small segments; call it before the socket is connected."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)


def unacknowledged(connection: socket.socket) -> int | None:
    """Return the bytes sent that the other end's kernel has not acknowledged; ``None``: unknown on this system."""
    if not sys.platform.startswith("linux"):
        return None
    return int(struct.unpack("=i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


def _start(address: Address, failed: Callable[[Address, str], None], small: bool) -> socket.socket | None:
    host, port = address
    try:
        ipaddress.ip_address(host)  # getaddrinfo accepts other texts, too, and any number as a port
        if not 0 < port < 65536:
            raise ValueError(f"{port} is no port")
        kind = socket.SOCK_STREAM
        [(family, kind, protocol, _, socket_address), *_] = socket.getaddrinfo(
            host, port, type=kind, flags=socket.AI_NUMERICHOST
        )
        connection = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        failed(address, getattr(error, "strerror", "") or str(error))
        return None
    connection.setblocking(False)
    if small:
        send_small_segments(connection)
    if (error_number := connection.connect_ex(socket_address)) in (0, errno.EINPROGRESS):
        return connection
    connection.close()
    failed(address, os.strerror(error_number))
    return None


def interface_at(address: str) -> str:
    """Return the name of the network interface that has a literal address; empty if there is none."""
    plain = address.partition("%")[0].removeprefix("::ffff:")
    by_name = psutil.net_if_addrs().items()
    return next((name for name, found in by_name for a in found if a.address.partition("%")[0] == plain), "")
