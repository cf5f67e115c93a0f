"""Protocol between two link probes: JSON lines for control, and bulk data that is counted at the receiver.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any

BLOCK = 256 * 1024
GREETING = 2.0
"""Seconds in which the token must arrive."""
LONGEST_LINE = 65536
WARM_UP = 0.2
"""Seconds of each transfer before the measurement begins."""
FEW_BYTES = 4_000_000
"""A link that has carried fewer bytes in its window gets the same window once more."""
INTERVALS = 12
"""Equal intervals of a transfer whose median rate is taken."""
LARGE, LARGE_SECONDS = 9216, 1.5
"""Bytes that exceed the packet size of any network card, and seconds in which they pass where large packets do."""
SMALL_SEGMENT = 1200
"""Bytes of a TCP segment that passes every IPv6 path."""
SETTLED = 0.02
"""Standard error of a median rate over that rate from which on it is known well enough."""
_LOOK_INTERVAL = 0.05
"""Seconds between two looks at whether a rate is known well enough."""
_MARK_INTERVAL = 0.0005
"""Least seconds between two recorded marks."""
_TCP_INFO_RETRANSMITS, _TCP_INFO_MSS = 100, 16
"""Offsets in Linux' struct tcp_info."""


class Lines:
    """JSON lines over a socket, each with a deadline and a size limit."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.settimeout(GREETING)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self, timeout: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            OSError: the connection ended, or the message did not arrive in time.
            ValueError: it is not a JSON object, or too long.
        """
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST_LINE:
                raise ValueError("a line that is too long")
            chunk = receive(self.socket, 4096, end)
            if not chunk:
                raise ConnectionError("the peer closed the connection")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.send(message)
        return self.read(timeout)


def listening_socket() -> socket.socket:
    """Return a socket that listens on all addresses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))


def connect(address: str, port: int, small: bool) -> socket.socket:
    """Connect; with ``small`` both ends send small segments only.

    Raises:
        OSError: the connection cannot be made.
    """
    (family, kind, protocol, _, address_info), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    connection = socket.socket(family, kind, protocol)
    try:
        if small:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        connection.settimeout(GREETING)
        connection.connect(address_info)
    except BaseException:
        connection.close()
        raise
    return connection


def carries_large(lines: Lines) -> bool:
    """Whether large packets pass in both directions, where small ones do."""
    try:
        return bool(lines.ask({"do": "echo", "filler": "x" * LARGE}, LARGE_SECONDS))
    except OSError:
        return False


def receive(connection: socket.socket, size: int, end: float) -> bytes:
    """Return available bytes; empty at the end of the stream.

    Raises:
        OSError: none arrived before ``end``, or the connection broke.
    """
    connection.settimeout(max(0.001, end - time.monotonic()))
    return connection.recv(size)


def send_data(sockets: list[socket.socket], seconds: float) -> dict[str, float]:
    """Send until the peer has enough, or for ``seconds``; return the bytes sent and the share retransmitted."""
    block = memoryview(os.urandom(BLOCK))
    end, sent, lost, active = time.monotonic() + seconds, 0, 0.0, list(sockets)
    for connection in sockets:
        connection.setblocking(False)
    while active and time.monotonic() < end:
        for connection in select.select([], active, [], 0.1)[1]:
            try:
                sent += connection.send(block)
            except BlockingIOError:
                continue
            except OSError:  # the receiver has enough
                lost += retransmitted(connection)
                active.remove(connection)
    lost += sum(retransmitted(connection) for connection in active)
    return {"sent": sent, "loss": min(1.0, lost / sent) if sent else 0.0}


def retransmitted(connection: socket.socket) -> float:
    """Return the bytes that TCP retransmitted on a connection; 0 where the system does not report them."""
    if not sys.platform.startswith("linux"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        segments = struct.unpack_from("=I", info, _TCP_INFO_RETRANSMITS)[0]
        return float(segments * struct.unpack_from("=I", info, _TCP_INFO_MSS)[0])
    except (OSError, struct.error):
        return 0.0


def receive_data(sockets: list[socket.socket], window: float, least: float) -> dict[str, float]:
    """Receive and count after the warm-up; return Mbit/s.

    Args:
        window: seconds that are counted, twice as long on a slow link.
        least: seconds of them after which it may end, if the rate is known well enough.
    """
    buffer, total, active = bytearray(BLOCK), 0, list(sockets)
    marks: list[tuple[float, int]] = []
    warm, end, look, settled = 0.0, time.monotonic() + GREETING, 0.0, False
    while active and not settled and not _enough(end, window if warm else 0.0, marks):
        for connection in select.select(active, [], [], 0.1)[0]:
            try:
                count = connection.recv_into(buffer)
            except OSError:
                count = 0
            now = time.monotonic()
            total += count
            if not count:
                active.remove(connection)
            elif not warm:
                warm = now + WARM_UP
                end, look = warm + window, warm + least
            elif now >= warm and (not marks or now > marks[-1][0] + _MARK_INTERVAL):
                marks.append((now, total))
        if marks and marks[-1][0] > look:
            look, settled = marks[-1][0] + _LOOK_INTERVAL, is_settled(marks)
    return {"mbit": median_rate(marks) * 8e-6}


def _enough(end: float, extension: float, marks: list[tuple[float, int]]) -> bool:
    now, received = time.monotonic(), marks[-1][1] - marks[0][1] if marks else 0
    return now > end and (received > FEW_BYTES or now > end + extension)


def is_settled(marks: list[tuple[float, int]]) -> bool:
    """Whether the median rate of enough bytes is known to :data:`SETTLED`, by the median absolute deviation of the
    intervals."""
    if marks[-1][1] - marks[0][1] <= FEW_BYTES:
        return False
    rates = _interval_rates(marks)
    median = statistics.median(rates)
    deviation = statistics.median(abs(rate - median) for rate in rates)
    # of normally distributed rates: 1.48 deviations are a standard deviation, 1.25 times as large is a median's error
    return bool(1.48 * 1.25 * deviation <= SETTLED * median * math.sqrt(len(rates)))


def median_rate(marks: list[tuple[float, int]]) -> float:
    """Return bytes/s: the median over equal intervals of time.

    A descheduled process, or TCP releasing what it held back for a lost packet, moves bytes from one interval to the
    next; the median is not affected.

    Args:
        marks: pairs of time and total bytes, both increasing.
    """
    return statistics.median(_interval_rates(marks))


def _interval_rates(marks: list[tuple[float, int]]) -> list[float]:
    """Return the rate in each of :data:`INTERVALS` equal intervals; 0 without two marks."""
    if len(marks) < 2:
        return [0.0]
    begin, interval = marks[0][0], (marks[-1][0] - marks[0][0]) / INTERVALS
    totals, number = [], 0
    for edge in (begin + interval * index for index in range(INTERVALS + 1)):
        while number < len(marks) - 2 and marks[number + 1][0] < edge:
            number += 1
        (t0, b0), (t1, b1) = marks[number], marks[number + 1]
        totals.append(b0 + (b1 - b0) * min(1.0, (edge - t0) / (t1 - t0)))
    return [(after - before) / interval for before, after in zip(totals, totals[1:])]  # noqa: RUF007 - from 3.10


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close at once; data in flight is dropped."""
    for connection in sockets:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
