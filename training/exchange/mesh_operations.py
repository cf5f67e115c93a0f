"""What a member has started on the mesh: it can be done again on another one until it has its result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from training.exchange.base import MAX_GATHER_BYTES, ExchangeError, MeanResult
from training.exchange.codecs import Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.mesh import Mesh
from training.exchange.operations import Meter, Operation
from training.exchange.owners import Contribution, MeanReduction, Outcome, completed
from training.exchange.staging import to_host

R = TypeVar("R")
Ended = Callable[[Exception | None], None]


class MeshOperation(Operation[R]):
    """An operation with a number, the same on all members.

    Exactly one of two ends brings the result: :meth:`complete` after :meth:`begin` has ended well, or :meth:`adopt`.
    """

    def __init__(self, number: int, name: str, meter: Meter) -> None:
        super().__init__(name, meter)
        self.number = number
        self._value: R | None = None

    @abstractmethod
    def begin(self, mesh: Mesh, then: Ended) -> None:
        """Start it on a mesh; ``then`` hears of its end there."""

    @abstractmethod
    def complete(self) -> Outcome:
        """Take the result of the mesh; return it as it can be handed to others."""

    @abstractmethod
    def adopt(self, rank: int, outcome: Outcome) -> None:
        """Take a result that others have, as member ``rank``.

        Raises:
            ExchangeError: it is not one of such an operation.
        """

    def _result(self) -> R:
        assert self._value is not None
        return self._value


class MeshMean(MeshOperation[MeanResult]):
    """A weighted mean. The values are copied before this returns.

    Args:
        shares: how much of the vector each member owns, by rank; 1 where nothing is said.
    """

    def __init__(
        self,
        number: int,
        name: str,
        values: torch.Tensor,
        weight: float,
        codec: Codec,
        flags: bytes,
        stream: str,
        meter: Meter,
        residuals: MeanResiduals,
        shares: Mapping[int, float],
    ) -> None:
        own = to_host([values], torch.float32).wait()
        self._own = Contribution.of(name, own, weight, codec, flags, stream)
        self._device = values.device
        self._residuals = residuals
        self._shares = shares
        self._reduction: MeanReduction | None = None
        super().__init__(number, name, meter)

    def begin(self, mesh: Mesh, then: Ended) -> None:
        shares = {rank: self._shares.get(rank, 1.0) for rank in mesh.members}
        if not any(shares.values()):
            shares = dict.fromkeys(shares, 1.0)
        self._reduction = MeanReduction(mesh, self._own, self._residuals, shares)
        mesh.reduce(self._reduction, then)

    def complete(self) -> Outcome:
        assert self._reduction is not None
        self._value, outcome = self._reduction.complete(), self._reduction.outcome()
        self._reduction = None
        return outcome

    def adopt(self, rank: int, outcome: Outcome) -> None:
        fresh = replace(self._own, values=torch.empty_like(self._own.values))  # what cannot be read spoils nothing
        self._value = completed(fresh, rank, outcome)
        if self._reduction is not None and rank in outcome.members:
            self._reduction.settle()
        self._reduction = None

    def _result(self) -> MeanResult:
        result = super()._result()
        if self._device.type != "cpu":
            result = replace(result, mean=result.mean.to(self._device))
        return result


class MeshGather(MeshOperation[dict[int, bytes]]):
    """A small payload of every member."""

    def __init__(self, number: int, name: str, payload: bytes, meter: Meter) -> None:
        self._payload = payload
        self._rooms: dict[int, memoryview] = {}
        self._mesh: Mesh | None = None
        super().__init__(number, name, meter)

    def begin(self, mesh: Mesh, then: Ended) -> None:
        self._mesh = mesh
        rooms = {peer: memoryview(bytearray(MAX_GATHER_BYTES)) for peer in mesh.peers}
        self._rooms = {mesh.rank: memoryview(bytearray(self._payload))}

        def took(peer: int, size: int) -> None:
            self._rooms[peer] = memoryview(bytearray(rooms[peer][:size]))

        mesh.gather(memoryview(self._payload), rooms, took, then)

    def complete(self) -> Outcome:
        assert self._mesh is not None
        outcome = Outcome(tuple(self._mesh.members), tuple((r, r, self._rooms[r]) for r in sorted(self._rooms)))
        self.adopt(self._mesh.rank, outcome)
        return outcome

    def adopt(self, rank: int, outcome: Outcome) -> None:
        if any(one not in outcome.members or len(data) > MAX_GATHER_BYTES for one, _, data in outcome.parts):
            raise ExchangeError(f"the outcome of '{self.name}' is not one of a gather")
        self._value = {one: bytes(data) for one, _, data in outcome.parts}
        self._rooms, self._mesh = {}, None
