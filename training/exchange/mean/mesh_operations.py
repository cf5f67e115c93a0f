"""Operations of a member on the mesh; each can be repeated on another mesh until it has its result."""

from __future__ import annotations

import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from profiles.quantities import span_text
from training.exchange.base import (
    MAX_GATHER_BYTES,
    STANDSTILL,
    Contribution,
    ExchangeError,
    ExchangeTimeout,
    Group,
    MeanResult,
    Traffic,
)
from training.exchange.codecs import EncodedVector
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.outcomes import (
    OperationResult,
    apply_outcome,
    copy_contribution,
    describe_operation,
    description_crc,
    gather_buffer,
)
from training.exchange.mean.owners import OneRoundMean, OwnedMean, shards_of, takes_one_round
from training.exchange.mean.reduction import BufferPool
from training.exchange.mean.transfer import PendingTransfer
from training.exchange.residuals import MeanResiduals
from training.exchange.staging import decoded_there, to_device
from training.exchange.untimed import this_thread

R = TypeVar("R")
_SLICE = 30.0
"""Seconds between two checks for progress."""


class Meter:
    """Maintains one :class:`Traffic`. Thread-safe.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.traffic = Traffic()
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._last_progress = 0.0
        self._counted = 0, 0

    def begin_mesh(self) -> None:
        """Note that a new mesh counts its bytes from 0."""
        with self._lock:
            self._counted = 0, 0

    def update(self, sent: int, received: int) -> None:
        """Update the counters with the total bytes of the current mesh."""
        with self._lock:
            before, self._counted = self._counted, (sent, received)
            if before != self._counted:
                self.traffic.bytes_sent += sent - before[0]
                self.traffic.bytes_received += received - before[1]
                self._last_progress = self._clock()

    def wait(self, settled: Callable[[float], bool]) -> bool:
        """Wait until ``settled(seconds)`` is true, or nothing has moved for :data:`STANDSTILL` seconds."""
        began = self._clock()
        while not settled(min(_SLICE, STANDSTILL / 4)):
            if self._clock() - max(began, self._last_progress) > STANDSTILL:
                return False
        return True

    def add_wait(self, seconds: float) -> None:
        with self._lock:
            self.traffic.wait_seconds += seconds
            self._settle()

    def count(self, operations: int) -> None:
        """Count one more operation in flight, or, with -1, one that has its result or failed."""
        with self._lock:
            self._settle()
            self._under_way += operations
            self._last_progress = self._since

    def _settle(self) -> None:
        now = self._clock()
        if self._under_way:
            self.traffic.transfer_seconds += now - self._since
        self._since = now


_ONE_ROUND = 1
"""Mark of a mean that is computed in one round."""
_SEAL = struct.Struct("<I")
"""Precedes a member's payload of a gather: which gather it belongs to."""
Ended = Callable[[Exception | None], None]


class MeshOperation(ABC, Generic[R]):
    """An operation with a number, the same on all members, and a ``description``.

    It gets its result in exactly one of two ways: :meth:`complete` after a successful :meth:`begin`, or :meth:`adopt`.
    """

    def __init__(self, number: int, name: str, description: str, meter: Meter, group: Group = ()) -> None:
        self.number, self.name, self.description, self.group = number, name, description, group
        self._meter = meter
        self._value: R | None = None
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._error: ExchangeError | None = None
        self.transfer: PendingTransfer | None = None
        """Its transfer on the current mesh, which a thread that waits for it may drive."""
        self._is_timed = this_thread.is_timed
        if self._is_timed:
            meter.count(1)

    def wait(self, timeout: float | None = None) -> R:
        """Block until the result is there; see :class:`training.exchange.base.Pending`."""
        if not self._settled.is_set():
            start = time.perf_counter()
            is_settled = self._meter.wait(self._settles) if timeout is None else self._settles(timeout)
            if self._is_timed:
                self._meter.add_wait(time.perf_counter() - start)
            if not is_settled:
                raise ExchangeTimeout(f"exchange {self.name} was not done within {span_text(timeout or STANDSTILL)}")
        if self._error is not None:
            raise type(self._error)(str(self._error))
        return self._result()

    def _settles(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the result."""
        transfer = self.transfer
        return self._settled.wait(seconds) if transfer is None else transfer.drive_for(self._settled, seconds)

    def done(self) -> bool:
        return self._settled.is_set()

    def finish(self, error: ExchangeError | None = None) -> None:
        """Let :meth:`wait` return the result, or raise ``error``; only the first call counts."""
        with self._lock:
            if self._settled.is_set():
                return
            self._error = error
            self._settled.set()
        if self._is_timed:
            self._meter.count(-1)

    def _result(self) -> R:
        assert self._value is not None
        return self._value

    def members(self, mesh: Mesh) -> list[int]:
        """Return the ranks that take part on a mesh."""
        return [rank for rank in mesh.members if not self.group or rank in self.group]

    @abstractmethod
    def begin(self, mesh: Mesh, on_done: Ended) -> PendingTransfer:
        """Prepare it on a mesh, where it begins when the transfer is submitted; ``on_done`` is called at its end."""

    @abstractmethod
    def complete(self) -> OperationResult:
        """Take the result from the mesh; return it in the form in which it can be handed to others."""

    @abstractmethod
    def adopt(self, rank: int, outcome: OperationResult) -> None:
        """Take a result that another member has, as member ``rank``.

        Raises:
            ExchangeError: it does not belong to such an operation.
        """


class MeshMean(MeshOperation[MeanResult]):
    """A weighted mean. The values are copied before the constructor returns.

    Args:
        shards: how much of the vector each member owns, by rank; default 1.
        borrows: the values are not copied, for the caller waits for the result.
    """

    def __init__(
        self,
        number: int,
        contribution: Contribution,
        meter: Meter,
        residuals: MeanResiduals,
        shards: Mapping[int, float],
        buffer_pool: BufferPool | None = None,
        borrows: bool = False,
    ) -> None:
        name, values = contribution.name, contribution.values
        if values.dim() != 1 or values.dtype != torch.float32:
            raise ValueError(f"{name}: a flat fp32 vector belongs here, not {values.dtype} of {list(values.shape)}")
        self._device = values.device if contribution.vector is None else contribution.vector.device
        self.contribution = copy_contribution(contribution, buffer_pool or BufferPool(), borrows)
        self._encoded: EncodedVector | None = None
        """The mean as it arrived, of a contribution that a device has encoded."""
        self._residuals = residuals
        self._shards = shards
        self._reduction: OwnedMean | OneRoundMean | None = None
        super().__init__(number, name, describe_operation("mean", name, contribution), meter, contribution.group)

    def wait(self, timeout: float | None = None) -> MeanResult:
        try:
            return super().wait(timeout)
        except BaseException:
            if self.contribution.is_borrowed and self.transfer is not None:
                # The caller may change the values from here on: no more of them goes to others, who repeat the mean.
                self.transfer.cut()
                self.contribution = replace(self.contribution, values=self.contribution.values.clone())
            raise

    def begin(self, mesh: Mesh, on_done: Ended) -> PendingTransfer:
        members = self.members(mesh)
        if takes_one_round(self.contribution, len(members)):
            self._reduction = shared = OneRoundMean(mesh, self.contribution, self._residuals, members)
            return mesh.gather(shared.message, shared.buffers, shared.note_received, on_done, self.number, _ONE_ROUND)
        shards = shards_of(self._shards, members)
        self._reduction = reduction = OwnedMean(mesh, self.contribution, self._residuals, shards)
        return mesh.prepare(reduction, on_done, number=self.number)

    def complete(self) -> OperationResult:
        assert self._reduction is not None
        outcome, into = replace(self._reduction.outcome(), group=self.group), self._empty_mean()
        self._end(self._reduction.complete(outcome, into), into)
        return outcome

    def _empty_mean(self) -> EncodedVector | None:
        """Return what takes the mean as it is encoded; ``None``: it is decoded as it arrives."""
        vector = self.contribution.vector
        return None if vector is None else vector.empty_like()

    def adopt(self, rank: int, outcome: OperationResult) -> None:
        fresh = replace(
            self.contribution, values=torch.empty_like(self.contribution.values)
        )  # an invalid outcome must not overwrite the contribution
        value = apply_outcome(fresh, rank, outcome, into=(into := self._empty_mean()))
        if self._reduction is not None and rank in outcome.members:
            self._reduction.encoder.settle()
        self._end(value, into)

    def _end(self, value: MeanResult, encoded: EncodedVector | None) -> None:
        """Set the result, and free what was kept to repeat the operation, however long this object is held."""
        self._value, self._encoded, self._reduction = value, encoded, None
        self.contribution = replace(self.contribution, values=torch.empty(0), vector=None)

    def _result(self) -> MeanResult:
        result = super()._result()
        if self._encoded is not None:
            result = replace(result, mean=decoded_there(self._encoded))
        elif self._device.type != "cpu":
            result = replace(result, mean=to_device(result.mean, self._device))
        return result


class MeshGather(MeshOperation[dict[int, bytes]]):
    """A gather of a small payload of every member."""

    def __init__(self, number: int, name: str, payload: bytes, meter: Meter, group: Group = ()) -> None:
        if len(payload) > MAX_GATHER_BYTES:
            raise ValueError(f"{name}: a payload of {len(payload)} bytes is above 4 MiB")
        self._payload = payload
        self._payloads: dict[int, memoryview] = {}
        self._mesh: Mesh | None = None
        super().__init__(number, name, describe_operation("gather", name), meter, group)

    def begin(self, mesh: Mesh, on_done: Ended) -> PendingTransfer:
        self._mesh = mesh
        size = _SEAL.size + MAX_GATHER_BYTES
        buffers = {peer: gather_buffer(size) for peer in self.members(mesh) if peer != mesh.rank}
        self._payloads = {mesh.rank: memoryview(bytearray(self._payload))}
        seal = _SEAL.pack(description_crc(self.description))

        def on_received(sender: int, size: int) -> None:
            if buffers[sender][: min(size, _SEAL.size)] != seal:
                raise PeerLost(
                    sender, mesh.names[sender], f"it is at another exchange than {self.description} of this machine"
                )
            self._payloads[sender] = memoryview(bytearray(buffers[sender][_SEAL.size : size]))

        return mesh.gather(memoryview(seal + self._payload), buffers, on_received, on_done, self.number)

    def complete(self) -> OperationResult:
        assert self._mesh is not None
        ranks = sorted(self._payloads)
        outcome = OperationResult(tuple(ranks), tuple((rank, rank, self._payloads[rank]) for rank in ranks), self.group)
        self.adopt(self._mesh.rank, outcome)
        return outcome

    def adopt(self, rank: int, outcome: OperationResult) -> None:
        if any(sender not in outcome.members or len(data) > MAX_GATHER_BYTES for sender, _, data in outcome.pieces):
            raise ExchangeError(f"the outcome of '{self.name}' is not one of a gather")
        self._value = {sender: bytes(data) for sender, _, data in outcome.pieces}
        self._payloads, self._mesh = {}, None
