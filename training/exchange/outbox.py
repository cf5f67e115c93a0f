"""What waits to be sent on one stream, with a limit in bytes and a reason for its end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator


class Outbox:
    """A queue of messages for one stream; iterate it to send. Safe to use from several threads.

    Args:
        limit: bytes that may wait; :meth:`put` beyond it returns ``False`` and nothing is added.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self.reason = ""
        """Why the stream was ended; empty for a normal end."""

    def put(self, message: bytes) -> bool:
        """Add a message. Returns whether there was room; a closed outbox swallows everything."""
        with self._changed:
            if self._closed:
                return True
            if self._bytes + len(message) > self.limit:
                return False
            self._messages.append(message)
            self._bytes += len(message)
            self._changed.notify()
            return True

    def close(self, reason: str = "") -> None:
        """End the stream: with a ``reason`` at once, without one after what waits. The first reason stays."""
        with self._changed:
            self.reason = self.reason or reason
            self._closed = True
            if self.reason:
                self._messages.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                while not self._messages and not self._closed:
                    self._changed.wait()
                if not self._messages:
                    return
                message = self._messages.popleft()
                self._bytes -= len(message)
            yield message
