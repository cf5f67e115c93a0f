"""Whose turn it is to send: where all members send to all at once, flows compete at both ends of every link."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

SLOT = 0.005
"""Seconds that one frame takes on a slow link, about."""


class Rotation:
    """Flows take turns: where all send to all at once, they compete at both ends and slow links lose a third.

    Whoever waits is served in the order of ``peers``. A flow that does not get on within :data:`PATIENCE` is overtaken.
    """

    PATIENCE = 4 * SLOT

    def __init__(self, peers: Sequence[int]) -> None:
        self._order = {peer: number for number, peer in enumerate(peers)}
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._sending: int | None = None
        self._since = 0.0
        self._last = -1

    def enter(self, peer: int) -> None:
        """Wait for this flow's turn."""
        with self._changed:
            self._waiting.add(peer)
            while (seconds := self._seconds_until(peer)) > 0:
                self._changed.wait(seconds)
            self._waiting.discard(peer)
            self._sending, self._since, self._last = peer, time.monotonic(), self._order[peer]

    def leave(self, peer: int) -> None:
        """End this flow's turn."""
        with self._changed:
            if self._sending == peer:
                self._sending = None
                self._changed.notify_all()

    def _seconds_until(self, peer: int) -> float:
        if self._sending is not None and (left := self._since + self.PATIENCE - time.monotonic()) > 0:
            return left
        size = len(self._order)
        first = min(self._waiting, key=lambda other: (self._order[other] - self._last - 1) % size)
        return 0.0 if first == peer else self.PATIENCE
