"""Which operations of a member have their result, and which results it keeps for members that miss them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from training.exchange.base import ExchangeError
from training.exchange.mesh_operations import MeshOperation
from training.exchange.owners import Outcome

_KEPT_BYTES = 64 << 20
"""Of results that are kept for others at least; one may be larger than that."""


class Ledger:
    """Operations by number, from 1 on without gaps. Not thread-safe: its member has a lock.

    Args:
        rank: of the member.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: OrderedDict[int, MeshOperation[Any]] = OrderedDict()
        self._results: OrderedDict[int, Outcome] = OrderedDict()
        self._held = 0
        """Bytes of the results."""
        self.members: tuple[int, ...] = (rank,)
        """Of the mesh that brought the last result."""
        self.started = 0
        """Operations that were started."""
        self.full = 0
        """So many operations from the first on have their result."""
        self.kept = 0
        """Results after this one are kept."""

    def begin_after(self, number: int) -> None:
        """Go on as a newcomer: with the operation after ``number``."""
        self.started = self.full = self.kept = number

    def start(self, operation: MeshOperation[Any]) -> bool:
        """Enter an operation; return whether it has to be carried out, or the others have had it long ago."""
        self._pending[operation.number] = operation
        self.started = operation.number
        if operation.number > self.full:
            return True
        self._finish(operation, self._results[operation.number])
        return False

    def pending(self, after: int) -> list[MeshOperation[Any]]:
        """Return the operations without a result after one number, in their order."""
        return [operation for number, operation in self._pending.items() if number > after]

    def waits_for(self, number: int) -> MeshOperation[Any] | None:
        """Return an operation that has no result yet."""
        return self._pending.get(number)

    def settle(self, number: int, outcome: Outcome) -> None:
        """An operation has the result of the mesh."""
        operation = self._pending.pop(number)
        self._keep(number, outcome)
        self.members = outcome.members
        while self.full + 1 in self._results and self.full + 1 not in self._pending:
            self.full += 1
        operation.finish()

    def adopt(self, number: int, outcome: Outcome) -> None:
        """Take the next result, which others had; the operation may not have been started yet.

        Raises:
            ExchangeError: it is none of that operation.
        """
        if number in self._pending:
            self._finish(self._pending[number], outcome)
        self._keep(number, outcome)
        self.full = number

    def results(self, after: int, last: int) -> list[Outcome]:
        """Return what another member misses.

        Raises:
            ExchangeError: it is not kept any more.
        """
        if after < self.kept:
            raise ExchangeError(f"the result of exchange {after + 1} is not kept any more")
        return [self._results[number] for number in range(after + 1, last + 1)]

    def forget(self, settled: int) -> None:
        """Drop results that everybody has, and the oldest of those that take more room than they may."""
        while self._results:
            number, oldest = next(iter(self._results.items()))
            newest = next(reversed(self._results.values()))
            needed_here = number > self.full or number > self.started or number in self._pending
            if needed_here or (number > settled and self._held <= max(_KEPT_BYTES, newest.size)):
                return
            self._held -= oldest.size
            del self._results[number]
            self.kept = number

    def _keep(self, number: int, outcome: Outcome) -> None:
        self._results[number] = outcome
        self._held += outcome.size

    def drop_all(self) -> list[MeshOperation[Any]]:
        """Return and forget the operations without a result: the group is lost."""
        pending = list(self._pending.values())
        self._pending.clear()
        return pending

    def _finish(self, operation: MeshOperation[Any], outcome: Outcome) -> None:
        operation.adopt(self._rank, outcome)
        del self._pending[operation.number]
        self.members = outcome.members
        operation.finish()
