"""What a reduction by owners does with bytes, and the state of one under way."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from training.exchange.base import ExchangeError


class Reduction(ABC):
    """What one reduction does with bytes; the mesh moves them. Members are named by rank."""

    pieces: Mapping[int, int]
    """In how many pieces each owner's share travels."""

    @abstractmethod
    def contribution(self, owner: int, piece: int) -> memoryview:
        """Return this member's contribution to a piece of another's share."""

    @abstractmethod
    def room(self, rank: int, piece: int) -> memoryview:
        """Return where ``rank``'s contribution to a piece of the own share goes."""

    @abstractmethod
    def add_up(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        """All contributions to a piece of the own share are there, with so many bytes: return the outcome."""

    @abstractmethod
    def outcome_room(self, owner: int, piece: int) -> memoryview:
        """Return where the outcome of a piece of another's share goes."""

    def take(self, owner: int, piece: int, size: int) -> None:
        """The outcome of a piece of another's share is there, with ``size`` bytes."""

    def end(self) -> None:
        """Nothing more comes, in good or bad."""


class Rooms:
    """Memory for what comes in, used again: fresh memory costs more than the bytes that are put there. Thread-safe.

    An operation takes its rooms and gives them back; several are under way at once.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> bytearray:
        """Return at least ``size`` bytes with any contents."""
        with self._lock:
            fitting = [room for room in self._free if size <= len(room) <= 2 * size + 4096]
            if fitting:
                self._free.remove(best := min(fitting, key=len))
                return best
        return bytearray(size)

    def give_back(self, rooms: Sequence[bytearray], most: int) -> None:
        """Take rooms back, and keep ``most`` of those that were used last."""
        with self._lock:
            self._free = [*self._free, *rooms][-most:]


class Share:
    """The own share of a reduction under way: which pieces are added up already."""

    def __init__(self, reduction: Reduction, rank: int, members: int) -> None:
        self._reduction = reduction
        self._count = reduction.pieces[rank]
        self._missing = [members - 1] * self._count
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
