"""How one direction to or from one peer is established: by dialling, by being dialled, or at the relay."""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from profiles.errors import MusterError
from training.exchange.base import ExchangeError
from training.exchange.links.certificates import relay_key
from training.exchange.links.connection import Connection
from training.exchange.links.dialling import Address, DialHistory, Route, first_to_answer
from training.exchange.links.handshake import (
    POLL_SECONDS,
    SENDS,
    Arrival,
    BlackHole,
    ConnectTimeouts,
    Handshakes,
    HandshakeTimeout,
    Key,
)
from training.exchange.links.relay import connect_through_relay

MAX_WAITING = 32
"""Untaken connections that are kept for one peer."""


class Arrivals:
    """Incoming connections that have not been asked for yet. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Key, Arrival] = {}
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> dict[Key, Arrival]:
        """The waiting connections, by purpose."""
        with self._changed:
            return dict(self._waiting)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def add(self, key: Key, arrival: Arrival) -> None:
        """Keep an incoming connection; of one peer at most as many as it can need."""
        with self._changed:
            gone = [old for old, waiting in self._waiting.items() if old == key or waiting.is_abandoned(old[2])]
            of_peer = [old for old in self._waiting if old[1] == key[1] and old not in gone]
            for dropped in (*gone, *of_peer[: max(0, len(of_peer) + 1 - MAX_WAITING)]):
                self._waiting.pop(dropped).socket.close()
            if self.closed:
                arrival.socket.close()
                return
            self._waiting[key] = arrival
            self._changed.notify_all()

    def take(self, key: Key) -> Arrival | None:
        with self._changed:
            arrival = self._waiting.pop(key, None)
        if arrival is not None and arrival.is_abandoned(key[2]):
            arrival.socket.close()
            return None
        return arrival

    def wait(self, stop: Callable[[], bool], seconds: float) -> None:
        """Wait until an arrival makes ``stop`` true."""
        with self._changed:
            self._changed.wait_for(stop, seconds)

    def wake(self) -> None:
        """Have all waiting threads check again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close all connections, and all that arrive from now on."""
        with self._changed:
            self.closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
            self._changed.notify_all()
        for arrival in waiting:
            arrival.socket.close()


class ConnectionAttempt:
    """Establishes one direction. Args: see :meth:`~training.exchange.links.listener.Listener.connect`; ``key`` is its
    purpose."""

    def __init__(
        self,
        handshakes: Handshakes,
        history: DialHistory,
        arrivals: Arrivals,
        key: Key,
        addresses: Sequence[Address],
        relay: Address | None,
        deadline: float,
        is_wanted: Callable[[], bool],
        timeouts: ConnectTimeouts,
    ) -> None:
        self._is_wanted, self._timeouts = is_wanted, timeouts
        self._handshakes, self._history, self._arrivals = handshakes, history, arrivals
        self._key, self._relay, self._deadline = key, relay, deadline
        self._addresses = [(host, port) for host, port in addresses]
        _, self._peer, self._direction = key
        self._problems: dict[str, str] = {}

    @property
    def problem(self) -> str:
        """The last problem of each route."""
        return ", ".join(f"{route}: {why}" for route, why in self._problems.items())

    def meet(self) -> Connection | None:
        """Return the connection; ``None`` if there is none by the deadline, or when the listener is closed."""
        begin = time.monotonic()
        recent = self._history.recent_route(self._peer, self._direction)
        dials_at_once = self._direction == SENDS or recent == "dialled"
        self._dials_from = begin + (0.0 if dials_at_once else self._timeouts.reverse_after)
        after = self._timeouts.relay_again_after if recent == "relayed" else self._timeouts.relay_after
        self._relays_from = begin + after if self._relay is not None else math.inf
        attempts: dict[Route, Callable[[], Connection | None]] = {
            "came": self._take_arrival,
            "dialled": self._dial,
            "relayed": self._dial_relay,
        }
        while not self._is_over():
            for route, attempt in attempts.items():
                if (connection := attempt()) is not None:
                    route = route if connection.address else "relayed"
                    self._history.record_route(self._peer, self._direction, route)
                    return replace(connection, route=route, loses_large=self._history.loses_large(self._peer))
            self._arrivals.wait(self._stop, self._pause())
        return None

    def _is_over(self) -> bool:
        return self._unwanted() or time.monotonic() >= self._deadline

    def _unwanted(self) -> bool:
        return self._arrivals.closed or not self._is_wanted()

    def _stop(self) -> bool:
        """Whether to stop trying."""
        return self._key in self._arrivals or self._is_over()

    def _pause(self) -> float:
        now = time.monotonic()
        after = min(self._dials_from if self._addresses else math.inf, self._relays_from)
        return max(0.0, min(self._deadline - now, max(POLL_SECONDS, after - now)))

    def _take_arrival(self) -> Connection | None:
        """Take an incoming connection."""
        if (arrival := self._arrivals.take(self._key)) is None:
            return None
        try:
            return self._handshakes.take(arrival, self._direction, self._timeout(self._timeouts.hurried))
        except (OSError, EOFError, ExchangeError) as error:
            arrival.socket.close()
            if isinstance(error, BlackHole) and arrival.address:
                self._history.record_black_hole(self._peer, (arrival.address, 0))
            self._problems[f"direct {arrival.address}" if arrival.address else "relayed"] = _describe_error(error)
            return None

    def _dial(self) -> Connection | None:
        left = self._history.sort_addresses(self._peer, self._addresses)
        black_holes = {address for address in left if self._history.is_black_hole(self._peer, address)}
        small = set(black_holes)
        while left and not self._stop() and (now := time.monotonic()) >= self._dials_from:
            times = self._timeouts
            seconds = max(times.relay_again_after, min(times.connect, self._relays_from - now))
            if (answer := first_to_answer(left, seconds, self._failed, self._stop, small.__contains__)) is None:
                return None
            left.remove(address := answer.address)
            try:
                seconds = times.hurried if left or address in small else self._last_seconds()
                connection = self._open_handshake(answer.socket, address[0], answer.round_trip, seconds)
            except (OSError, EOFError, ExchangeError) as error:
                self._failed(address, _describe_error(error))
                if isinstance(error, BlackHole):
                    self._history.record_black_hole(self._peer, address)
                if isinstance(error, (BlackHole, TimeoutError)) and address not in small:
                    small.add(address)
                    left.append(address)  # again, if no other address works
                continue
            if connection is not None:
                self._history.record_success(self._peer, address)
                if address in small - black_holes:
                    self._history.record_black_hole(self._peer, address)
            return connection
        return None

    def _last_seconds(self) -> float:
        """Return how long the last address may take to answer; not long if there is a relay, too."""
        times = self._timeouts
        return times.handshake if self._relay is None else min(times.handshake, times.relay_after + 1.0)

    def _failed(self, address: Address, why: str) -> None:
        self._problems[f"{address[0]}:{address[1]}"] = why
        self._history.record_failure(self._peer, address)

    def _dial_relay(self) -> Connection | None:
        folder = self._handshakes.identity.certificates
        if self._relay is None or folder is None or time.monotonic() < self._relays_from:
            return None
        channel, own_rank = self._key[0], self._handshakes.identity.rank
        sides = (channel, own_rank, self._peer) if self._direction == SENDS else (channel, self._peer, own_rank)
        try:
            connection = connect_through_relay(
                self._relay, relay_key(folder), sides, self._direction == SENDS, self._stop
            )
            if connection is None:
                return None
            if self._direction == SENDS:
                return self._open_handshake(connection, "", 0.0, self._timeouts.handshake)
            self._arrivals.add(*self._handshakes.answer(connection, ""))
        except (OSError, EOFError, ExchangeError, MusterError, ValueError) as error:
            self._problems[f"relay {self._relay[0]}:{self._relay[1]}"] = _describe_error(error)
        return None

    def _open_handshake(
        self, connection: socket.socket, address: str, round_trip: float, seconds: float
    ) -> Connection | None:
        return self._handshakes.open_handshake(connection, self._key, address, round_trip, self._timeout(seconds))

    def _timeout(self, seconds: float) -> HandshakeTimeout:
        seconds = min(seconds, self._deadline - time.monotonic())
        return HandshakeTimeout(seconds, self._unwanted, lambda: self._key in self._arrivals)


def _describe_error(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "who answers there is not of this run"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason}"
    if isinstance(error, TimeoutError):
        return "it takes connections, but says nothing"
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
