"""A lock that makes threads run one at a time, in the order in which they ask."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from training.numerics.randomness import preserved_generators


class Baton:
    """A fair lock: only its holder runs, and passes it on only while it waits.

    So a member computes with all processors, and its draws from the shared random generators are not interleaved.

    Args:
        device: each holder has its own state of this device's generator, and of those of Python, numpy and torch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        """Wait for the calling thread's turn."""
        turn = threading.Lock()
        turn.acquire()
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            self._waiting.append(turn)
        turn.acquire()

    def release(self) -> None:
        """Let the next thread run."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let other threads run while this one waits; afterwards restore the random generators."""
        with preserved_generators(self._device):
            self.release()
            try:
                yield
            finally:
                self.acquire()
