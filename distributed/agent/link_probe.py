"""Throughput and latency between two machines over raw TCP, one direction at a time. Runs on the machines themselves.

Needs Python >= 3.9 with psutil: part of :mod:`distributed.agent.program`. The first request about links begins a
conversation, in which others follow, and the end of the input ends it.

A listener serves only connections that send its random token first. All buffers and all waits are limited.
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
from pathlib import Path
from typing import Any

import psutil

from distributed.agent.link_transfer import (
    GREETING,
    Lines,
    carries_large,
    close_all,
    connect,
    listening_socket,
    receive,
    receive_data,
    send_data,
)
from distributed.agent.requests import (
    ListAddresses,
    ListenForPeers,
    MachineRequest,
    MeasureLink,
    MeasureTogether,
    read_request,
)
from distributed.system import interface_of, own_addresses, wireless

TOKEN = 32
"""Characters of a token."""
MOST_GREETINGS = 8
"""Connections at a time that have not sent the token yet."""
MOST_STREAMS = 4
MOST_PEERS = 8
LIFETIME = 30.0
"""Maximum lifetime of a listener in seconds."""
IDLE = 120.0
"""Seconds without a request after which the program exits."""
ALONE, TOGETHER, SETTLING = 0.6, 0.25, 0.25
"""Measured seconds of a transfer: with one stream, with several, and after which it may end if its rate is known."""
MUCH_FASTER = 1.3
"""Speed-up from which several streams count: a run has one connection per member, which its window may limit."""
NO_WINDOW_HOLDS = 1.0
"""Round trip in milliseconds up to which a window of 2 MB carries 16 Gbit/s, so that several streams cannot gain."""
WITH_PEERS = 0.4
"""Measured seconds of a transfer with several machines."""
DRAIN = 0.1
"""Seconds for queues along the path to drain."""
ECHOES, ECHO_PAUSE = 32, 0.005
_BROKEN = (OSError, ValueError, KeyError, TypeError)
"""Raised when a peer disconnects or sends garbage."""


# ------------------------------------------------------------------------------------------------------------- listener


class ProbeServer:
    """Listener that serves peers with the token, for :data:`LIFETIME` seconds at most."""

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
            kind = self._read_kind(connection)
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

    def _read_kind(self, connection: socket.socket) -> bytes:
        """Return the kind of a connection: ``b"c"`` control, ``b"d"`` data, empty where the token is wrong."""
        end, greeting = time.monotonic() + GREETING, b""
        while len(greeting) <= TOKEN:
            chunk = receive(connection, TOKEN + 1 - len(greeting), end)
            if not chunk:
                return b""
            greeting += chunk
        return greeting[TOKEN:] if hmac.compare_digest(greeting[:TOKEN], self._token) else b""

    def _serve(self, lines: Lines) -> None:
        lines.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        interface = interface_of(lines.socket.getsockname()[0])
        while not self._closed.is_set():
            request = lines.read(LIFETIME)
            if request["do"] == "echo":
                answer: dict[str, Any] = {"filler": str(request.get("filler", ""))}
            elif request["do"] == "count":
                answer = {"interface": interface, "wireless": wireless(interface), "bytes": counted(interface)}
            else:
                window, least = float(request["window"]), float(request["least"])
                answer = self._transfer(request["do"], int(request["streams"]), window, least)
            lines.send(answer)

    def _transfer(self, direction: str, streams: int, window: float, least: float) -> dict[str, float]:
        window = min(window, 2.0)
        sockets = [self._data.get(timeout=GREETING) for _ in range(min(streams, MOST_STREAMS))]
        try:
            return receive_data(sockets, window, least) if direction == "receive" else send_data(sockets, window + 2.0)
        finally:
            close_all(sockets)


# ------------------------------------------------------------------------------------------------------------- measurer


class ProbedPath:
    """A path to the peer: an address of it that answers, with its open control connection."""

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
            remote = self.count()
            self.ends = self.interface, str(remote["interface"])
            self.far_wireless = bool(remote["wireless"])
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
        local, [remote] = move([self], forth, streams, window, min(window, SETTLING))
        return {**local, **remote}

    def direction(self, forth: bool, rtt_ms: float) -> dict[str, float]:
        """Measure a direction with one stream, then with several; a gain must be confirmed by a second try."""
        single = self.transfer(forth, 1, ALONE)
        if rtt_ms < NO_WINDOW_HOLDS:
            return single
        parallel = self.transfer(forth, MOST_STREAMS, TOGETHER)
        if parallel["mbit"] <= MUCH_FASTER * single["mbit"]:
            return single
        second_try = self.transfer(forth, MOST_STREAMS, ALONE)
        return second_try if second_try["mbit"] > MUCH_FASTER * single["mbit"] else single

    def quiet(self, count: int) -> tuple[list[float], float]:
        """Return round-trip times in milliseconds, and the Mbit/s of other traffic on the interfaces meanwhile."""
        time.sleep(DRAIN)
        begin, local_bytes, remote_bytes = time.monotonic(), counted(self.interface), self.count()["bytes"]
        times = self.echoes(count)
        moved = max(counted(self.interface) - local_bytes, self.count()["bytes"] - remote_bytes)
        return times, moved * 8e-6 / (time.monotonic() - begin)

    def close(self) -> None:
        self.lines.socket.close()


def move(
    paths: list[ProbedPath], forth: bool, streams: int, window: float, least: float
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Move data on all paths at once in one direction; return the figures of this end, and of each remote end.

    The receiving side counts: ``window`` seconds, or from ``least`` on until the rate is known well enough.
    """
    sockets: list[socket.socket] = []
    try:
        for path in paths:
            order = {"do": "receive" if forth else "send", "streams": streams, "window": window, "least": least}
            path.lines.send(order)
            sockets += (path.connect(b"d") for _ in range(streams))
        local = send_data(sockets, window + 2.0) if forth else receive_data(sockets, window, least)
        close_all(sockets)
        return local, [path.lines.read(window + 4.0) for path in paths]
    finally:
        close_all(sockets)


def measure(addresses: list[str], port: int, token: str) -> dict[str, Any]:
    """Try all addresses of the peer, and measure the best path to it.

    Raises:
        OSError, ValueError, KeyError, TypeError: no address answers, or the peer disconnected or sent garbage.
    """
    paths, problem = _reachable(addresses, port, token)
    if not paths:
        raise OSError(problem)
    try:
        tried = paths if len(paths) > 1 else []
        rates = {path.address: path.transfer(True, MOST_STREAMS, TOGETHER)["mbit"] for path in tried}
        best = max(paths, key=lambda path: rates.get(path.address, 0.0))
        figures = _figures(best)
        alternatives = [[path.address, *path.ends, rates.get(path.address, figures["mbit"])] for path in paths]
        return {**figures, "address": best.address, "paths": alternatives}
    finally:
        for path in paths:
            path.close()


def _reachable(addresses: list[str], port: int, token: str) -> tuple[list[ProbedPath], str]:
    """Return one path for each pair of interfaces, and the first problem with the other addresses."""
    answers: queue.Queue[tuple[int, ProbedPath | None, str]] = queue.Queue()

    def dial(number: int, address: str) -> None:
        try:
            answers.put((number, ProbedPath(address, port, token), ""))
        except _BROKEN as error:
            answers.put((number, None, f"{address}: {error or type(error).__name__}"))

    for number, address in enumerate(addresses):
        threading.Thread(target=dial, args=(number, address), daemon=True).start()
    attempts = sorted((answers.get() for _ in addresses), key=lambda answer: answer[0])
    paths: dict[tuple[str, str], ProbedPath] = {}
    for _, path, _ in attempts:
        if path is not None and paths.setdefault(path.ends, path) is not path:
            path.close()
    problems = [problem for _, path, problem in attempts if path is None]
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
        OSError, ValueError, KeyError, TypeError: fewer than two answer, or one disconnected or sent garbage.
    """
    paths: list[ProbedPath] = []
    try:
        for peer in peers:
            paths += _path_between([str(end) for end in peer["ends"]], peer)
        if len(paths) < 2:
            raise OSError("fewer than two peers answer")
        # none may end sooner: the others would have the interface to themselves
        _, remote = move(paths, True, 1, WITH_PEERS, WITH_PEERS)
        local, _ = move(paths, False, 1, WITH_PEERS, WITH_PEERS)
        return {"mbit": float(sum(end["mbit"] for end in remote)), "mbit_back": local["mbit"], "peers": len(paths)}
    finally:
        for path in paths:
            path.close()


def _path_between(ends: list[str], peer: dict[str, Any]) -> list[ProbedPath]:
    """Return the path between two interfaces, else any path; empty where the peer does not answer."""
    candidates, _ = _reachable(
        [str(address) for address in peer["addresses"]][:8], int(peer["port"]), str(peer["token"])
    )
    candidates.sort(key=lambda path: list(path.ends) != ends)
    for path in candidates[1:]:
        path.close()
    return candidates[:1]


# -------------------------------------------------------------------------------------------------------------- program


def card_rates() -> dict[str, float]:
    """Return the negotiated line rates in Mbit/s of the interfaces whose system reports them."""
    return {name: float(card.speed) for name, card in psutil.net_if_stats().items() if card.isup and card.speed > 0}


def counted(interface: str) -> int:
    """Return the bytes that passed an interface in both directions; 0 where the system does not report them."""
    counters = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    return counters.bytes_sent + counters.bytes_recv if counters is not None else 0


def answer(request: MachineRequest, listeners: list[ProbeServer]) -> dict[str, Any]:
    """Carry out one request and return the reply."""
    try:
        if isinstance(request, ListAddresses):
            return {"addresses": own_addresses(), "cards": card_rates()}
        if isinstance(request, ListenForPeers):
            listeners.append(ProbeServer(request.token))
            return {"port": listeners[-1].port}
        if isinstance(request, MeasureLink):
            return measure([*map(str, request.addresses)][:8], int(request.port), request.token)
        if isinstance(request, MeasureTogether):
            return together([dict(peer) for peer in request.peers][:MOST_PEERS])
        refused = sum(listener.refused for listener in listeners)
        for listener in listeners:
            listener.close()
        listeners.clear()
        return {"refused": refused}
    except _BROKEN as error:
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


def converse(root: Path, request: MachineRequest) -> None:
    """Carry out requests, one at a time; the end of the input ends one in progress too."""
    requests: queue.Queue[MachineRequest] = queue.Queue(16)

    def work() -> None:
        listeners: list[ProbeServer] = []
        while True:
            os.write(1, json.dumps(answer(requests.get(), listeners)).encode() + b"\n")

    def read(size: int) -> bytes:
        return os.read(0, size) if select.select([0], [], [], IDLE)[0] else b""

    threading.Thread(target=work, daemon=True).start()
    with contextlib.suppress(EOFError, ValueError):
        while True:
            requests.put(request)
            request = read_request(read)
    os._exit(0)
