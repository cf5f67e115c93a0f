"""How a link is filled: how much goes at once, and how much of it may wait in the kernel."""

from __future__ import annotations

import contextlib
import socket

_SLOT = 0.005
"""Seconds that one frame takes on a slow link, about."""
_FEWEST = 16 << 10
"""Bytes of a frame that tell the rate."""
_FIRST, _MOST, _ALIGNMENT = 64 << 10, 256 << 10, 4 << 10
_LEAST_BUFFER, _MOST_BUFFER = 128 << 10, 4 << 20
_LOCAL = 1 << 31
"""Bytes a second above which nothing is limited by the link."""


class FlowControl:
    """Follows a link's rate with the size of frames and of the kernel's buffer.

    What is not sent yet waits in the kernel for some 5 ms: that keeps the link busy and no more. Flows of all to all,
    which compete at both ends of every link, then get on evenly. What is under way is beside that, or it would hold the
    rate down. A frame is encrypted and sent while a processor has it at hand.

    Args:
        connection: whose kernel buffer it sets.
        round_trip: of the connection, seconds.
    """

    def __init__(self, connection: socket.socket, round_trip: float) -> None:
        self.frame = _FIRST
        self._socket = connection
        self._round_trip = round_trip
        self._hold(_LEAST_BUFFER)
        self._sent_lately = self._seconds_lately = 0.0

    def note(self, size: int, seconds: float) -> None:
        """Note how long a frame took to send."""
        if size < _FEWEST:
            return
        self._sent_lately = 0.8 * self._sent_lately + size
        self._seconds_lately = 0.8 * self._seconds_lately + seconds
        rate = min(self._sent_lately / max(self._seconds_lately, 1e-9), float(_LOCAL))
        self.frame = int(min(_MOST, max(_FEWEST, rate * _SLOT // _ALIGNMENT * _ALIGNMENT)))
        buffer_size = int(min(_MOST_BUFFER, max(_LEAST_BUFFER, rate * (2 * _SLOT + 2 * self._round_trip))))
        if not 0.5 < self._buffer / buffer_size < 2.0:
            self._hold(buffer_size)

    def _hold(self, size: int) -> None:
        self._buffer = size
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size)
        with contextlib.suppress(OSError, AttributeError):  # not every system has it
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size // 2)
