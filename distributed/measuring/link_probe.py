"""How fast two machines reach each other: raw TCP, one direction at a time. Runs on the machines themselves.

Python >= 3.9 with psutil; its source and that of what it imports of ours are handed to Python there and leave no file.
Commands are JSON lines on standard input, answers JSON lines on standard output; the end of the input ends it::

    {"op": "addresses"}                 > {"addresses": [[interface, address], ...], "cards": {interface: Mbit/s}}
    {"op": "listen", "token": T}                                 > {"port": N}
    {"op": "measure", "addresses": [...], "port": N, "token": T} > the figures, or {"error": ...}
    {"op": "together", "peers": [{"addresses": [...], "port": N, "token": T, "ends": [interface here, there]}, ...]}
                                                                 > {"mbit": to all, "mbit_back": from all, "peers": N}
    {"op": "unlisten"}                                           > {"refused": N}

A listener serves whoever sends its random token first and nobody else. All buffers and all waits have a limit.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import select
import socket
import statistics
import threading
import time
from typing import Any

import psutil

from distributed.measuring.link_transfer import (
    GREETING,
    LONGEST_LINE,
    Lines,
    carries_large,
    close_all,
    connect,
    listening_socket,
    receive,
    receive_data,
    send_data,
)
from distributed.system import interface_of, own_addresses, wireless

TOKEN = 32
"""Characters of a token."""
MOST_GREETINGS = 8
"""Connections at a time that have not shown the token yet."""
MOST_STREAMS = 4
MOST_PEERS = 8
LIFETIME = 30.0
"""Seconds a listener lives at most."""
IDLE = 120.0
"""Seconds without a command after which the program ends."""
ALONE, TOGETHER = 0.6, 0.25
"""Seconds of a transfer that count: of one stream, of several."""
MUCH_FASTER = 1.3
"""A run has one connection a member: several count only where one is held back by its window."""
NO_WINDOW_HOLDS = 1.0
"""Milliseconds of a round trip up to which a window of 2 MB carries 16 Gbit/s: several streams tell nothing."""
WITH_PEERS = 0.4
"""Seconds that count of a transfer with several machines."""
DRAIN = 0.1
"""Seconds in which queues on the way run empty."""
ECHOES, ECHO_PAUSE = 32, 0.005
_BROKEN = (OSError, ValueError, KeyError, TypeError)
"""What a peer that breaks off or sends rubbish causes."""


# ------------------------------------------------------------------------------------------------------------- listener


class ProbeServer:
    """Serves whoever has the token, for :data:`LIFETIME` seconds at most."""

    def __init__(self, token: str) -> None:
        self.refused = 0
        self._token = token.encode()
        self._data: queue.Queue[socket.socket] = queue.Queue(2 * MOST_STREAMS)
        self._greeting = threading.BoundedSemaphore(MOST_GREETINGS)
        self._closed = threading.Event()
        self._socket = listening_socket()
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _accept(self) -> None:
        end = time.monotonic() + LIFETIME
        with self._socket:
            while time.monotonic() < end and not self._closed.is_set():
                if not select.select([self._socket], [], [], 0.1)[0]:
                    continue
                with contextlib.suppress(OSError):
                    connection, _ = self._socket.accept()
                    if self._greeting.acquire(blocking=False):
                        threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
                    else:
                        self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        self.refused += 1
        connection.close()

    def _greet(self, connection: socket.socket) -> None:
        kind = b""
        try:
            kind = self._kind(connection)
        except OSError:
            pass
        finally:
            self._greeting.release()
        if kind == b"c":
            with connection, contextlib.suppress(*_BROKEN, queue.Empty):
                self._serve(Lines(connection))
            return
        try:
            if kind != b"d":
                raise queue.Full
            self._data.put_nowait(connection)
        except queue.Full:
            self._refuse(connection)

    def _kind(self, connection: socket.socket) -> bytes:
        """Return what a connection is for; nothing for whoever has not got the token."""
        end, said = time.monotonic() + GREETING, b""
        while len(said) <= TOKEN:
            more = receive(connection, TOKEN + 1 - len(said), end)
            if not more:
                return b""
            said += more
        return said[TOKEN:] if hmac.compare_digest(said[:TOKEN], self._token) else b""

    def _serve(self, lines: Lines) -> None:
        lines.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        interface = interface_of(lines.socket.getsockname()[0])
        while not self._closed.is_set():
            order = lines.read(LIFETIME)
            if order["do"] == "echo":
                answer: dict[str, Any] = {"filler": str(order.get("filler", ""))}
            elif order["do"] == "count":
                answer = {"interface": interface, "wireless": wireless(interface), "bytes": counted(interface)}
            else:
                answer = self._transfer(order["do"], int(order["streams"]), float(order["window"]))
            lines.send(answer)

    def _transfer(self, direction: str, streams: int, window: float) -> dict[str, float]:
        window = min(window, 2.0)
        sockets = [self._data.get(timeout=GREETING) for _ in range(min(streams, MOST_STREAMS))]
        try:
            return receive_data(sockets, window) if direction == "receive" else send_data(sockets, window + 2.0)
        finally:
            close_all(sockets)


# ------------------------------------------------------------------------------------------------------------- measurer


class ProbedPath:
    """One address of the peer that answers, and the way there."""

    def __init__(self, address: str, port: int, token: str) -> None:
        self.address, self._port, self._token = address, port, token
        self.loses_large = False
        self.lines = Lines(self.connect(b"c"))
        try:
            if not carries_large(self.lines):
                self.close()
                self.loses_large = True
                self.lines = Lines(self.connect(b"c"))
            self.lines.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.interface = interface_of(self.lines.socket.getsockname()[0])
            far = self.count()
            self.ends = self.interface, str(far["interface"])
            self.far_wireless = bool(far["wireless"])
        except _BROKEN:
            self.close()
            raise

    def connect(self, kind: bytes) -> socket.socket:
        connection = connect(self.address, self._port, self.loses_large)
        connection.sendall(self._token.encode() + kind)
        return connection

    def count(self) -> dict[str, Any]:
        return self.lines.ask({"do": "count"}, GREETING)

    def echoes(self, count: int) -> list[float]:
        """Return round-trip times in milliseconds."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.lines.ask({"do": "echo"}, GREETING)
            times.append((time.perf_counter() - begin) * 1e3)
            time.sleep(ECHO_PAUSE)
        return times

    def transfer(self, forth: bool, streams: int, window: float) -> dict[str, float]:
        """Move data in one direction."""
        here, [there] = move([self], forth, streams, window)
        return {**here, **there}

    def direction(self, forth: bool, rtt_ms: float) -> dict[str, float]:
        """One stream, then several; what several gain has to show twice."""
        alone = self.transfer(forth, 1, ALONE)
        if rtt_ms < NO_WINDOW_HOLDS:
            return alone
        together = self.transfer(forth, MOST_STREAMS, TOGETHER)
        if together["mbit"] <= MUCH_FASTER * alone["mbit"]:
            return alone
        again = self.transfer(forth, MOST_STREAMS, ALONE)
        return again if again["mbit"] > MUCH_FASTER * alone["mbit"] else alone

    def quiet(self, count: int) -> tuple[list[float], float]:
        """Return round-trip times in milliseconds, and Mbit/s that others move over the interfaces meanwhile."""
        time.sleep(DRAIN)
        begin, here, there = time.monotonic(), counted(self.interface), self.count()["bytes"]
        times = self.echoes(count)
        moved = max(counted(self.interface) - here, self.count()["bytes"] - there)
        return times, moved * 8e-6 / (time.monotonic() - begin)

    def close(self) -> None:
        self.lines.socket.close()


def move(
    ways: list[ProbedPath], forth: bool, streams: int, window: float
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Move data on all ways at once in one direction; return what was seen here, and at each other end.

    The side that receives counts.
    """
    sockets: list[socket.socket] = []
    try:
        for way in ways:
            way.lines.send({"do": "receive" if forth else "send", "streams": streams, "window": window})
            sockets += (way.connect(b"d") for _ in range(streams))
        here = send_data(sockets, window + 2.0) if forth else receive_data(sockets, window)
        close_all(sockets)
        return here, [way.lines.read(window + 4.0) for way in ways]
    finally:
        close_all(sockets)


def measure(addresses: list[str], port: int, token: str) -> dict[str, Any]:
    """Try all addresses of the peer, and measure the best way to it.

    Raises:
        OSError, ValueError, KeyError, TypeError: nobody answers, the peer broke off, or it sent rubbish.
    """
    paths, problem = _reachable(addresses, port, token)
    if not paths:
        raise OSError(problem)
    try:
        tried = (
            {one.address: one.transfer(True, MOST_STREAMS, TOGETHER)["mbit"] for one in paths} if len(paths) > 1 else {}
        )
        best = max(paths, key=lambda one: tried.get(one.address, 0.0))
        found = _figures(best)
        ways = [[one.address, *one.ends, tried.get(one.address, found["mbit"])] for one in paths]
        return {**found, "address": best.address, "paths": ways}
    finally:
        for one in paths:
            one.close()


def _reachable(addresses: list[str], port: int, token: str) -> tuple[list[ProbedPath], str]:
    """Return one path for each pair of interfaces, and why the last address did not do."""
    answers: queue.Queue[tuple[int, ProbedPath | None, str]] = queue.Queue()

    def call(number: int, address: str) -> None:
        try:
            answers.put((number, ProbedPath(address, port, token), ""))
        except _BROKEN as error:
            answers.put((number, None, f"{address}: {error or type(error).__name__}"))

    for number, address in enumerate(addresses):
        threading.Thread(target=call, args=(number, address), daemon=True).start()
    found = sorted((answers.get() for _ in addresses), key=lambda answer: answer[0])
    paths: dict[tuple[str, str], ProbedPath] = {}
    for _, path, _ in found:
        if path is not None and paths.setdefault(path.ends, path) is not path:
            path.close()
    problems = [problem for _, path, problem in found if path is None]
    return list(paths.values()), problems[0] if problems else "no address"


def _figures(path: ProbedPath) -> dict[str, Any]:
    times, before = path.quiet(ECHOES)
    rtt = statistics.median(times)
    forth, back = path.direction(True, rtt), path.direction(False, rtt)
    _, after = path.quiet(ECHOES // 2)
    local = path.interface in ("lo", "lo0")
    return {
        "mbit": forth["mbit"],
        "mbit_back": back["mbit"],
        "rtt_ms": rtt,
        "jitter_ms": statistics.mean(abs(a - b) for a, b in zip(times, times[1:])),  # noqa: RUF007 - pairwise needs 3.10
        "loss": forth["loss"],
        "loss_back": back["loss"],
        "interface": path.interface,
        "interface_back": path.ends[1],
        "loses_large": path.loses_large,
        "wireless": wireless(path.interface),
        "wireless_back": path.far_wireless,
        "other_mbit": 0.0 if local else max(0.0, before, after),
    }


def together(peers: list[dict[str, Any]]) -> dict[str, Any]:
    """Move data to all peers at once, then from all at once.

    Raises:
        OSError, ValueError, KeyError, TypeError: fewer than two answer, one broke off, or it sent rubbish.
    """
    ways: list[ProbedPath] = []
    try:
        for peer in peers:
            ways += _way_between([str(one) for one in peer["ends"]], peer)
        if len(ways) < 2:
            raise OSError("fewer than two peers answer")
        _, there = move(ways, True, 1, WITH_PEERS)
        here, _ = move(ways, False, 1, WITH_PEERS)
        return {"mbit": float(sum(one["mbit"] for one in there)), "mbit_back": here["mbit"], "peers": len(ways)}
    finally:
        for way in ways:
            way.close()


def _way_between(ends: list[str], peer: dict[str, Any]) -> list[ProbedPath]:
    """Return the way between two interfaces, any where they are not found; nothing where the peer does not answer."""
    found, _ = _reachable([str(one) for one in peer["addresses"]][:8], int(peer["port"]), str(peer["token"]))
    found.sort(key=lambda way: list(way.ends) != ends)
    for way in found[1:]:
        way.close()
    return found[:1]


# -------------------------------------------------------------------------------------------------------------- program


def card_rates() -> dict[str, float]:
    """Return the line rates of the interfaces in Mbit/s, as the system has agreed on them with the other end; only
    those that it tells."""
    return {name: float(one.speed) for name, one in psutil.net_if_stats().items() if one.isup and one.speed > 0}


def counted(interface: str) -> int:
    """Return the bytes that passed an interface in both directions; 0 where the system does not tell."""
    found = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    return found.bytes_sent + found.bytes_recv if found is not None else 0


def answer(order: dict[str, Any], listeners: list[ProbeServer]) -> dict[str, Any]:
    """Carry one command out."""
    try:
        if order["op"] == "addresses":
            return {"addresses": own_addresses(), "cards": card_rates()}
        if order["op"] == "listen":
            listeners.append(ProbeServer(str(order["token"])))
            return {"port": listeners[-1].port}
        if order["op"] == "measure":
            return measure([str(one) for one in order["addresses"]][:8], int(order["port"]), str(order["token"]))
        if order["op"] == "together":
            return together([dict(one) for one in order["peers"]][:MOST_PEERS])
        refused = sum(one.refused for one in listeners)
        for one in listeners:
            one.close()
        listeners.clear()
        return {"refused": refused}
    except _BROKEN as error:
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


def main() -> None:
    """Carry out commands, one at a time; the end of the input ends whatever is under way."""
    orders: queue.Queue[bytes] = queue.Queue(16)

    def work() -> None:
        listeners: list[ProbeServer] = []
        while True:
            found = answer(json.loads(orders.get()), listeners)
            os.write(1, json.dumps(found).encode() + b"\n")

    threading.Thread(target=work, daemon=True).start()
    rest = b""
    while select.select([0], [], [], IDLE)[0]:
        data = os.read(0, 4096)
        if not data or len(rest) > LONGEST_LINE:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            orders.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
