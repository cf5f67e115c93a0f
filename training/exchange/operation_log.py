"""Which operations of a member have their result, and which results it keeps for members that miss them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

from training.exchange.coordinator_protocol import MOST_BEGUN, Begun, HeldResults
from training.exchange.mesh_operations import MeshOperation
from training.exchange.outcomes import OperationResult
from training.exchange.reduction import KEPT_BYTES

_MOST_BEGUN, _MOST_TOLD = 4096, 2048
"""Operations of which it is known here what they are, and ranks that a report names."""


class OperationLog:
    """Operations by number, from 1 on without gaps. Not thread-safe: its member has a lock."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: OrderedDict[int, MeshOperation[Any]] = OrderedDict()
        self._results: OrderedDict[int, OperationResult] = OrderedDict()
        self._held = 0
        """Bytes of the results."""
        self._begun: OrderedDict[int, Begun] = OrderedDict()
        """What the operations are that somebody may have no result of, by number."""
        self.members: tuple[int, ...] = (rank,)
        """Of the mesh that brought the last result."""
        self.started = 0
        """Operations that were started."""
        self.full = 0
        """So many operations from the first on have their result."""
        self.dropped = 0
        """Results after this one are kept."""
        self.aside = 0
        """The last so many of the full ones were those of a group of members."""

    def begin_after(self, number: int) -> None:
        """Go on as a newcomer: with the operation after ``number``."""
        self.started = self.full = self.dropped = number

    def start(self, operation: MeshOperation[Any]) -> bool:
        """Enter an operation; return whether it has to be carried out: not if the others already have its result."""
        self._pending[operation.number] = operation
        self.started = operation.number
        if len(self._begun) < _MOST_BEGUN:
            self._begun[operation.number] = operation.number, operation.group, operation.description
        if operation.number not in self._results:
            return True
        self._finish(operation, self._results[operation.number])
        return False

    def pending(self, after: int) -> list[MeshOperation[Any]]:
        """Return the operations without a result after one number, in their order."""
        return [operation for number, operation in self._pending.items() if number > after]

    def waits_for(self, number: int) -> MeshOperation[Any] | None:
        """Return an operation that has no result yet."""
        return self._pending.get(number)

    def settle(self, number: int, outcome: OperationResult) -> None:
        """Note that an operation has its result."""
        operation = self._pending.pop(number)
        self._keep(number, outcome)
        self._note(outcome)
        operation.finish()

    def adopt(self, number: int, outcome: OperationResult) -> None:
        """Take a result from another member; the operation may not have been started here yet.

        Raises:
            ExchangeError: it is none of that operation.
        """
        if number in self._pending:
            self._finish(self._pending[number], outcome)
        self._keep(number, outcome)
        self._note(outcome)

    def position(self) -> dict[str, Any]:
        """Return what a member reports of its operations."""
        begun: list[Begun] = []
        for operation in islice(self._begun.values(), MOST_BEGUN):
            if begun and sum(len(ranks) for _, ranks, _ in begun) + len(operation[1]) > _MOST_TOLD:
                break
            begun.append(operation)
        counts = {"started": self.started, "full": self.full, "kept": self.dropped, "aside": self.aside}
        return {**counts, "begun": tuple(begun)}

    def held(self, after: int) -> HeldResults:
        """Return which results are held after an operation."""
        results = [(n, one.group, one.members) for n, one in self._results.items() if n > after]
        return HeldResults(full=self.full, kept=self.dropped, results=tuple(results))

    def result(self, number: int) -> OperationResult:
        """Return a result that is held."""
        return self._results[number]

    def forget(self, settled: int) -> None:
        """Drop results that everybody has, and the oldest of those that take more room than they may."""
        while self._begun and next(iter(self._begun)) <= settled:
            self._begun.popitem(last=False)
        while self._results:
            number, oldest = next(iter(self._results.items()))
            newest = next(reversed(self._results.values()))
            needed_here = number > self.full or number > self.started or number in self._pending
            if needed_here or (number > settled and self._held <= max(KEPT_BYTES, newest.size)):
                return
            self._held -= oldest.size
            del self._results[number]
            self.dropped = number

    def _note(self, outcome: OperationResult) -> None:
        """A result has come: see how far there are results without gaps."""
        if not outcome.group:
            self.members = outcome.members
        while self.full + 1 in self._results and self.full + 1 not in self._pending:
            self.full += 1
            self.aside = self.aside + 1 if self._results[self.full].group else 0

    def _keep(self, number: int, outcome: OperationResult) -> None:
        self._results[number] = outcome
        self._held += outcome.size

    def drop_all(self) -> list[MeshOperation[Any]]:
        """Return and forget the operations without a result: the group is lost."""
        pending = list(self._pending.values())
        self._pending.clear()
        return pending

    def _finish(self, operation: MeshOperation[Any], outcome: OperationResult) -> None:
        operation.adopt(self._rank, outcome)
        del self._pending[operation.number]
        operation.finish()
