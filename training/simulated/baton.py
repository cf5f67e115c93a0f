"""Of several threads one goes on at a time; the others wait for their turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from training.randomness import kept


class Baton:
    """Who holds it goes on. It is passed in the order in which it is asked for, and only where its holder waits: so a
    member computes with all processors, and who draws from the shared generators is never disturbed.

    Args:
        device: whose generator each holder has a state of its own of, beside those of Python, numpy and torch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def take(self) -> None:
        """Wait for one's turn."""
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            self._waiting.append(turn)
        turn.acquire()

    def give(self) -> None:
        """Let the next one go on."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let others go on while this one waits; the generators are as they were when it goes on itself."""
        with kept(self._device):
            self.give()
            try:
                yield
            finally:
                self.take()
