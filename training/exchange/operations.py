"""Operations that a member has started, and the account of what they cost: for both engines, and those of the hub."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from training.exchange import wire
from training.exchange.base import STANDSTILL, ExchangeError, ExchangeTimeout, MeanResult, Traffic
from training.exchange.codecs import CastCodec, Codec, chunk_bounds, codec_by_name
from training.exchange.wire import BytesChunk, MeanChunk, ResidualChunk, WireError, tensor_view

R = TypeVar("R")
_SLICE = 30.0


class Meter:
    """Keeps one :class:`Traffic`; safe to use from several threads."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._moved = 0.0

    def sent(self, size: int) -> None:
        with self._lock:
            self.traffic.bytes_sent += size
            self._moved = time.perf_counter()

    def received(self, size: int) -> None:
        with self._lock:
            self.traffic.bytes_received += size
            self._moved = time.perf_counter()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self._under_way > 0

    def wait(self, settled: Callable[[float], bool]) -> bool:
        """Wait until ``settled(seconds)`` is true, or nothing has moved for :data:`STANDSTILL` seconds."""
        began = time.perf_counter()
        while not settled(_SLICE):
            if time.perf_counter() - max(began, self._moved) > STANDSTILL:
                return False
        return True

    def waited(self, seconds: float) -> None:
        with self._lock:
            self.traffic.wait_seconds += seconds
            self._settle()

    def begin(self) -> None:
        """An operation starts."""
        with self._lock:
            self._settle()
            self._under_way += 1
            self._moved = self._since

    def end(self) -> None:
        """An operation has its result, or failed."""
        with self._lock:
            self._settle()
            self._under_way -= 1
            self._moved = self._since

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._under_way:
            self.traffic.transfer_seconds += now - self._since
        self._since = now


class Operation(ABC, Generic[R]):
    """A started operation: waiting, failing and finishing."""

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self._meter = meter
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._error: ExchangeError | None = None
        meter.begin()

    def wait(self, timeout: float | None = None) -> R:
        """Block until the result is there; see :class:`training.exchange.base.Pending`."""
        if not self._settled.is_set():
            start = time.perf_counter()
            there = self._meter.wait(self._settled.wait) if timeout is None else self._settled.wait(timeout)
            self._meter.waited(time.perf_counter() - start)
            if not there:
                raise ExchangeTimeout(f"exchange {self.name} was not done within {timeout or STANDSTILL:g} s")
        if self._error is not None:
            raise type(self._error)(str(self._error))
        return self._result()

    def done(self) -> bool:
        return self._settled.is_set()

    def finish(self, error: ExchangeError | str = "") -> None:
        """Let :meth:`wait` return the result, or raise ``error``; the first end counts."""
        with self._lock:
            if self._settled.is_set():
                return
            self._error = ExchangeError(error) if error and isinstance(error, str) else error or None
            self._settled.set()
        self._meter.end()

    @abstractmethod
    def _result(self) -> R: ...


class HubOperation(Operation[R]):
    """An operation of the hub's members, as frames."""

    @property
    def members(self) -> tuple[int, ...]:
        """Live members when the operation closed; empty where nothing tells."""
        return ()

    @abstractmethod
    def frames(self) -> Iterator[bytes]:
        """Yield what is to be sent. May raise ``ValueError``."""


class MeanOperation(HubOperation[MeanResult]):
    """A weighted mean under way.

    Where encoding costs little more than a copy, all frames are made at once: with that the values are copied. So are
    those of other devices, whose streams belong to the calling thread. Else the values are copied, and encoded chunk
    by chunk while the network is busy with the one before.
    """

    def __init__(
        self,
        name: str,
        values: torch.Tensor,
        weight: float,
        codec: Codec,
        rank: int,
        meter: Meter,
        flags: bytes = b"",
        stream: str = "",
    ) -> None:
        super().__init__(name, meter)
        fit = codec.carries(values)
        if not fit:
            values, weight, flags = torch.zeros_like(values), 0.0, bytes(len(flags))
        self._head = MeanChunk(name, codec, values.numel(), 0, weight, wire.EMPTY, flags=flags, stream=stream)
        self._head = replace(self._head, refused=() if fit else (rank,))
        self._codec = codec
        self._rank = rank
        self._device = values.device
        self._elements = values.numel()
        self._chunks = len(list(chunk_bounds(self._elements)))
        self._open = set(range(self._chunks))
        self._left_out: list[tuple[int, int]] = []
        self._refused: set[int] = set()
        self._flags = b""
        self._last: MeanChunk | None = None
        at_once = isinstance(codec, CastCodec) or values.device.type != "cpu"
        self._packed = iter(list(self._pack(values))) if at_once else self._pack(values.detach().clone())
        self._mean = torch.empty(self._elements)

    def frames(self) -> Iterator[bytes]:
        packed, self._packed = self._packed, iter(())
        for chunk, frame in packed:
            if chunk in self._open:  # else it closed without this member
                yield frame

    def _pack(self, values: torch.Tensor) -> Iterator[tuple[int, bytes]]:
        for chunk, (start, stop) in enumerate(chunk_bounds(self._elements)):
            payload = self._codec.encode_view(values[start:stop]).numpy().data
            flags = b"" if chunk else self._head.flags
            yield chunk, wire.pack(replace(self._head, chunk=chunk, payload=payload, flags=flags))

    def receive(self, frame: MeanChunk) -> bool:
        """Take one chunk of the mean; return whether that was the last.

        Raises:
            WireError: it does not belong to this operation, or has no meaning.
        """
        fits = frame.codec.name == self._codec.reply.name and frame.elements == self._elements
        if not fits or frame.chunk not in self._open:
            raise WireError(f"{self.name}: an unexpected chunk")
        start, stop = frame.bounds
        try:
            self._mean[start:stop] = frame.values()
        except ValueError as error:
            raise WireError(f"{self.name}: {error}") from None
        self._refused.update(frame.refused)
        if self._rank not in frame.contributors or self._rank in frame.refused:
            self._left_out.append((start, stop))
        if frame.chunk == 0:
            self._flags = frame.flags
        if frame.chunk == frame.chunks - 1:
            self._last = frame
        self._open.discard(frame.chunk)
        return not self._open

    @property
    def members(self) -> tuple[int, ...]:
        """Live members as of the last chunk of the vector; empty before it came."""
        return self._last.members if self._last is not None else ()

    def _result(self) -> MeanResult:
        assert self._last is not None
        mean = self._mean if self._device.type == "cpu" else self._mean.to(self._device)
        refused = tuple(sorted(self._refused))
        return MeanResult(
            mean,
            self._last.weight,
            self._last.members,
            tuple(sorted(self._left_out)),
            refused,
            self._flags,
            fit=not self._head.refused,
        )


class GatherOperation(HubOperation[dict[int, bytes]]):
    """Collecting a payload of every member."""

    def __init__(self, name: str, payload: bytes, meter: Meter) -> None:
        super().__init__(name, meter)
        self._payload = payload
        self._pieces: dict[int, list[memoryview]] = {}
        self._whole: dict[int, bytes] = {}
        self._members: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def frames(self) -> Iterator[bytes]:
        return wire.pack_payload(BytesChunk(self.name, 0, 0, wire.EMPTY), self._payload)

    def receive(self, frame: BytesChunk) -> bool:
        """Take one piece; return whether that was the last of all. Raises :class:`WireError`."""
        pieces = self._pieces.setdefault(frame.rank, [])
        if frame.rank in self._whole or frame.chunk != len(pieces) or frame.rank not in frame.contributors:
            raise WireError(f"{self.name}: an unexpected piece")
        pieces.append(frame.payload)
        self._members = frame.members
        if len(pieces) == frame.chunks:
            self._whole[frame.rank] = b"".join(pieces)
        return len(self._whole) == len(frame.contributors)

    def _result(self) -> dict[int, bytes]:
        return dict(sorted(self._whole.items()))


class ResidualOperation(HubOperation[torch.Tensor]):
    """Asking the hub what encoding the means of a stream has lost."""

    def __init__(self, name: str, stream: str, elements: int, meter: Meter) -> None:
        super().__init__(name, meter)
        self._head = ResidualChunk(name, stream, elements, 0)
        self._open = dict(chunk_bounds(elements))
        self._whole = torch.zeros(elements)

    def frames(self) -> Iterator[bytes]:
        for chunk in range(len(self._open)):
            yield wire.pack(replace(self._head, chunk=chunk))

    def receive(self, frame: ResidualChunk) -> bool:
        """Take one chunk; return whether that was the last. Raises :class:`WireError`."""
        start, stop = frame.bounds
        if self._open.pop(start, None) != stop:
            raise WireError(f"{self.name}: an unexpected chunk")
        if len(frame.payload):
            self._whole[start:stop] = codec_by_name("fp32").decode(tensor_view(frame.payload), stop - start)
        return not self._open

    def _result(self) -> torch.Tensor:
        return self._whole


def residual_frames(stream: str, values: torch.Tensor) -> Iterator[bytes]:
    """Yield the frames that give flat fp32 ``values`` back to the hub as a stream's residual."""
    for chunk, (start, stop) in enumerate(chunk_bounds(values.numel())):
        payload = codec_by_name("fp32").encode(values[start:stop]).numpy().data
        yield wire.pack(ResidualChunk("restore", stream, values.numel(), chunk, payload))


def deliver(operation: HubOperation[Any], frame: MeanChunk | BytesChunk | ResidualChunk) -> bool:
    """Give a frame to its operation; return whether that was the last.

    Raises:
        WireError: it is of another kind of operation.
    """
    if isinstance(operation, MeanOperation) and isinstance(frame, MeanChunk):
        return operation.receive(frame)
    if isinstance(operation, GatherOperation) and isinstance(frame, BytesChunk):
        return operation.receive(frame)
    if isinstance(operation, ResidualOperation) and isinstance(frame, ResidualChunk):
        return operation.receive(frame)
    raise WireError(f"{frame.name}: a frame of another kind of operation")
