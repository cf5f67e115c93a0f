"""What a reduction by owners does with bytes, and the state of one under way."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.exchange.base import ExchangeError
from training.lazy import np

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

AT_ONCE = 64 << 20
"""Bytes of a vector up to which its mean has memory of its own, and is decoded as it comes; of a longer one it takes
the contribution's place."""
KEPT_BYTES = 64 << 20
"""Of results that are kept for others at least; one may be larger than that."""


class Reduction(ABC):
    """What one reduction does with bytes; the mesh moves them. Members are named by rank."""

    pieces: Mapping[int, int]
    """In how many pieces each owner's share travels; its keys are who takes part."""

    @abstractmethod
    def contribution(self, owner: int, piece: int) -> Sequence[memoryview]:
        """Return this member's contribution to a piece of another's share: parts of one message."""

    @abstractmethod
    def contribution_buffer(self, rank: int, piece: int) -> memoryview:
        """Return where ``rank``'s contribution to a piece of the own share goes."""

    @abstractmethod
    def add_up(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        """All contributions to a piece of the own share are there, with so many bytes: return the outcome."""

    @abstractmethod
    def outcome_buffer(self, owner: int, piece: int) -> memoryview:
        """Return where the outcome of a piece of another's share goes."""

    def take(self, owner: int, piece: int, size: int) -> None:
        """The outcome of a piece of another's share is there, with ``size`` bytes."""


class BufferPool:
    """Memory for what is exchanged, used again: fresh memory costs more than the bytes that are put there. Thread-safe.

    A room comes back by itself when nothing looks at it any more: no memoryview, and no tensor.

    Args:
        most: bytes that are kept while nobody uses them.
    """

    def __init__(self, max_free_bytes: int = 128 << 20) -> None:
        self._max_free_bytes = max_free_bytes
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Return so many bytes with any contents; of rooms of one size, the one that came back last."""
        with self._lock:
            indices = range(len(self._free) - 1, -1, -1)
            index = next((index for index in indices if len(self._free[index]) == size), None)
            if index is None:
                fitting = [index for index in indices if size < len(self._free[index]) <= 2 * size]
                index = min(fitting, key=lambda index: len(self._free[index]), default=None)
            base = self._free.pop(index) if index is not None else None
        if base is None:
            base = np.empty(size, dtype=np.uint8)  # in large pages where that is possible
        buffer = base[:size]
        weakref.finalize(buffer, self._return, base).atexit = False
        data: Any = buffer  # numpy's stubs for 3.10 know no Buffer
        return memoryview(data)

    def _return(self, base: Bytes) -> None:
        if not self._lock.acquire(blocking=False):  # never wait: this may be called in the middle of anything
            return
        try:
            self._free.append(base)
            held = sum(map(len, self._free))
            while held > self._max_free_bytes:
                held -= len(self._free.pop(0))
        finally:
            self._lock.release()


class OwnedShard:
    """The own share of a reduction under way: which pieces are added up already."""

    def __init__(self, reduction: Reduction, rank: int) -> None:
        self._reduction = reduction
        self._count = reduction.pieces[rank]
        self._missing = [len(reduction.pieces) - 1] * self._count
        self._sizes: list[dict[int, int]] = [{} for _ in range(self._count)]
        self._outcomes: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._failed = False

    def arrived(self, peer: int, piece: int, size: int) -> None:
        """Note a contribution; whoever brings the last one adds up."""
        with self._changed:
            self._sizes[piece][peer] = size
            self._missing[piece] -= 1
            if self._missing[piece]:
                return
        outcome = self._reduction.add_up(piece, self._sizes[piece])
        with self._changed:
            self._outcomes[piece] = outcome
            self._changed.notify_all()

    def outcome(self, piece: int) -> memoryview:
        """Wait until a piece is added up."""
        with self._changed:
            self._changed.wait_for(lambda: piece in self._outcomes or self._failed)
            if piece not in self._outcomes:
                raise ExchangeError("the operation was broken off")
            return self._outcomes[piece]

    def fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()
