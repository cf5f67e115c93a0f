"""How a link is filled: the size of frames, and how many bytes may wait in the kernel."""

from __future__ import annotations

import contextlib
import socket

_SLOT = 0.005
"""Approximate duration of one frame on a slow link, in seconds."""
_MIN_FRAME = 16 << 10
"""Bytes of the smallest frame from which the rate is estimated."""
_INITIAL_FRAME, _MAX_FRAME, _ALIGNMENT = 64 << 10, 256 << 10, 4 << 10
_MIN_BUFFER, _MAX_BUFFER = 128 << 10, 4 << 20
_LOCAL = 1 << 31
"""Bytes a second above which the link is no bottleneck."""


class FlowControl:
    """Adapts the size of frames and of the kernel's send buffer to a link's rate.

    Unsent bytes wait in the kernel for some 5 ms: enough to keep the link busy, and no more, so that the flows of an
    all-to-all, which compete at both ends of every link, progress evenly. Bytes in flight are not counted, or they
    would limit the rate. A frame is encrypted and sent while it is in the processor's cache.

    Args:
        connection: the socket whose send buffer is set.
        round_trip: of the connection, seconds.
    """

    def __init__(self, connection: socket.socket, round_trip: float) -> None:
        self.frame = _INITIAL_FRAME
        self._socket = connection
        self._round_trip = round_trip
        self._set_buffer(_MIN_BUFFER)
        self._recent_bytes = self._recent_seconds = 0.0

    def note(self, size: int, seconds: float) -> None:
        """Record how long a frame took to send."""
        if size < _MIN_FRAME:
            return
        self._recent_bytes = 0.8 * self._recent_bytes + size
        self._recent_seconds = 0.8 * self._recent_seconds + seconds
        rate = min(self._recent_bytes / max(self._recent_seconds, 1e-9), float(_LOCAL))
        self.frame = int(min(_MAX_FRAME, max(_MIN_FRAME, rate * _SLOT // _ALIGNMENT * _ALIGNMENT)))
        buffer_size = int(min(_MAX_BUFFER, max(_MIN_BUFFER, rate * (2 * _SLOT + 2 * self._round_trip))))
        if not 0.5 < self._buffer / buffer_size < 2.0:
            self._set_buffer(buffer_size)

    def _set_buffer(self, size: int) -> None:
        self._buffer = size
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * size)
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size // 2)
