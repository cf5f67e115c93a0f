"""What two link probes say to each other: JSON lines, and data that is counted where it arrives.

Standard library only, Python >= 3.9: it goes to the machines together with :mod:`distributed.measuring.link_probe`.
"""

from __future__ import annotations

import contextlib
import json
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
"""Seconds in which the token has to be here."""
LONGEST_LINE = 65536
WARM_UP = 0.2
"""Seconds of each transfer before counting begins."""
FEW_BYTES = 4_000_000
"""A link that has carried fewer in its time is given as much time again."""
PARTS = 12
LARGE, LARGE_SECONDS = 9216, 1.5
"""Bytes that no packet of any network card holds, and seconds in which they pass where large packets do."""
SMALL_SEGMENT = 1200
"""Bytes of a TCP segment that passes wherever IPv6 does."""
_FINE = 0.0005
_TCP_INFO_RETRANSMITS, _TCP_INFO_MSS = 100, 16
"""Offsets in Linux' struct tcp_info."""


class Lines:
    """JSON lines over a socket, each with a deadline and a limit."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.settimeout(GREETING)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self, patience: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            OSError: it ended, or was late.
            ValueError: no JSON object, or too long.
        """
        end = time.monotonic() + patience
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST_LINE:
                raise ValueError("a line that is too long")
            more = receive(self.socket, 4096, end)
            if not more:
                raise ConnectionError("the peer closed the connection")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        return message

    def ask(self, message: dict[str, Any], patience: float) -> dict[str, Any]:
        self.send(message)
        return self.read(patience)


def listening_socket() -> socket.socket:
    """Return a socket that listens on all addresses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))


def connect(address: str, port: int, small: bool) -> socket.socket:
    """Connect; with ``small`` both ends send small segments only.

    Raises:
        OSError: nobody answers.
    """
    (family, kind, protocol, _, place), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    connection = socket.socket(family, kind, protocol)
    try:
        if small:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        connection.settimeout(GREETING)
        connection.connect(place)
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
    """Return some bytes, nothing at the end.

    Raises:
        OSError: none came until ``end``, or the connection broke.
    """
    connection.settimeout(max(0.001, end - time.monotonic()))
    return connection.recv(size)


def send_data(sockets: list[socket.socket], seconds: float) -> dict[str, float]:
    """Send until the peer has enough, or for ``seconds``; return bytes, and the share of them sent twice."""
    block = memoryview(os.urandom(BLOCK))
    end, sent, lost, open_ones = time.monotonic() + seconds, 0, 0.0, list(sockets)
    for one in sockets:
        one.setblocking(False)
    while open_ones and time.monotonic() < end:
        for one in select.select([], open_ones, [], 0.1)[1]:
            try:
                sent += one.send(block)
            except BlockingIOError:
                continue
            except OSError:  # the receiver has enough
                lost += retransmitted(one)
                open_ones.remove(one)
    lost += sum(retransmitted(one) for one in open_ones)
    return {"sent": sent, "loss": min(1.0, lost / sent) if sent else 0.0}


def retransmitted(connection: socket.socket) -> float:
    """Return the bytes that TCP sent again on a connection; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        again = struct.unpack_from("=I", info, _TCP_INFO_RETRANSMITS)[0]
        return float(again * struct.unpack_from("=I", info, _TCP_INFO_MSS)[0])
    except (OSError, struct.error):
        return 0.0


def receive_data(sockets: list[socket.socket], window: float) -> dict[str, float]:
    """Receive, and count for ``window`` seconds after the warm-up, twice as long on a slow link; return Mbit/s."""
    buffer, total, open_ones = bytearray(BLOCK), 0, list(sockets)
    marks: list[tuple[float, int]] = []
    warm, end = 0.0, time.monotonic() + GREETING
    while open_ones and not _enough(end, window if warm else 0.0, marks):
        for one in select.select(open_ones, [], [], 0.1)[0]:
            try:
                count = one.recv_into(buffer)
            except OSError:
                count = 0
            now = time.monotonic()
            total += count
            if not count:
                open_ones.remove(one)
            elif not warm:
                warm = now + WARM_UP
                end = warm + window
            elif now >= warm and (not marks or now > marks[-1][0] + _FINE):
                marks.append((now, total))
    return {"mbit": usual_rate(marks) * 8e-6}


def _enough(end: float, more: float, marks: list[tuple[float, int]]) -> bool:
    now, counted = time.monotonic(), marks[-1][1] - marks[0][1] if marks else 0
    return now > end and (counted > FEW_BYTES or now > end + more)


def usual_rate(marks: list[tuple[float, int]]) -> float:
    """Return bytes/s: the median over equal parts of the time.

    A processor that was elsewhere for a moment, or TCP handing out what it held back for a lost packet, move bytes
    from one part to the next; the median stays.

    Args:
        marks: times and bytes so far, both rising.
    """
    if len(marks) < 2:
        return 0.0
    begin, part = marks[0][0], (marks[-1][0] - marks[0][0]) / PARTS
    totals, number = [], 0
    for edge in (begin + part * index for index in range(PARTS + 1)):
        while number < len(marks) - 2 and marks[number + 1][0] < edge:
            number += 1
        (t0, b0), (t1, b1) = marks[number], marks[number + 1]
        totals.append(b0 + (b1 - b0) * min(1.0, (edge - t0) / (t1 - t0)))
    return statistics.median(after - before for before, after in zip(totals, totals[1:])) / part  # noqa: RUF007


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close at once; what is still under way is dropped."""
    for one in sockets:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
