"""The interface of a reduction by owners, the buffers it uses, and the progress of a member's own shard."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.exchange.base import ExchangeError
from training.exchange.links.loop import ANYTHING
from training.lazy import np

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

AT_ONCE = 64 << 20
"""Bytes of a vector up to which its mean has its own memory and is decoded as it arrives; the mean of a longer vector
is written over the contribution."""
KEPT_BYTES = 64 << 20
"""Minimum bytes of results kept for other members; a single result may be larger."""


class Reduction(ABC):
    """What one reduction does with bytes; the mesh transfers them. Members are identified by rank."""

    pieces: Mapping[int, int]
    """Number of pieces of each owner's shard; the keys are the members that take part."""

    @abstractmethod
    def contribution(self, owner: int, piece: int) -> Sequence[memoryview]:
        """Return this member's contribution to a piece of another member's shard, as buffers of one message."""

    @abstractmethod
    def contribution_buffer(self, rank: int, piece: int) -> memoryview:
        """Return the buffer for ``rank``'s contribution to a piece of this member's shard."""

    @abstractmethod
    def reduce_piece(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        """Reduce a piece of this member's shard, given the sizes of all contributions; return the outcome."""

    @abstractmethod
    def outcome_buffer(self, owner: int, piece: int) -> memoryview:
        """Return the buffer for the outcome of a piece of another member's shard."""

    def take(self, owner: int, piece: int, size: int) -> None:
        """Process the outcome of a piece of another member's shard, which has ``size`` bytes."""


class BufferPool:
    """Reusable buffers: allocating fresh memory costs more than filling it. Thread-safe.

    A buffer returns to the pool by itself once no memoryview or tensor refers to it.

    Args:
        max_free_bytes: limit of the unused buffers that are kept.
    """

    def __init__(self, max_free_bytes: int = 128 << 20) -> None:
        self._max_free_bytes = max_free_bytes
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> memoryview:
        """Return an uninitialised buffer of ``size`` bytes; of free buffers of that size, the one returned last."""
        with self._lock:
            indices = range(len(self._free) - 1, -1, -1)
            index = next((index for index in indices if len(self._free[index]) == size), None)
            if index is None:
                fitting = [index for index in indices if size < len(self._free[index]) <= 2 * size]
                index = min(fitting, key=lambda index: len(self._free[index]), default=None)
            base = self._free.pop(index) if index is not None else None
        if base is None:
            base = np.empty(size, dtype=np.uint8)  # in large pages where possible
        buffer = base[:size]
        weakref.finalize(buffer, self._return, base).atexit = False
        data: Any = buffer  # numpy's stubs for 3.10 know no Buffer
        return memoryview(data)

    def _return(self, base: Bytes) -> None:
        if not self._lock.acquire(blocking=False):  # never block: a finalizer may run at any point
            return
        try:
            self._free.append(base)
            held = sum(map(len, self._free))
            while held > self._max_free_bytes:
                held -= len(self._free.pop(0))
        finally:
            self._lock.release()


class OwnedShard:
    """This member's shard of a reduction in flight: which pieces have been reduced. Only the thread that drives the
    links uses it, but for :meth:`fail`."""

    def __init__(self, reduction: Reduction, rank: int) -> None:
        self._reduction = reduction
        count = reduction.pieces[rank]
        self._missing = [len(reduction.pieces) - 1] * count
        self._sizes: list[dict[int, int]] = [{} for _ in range(count)]
        self._outcomes: dict[int, memoryview] = {}
        self._failed = False

    def arrived(self, peer: int, piece: int, size: int) -> None:
        """Record a contribution; the last one of a piece reduces it."""
        self._sizes[piece][peer] = size
        self._missing[piece] -= 1
        if not self._missing[piece]:
            self._outcomes[piece] = self._reduction.reduce_piece(piece, self._sizes[piece])

    def outcome(self, piece: int) -> Generator[int, None, memoryview]:
        """Wait until a piece has been reduced."""
        while piece not in self._outcomes:
            if self._failed:
                raise ExchangeError("the operation was broken off")
            yield ANYTHING
        return self._outcomes[piece]

    def fail(self) -> None:
        self._failed = True
