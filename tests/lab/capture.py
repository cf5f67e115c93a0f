"""Captures the traffic of a network interface of this machine, as an eavesdropper could."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_ALL_PROTOCOLS = 3
_BUFFER = 64 << 20
_FORCE_BUFFER = 33
"""``SO_RCVBUFFORCE``: lets root exceed the system's limit."""


class Capture:
    """Captures raw frames of one interface while used as a context manager. Needs Linux and root."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, _FORCE_BUFFER, _BUFFER)
        self._socket.bind((interface, 0))
        self._socket.settimeout(0.1)
        self._frames: list[bytes] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def _record(self) -> None:
        while not self._end.is_set():
            try:
                self._frames.append(self._socket.recv(1 << 17))
            except TimeoutError:
                continue

    def holds(self, data: bytes) -> bool:
        """Return whether a frame has these bytes.

        Raises:
            ValueError: nothing was captured.
        """
        if not self._frames:
            raise ValueError("nothing was captured")
        return any(data in frame for frame in list(self._frames))

    def streams(self, source: str, port: int) -> list[bytes]:
        """Return the bytes of each TCP connection from ``source`` to ``port``, oldest first, up to its first gap."""
        pieces: dict[int, dict[int, bytes]] = {}
        for peer, number, payload in self._segments(source, port):
            known = pieces.setdefault(peer, {})
            known[number] = max(known.get(number, b""), payload, key=len)
        return [_joined(parts) for parts in pieces.values()]

    def _segments(self, source: str, port: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield source port, sequence number and payload of each segment; a SYN has an empty payload."""
        for frame in list(self._frames):
            if (
                frame[12:14] != b"\x08\x00"
                or frame[23] != socket.IPPROTO_TCP
                or frame[26:30] != socket.inet_aton(source)
            ):
                continue
            packet = frame[14 : 14 + int.from_bytes(frame[16:18], "big")] if frame[16:18] != b"\0\0" else frame[14:]
            segment = packet[4 * (packet[0] & 15) :]
            peer, to, number = struct.unpack("!HHI", segment[:8])
            if to == port:
                yield peer, number + (segment[13] >> 1 & 1), segment[4 * (segment[12] >> 4) :]

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self._end.set()
        self._thread.join()
        self._socket.close()


def _joined(pieces: dict[int, bytes]) -> bytes:
    """Join payloads by sequence number; retransmitted bytes count once."""
    stream, following = b"", next(iter(pieces))
    for number in sorted(pieces):
        if number > following:
            break
        stream += pieces[number][following - number :]
        following = max(following, number + len(pieces[number]))
    return stream
