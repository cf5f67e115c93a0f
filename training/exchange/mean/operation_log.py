"""Which operations of a member have their result, and which results it keeps for members that miss them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Any

from training.exchange.coordinator_protocol import MAX_BEGUN, Begun, HeldResults
from training.exchange.mean.mesh_operations import MeshOperation
from training.exchange.mean.outcomes import OperationResult
from training.exchange.mean.reduction import KEPT_BYTES

_MAX_BEGUN, _MAX_REPORTED_RANKS = 4096, 2048
"""Operations whose description is kept here, and ranks that a report names."""


class OperationLog:
    """Operations by number, from 1 on without gaps. Not thread-safe: its member has a lock."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: OrderedDict[int, MeshOperation[Any]] = OrderedDict()
        self._results: OrderedDict[int, OperationResult] = OrderedDict()
        self._held = 0
        """Bytes of the kept results."""
        self._begun: OrderedDict[int, Begun] = OrderedDict()
        """By number, descriptions of operations whose result some member may lack."""
        self.members: tuple[int, ...] = (rank,)
        """Members of the mesh that brought the last result."""
        self.started = 0
        """Number of operations started."""
        self.full = 0
        """Number of operations, counted from the first, that have their result."""
        self.dropped = 0
        """Results up to this number have been dropped."""
        self.aside = 0
        """The last so many of the full ones belonged to a group of members."""

    def begin_after(self, number: int) -> None:
        """Continue as a newcomer, with the operation after ``number``."""
        self.started = self.full = self.dropped = number

    def start(self, operation: MeshOperation[Any]) -> bool:
        """Register an operation; return whether it has to be carried out: not if its result is already here."""
        self._pending[operation.number] = operation
        self.started = operation.number
        if len(self._begun) < _MAX_BEGUN:
            self._begun[operation.number] = operation.number, operation.group, operation.description
        if operation.number not in self._results:
            return True
        self._finish(operation, self._results[operation.number])
        return False

    def pending(self, after: int) -> list[MeshOperation[Any]]:
        """Return the operations after ``after`` that have no result, in order."""
        return [operation for number, operation in self._pending.items() if number > after]

    def waits_for(self, number: int) -> MeshOperation[Any] | None:
        """Return an operation if it has no result yet."""
        return self._pending.get(number)

    def settle(self, number: int, outcome: OperationResult) -> None:
        """Record the result of an operation."""
        operation = self._pending.pop(number)
        self._record(number, outcome)
        operation.finish()

    def adopt(self, number: int, outcome: OperationResult) -> None:
        """Take a result from another member; the operation may not have been started here yet.

        Raises:
            ExchangeError: the result does not belong to that operation.
        """
        if number in self._pending:
            self._finish(self._pending[number], outcome)
        self._record(number, outcome)

    def position(self) -> dict[str, Any]:
        """Return the progress that a member reports."""
        begun: list[Begun] = []
        for operation in islice(self._begun.values(), MAX_BEGUN):
            if begun and sum(len(ranks) for _, ranks, _ in begun) + len(operation[1]) > _MAX_REPORTED_RANKS:
                break
            begun.append(operation)
        counts = {"started": self.started, "full": self.full, "dropped": self.dropped, "aside": self.aside}
        return {**counts, "begun": tuple(begun)}

    def held(self, after: int) -> HeldResults:
        """Return which results after an operation are kept."""
        results = [(number, r.group, r.members) for number, r in self._results.items() if number > after]
        return HeldResults(full=self.full, dropped=self.dropped, results=tuple(results))

    def result(self, number: int) -> OperationResult:
        """Return a kept result."""
        return self._results[number]

    def forget(self, settled: int) -> None:
        """Drop results that all members have, and the oldest of those beyond the memory limit."""
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

    def _record(self, number: int, outcome: OperationResult) -> None:
        """Hold a new result, and update the progress."""
        self._results[number] = outcome
        self._held += outcome.size
        if not outcome.group:
            self.members = outcome.members
        while self.full + 1 in self._results and self.full + 1 not in self._pending:
            self.full += 1
            self.aside = self.aside + 1 if self._results[self.full].group else 0

    def drop_all(self) -> list[MeshOperation[Any]]:
        """Return and forget the operations without a result, because the group is lost."""
        pending = list(self._pending.values())
        self._pending.clear()
        return pending

    def _finish(self, operation: MeshOperation[Any], outcome: OperationResult) -> None:
        operation.adopt(self._rank, outcome)
        del self._pending[operation.number]
        operation.finish()
