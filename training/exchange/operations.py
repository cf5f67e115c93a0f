"""Operations that a member of the hub has started, and the account of what they cost."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from training.exchange import wire
from training.exchange.base import ExchangeError, ExchangeTimeout, MeanResult, Traffic
from training.exchange.codecs import CastCodec, Codec, chunk_bounds
from training.exchange.wire import BytesChunk, MeanChunk, WireError

R = TypeVar("R")


class Meter:
    """Keeps one :class:`Traffic`; safe to use from several threads."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    def sent(self, size: int) -> None:
        with self._lock:
            self.traffic.bytes_sent += size

    def received(self, size: int) -> None:
        with self._lock:
            self.traffic.bytes_received += size

    def waited(self, seconds: float) -> None:
        with self._lock:
            self.traffic.wait_seconds += seconds
            self._settle()

    def begin(self) -> None:
        """An operation starts."""
        with self._lock:
            self._settle()
            self._under_way += 1

    def end(self) -> None:
        """An operation has its result, or failed."""
        with self._lock:
            self._settle()
            self._under_way -= 1

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._under_way:
            self.traffic.transfer_seconds += now - self._since
        self._since = now


class Operation(ABC, Generic[R]):
    """A started operation: the common part of waiting, failing and finishing."""

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self._meter = meter
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._error: str = ""
        meter.begin()

    def wait(self, timeout: float | None = None) -> R:
        """Block until the result is there; see :class:`training.exchange.base.Pending`."""
        if not self._settled.is_set():
            start = time.perf_counter()
            there = self._settled.wait(timeout)
            self._meter.waited(time.perf_counter() - start)
            if not there:
                raise ExchangeTimeout(f"exchange {self.name} was not done within {timeout:g} s")
        if self._error:
            raise ExchangeError(self._error)
        return self._result()

    def done(self) -> bool:
        return self._settled.is_set()

    def finish(self, error: str = "") -> None:
        """Let :meth:`wait` return the result, or raise ``error``; the first end counts."""
        with self._lock:
            if self._settled.is_set():
                return
            self._error = error
            self._settled.set()
        self._meter.end()

    @abstractmethod
    def frames(self) -> Iterator[bytes]:
        """Yield what is to be sent. May raise ``ValueError``."""

    @abstractmethod
    def _result(self) -> R: ...


class MeanOperation(Operation[MeanResult]):
    """A weighted mean under way.

    Where encoding costs little more than a copy, all frames are made at once: with that the values are copied. So are
    those of other devices, whose streams belong to the calling thread. Else the values are copied, and encoded chunk
    by chunk while the network is busy with the one before.
    """

    def __init__(self, name: str, values: torch.Tensor, weight: float, codec: Codec, rank: int, meter: Meter) -> None:
        super().__init__(name, meter)
        self._codec = codec
        self._weight = weight
        self._rank = rank
        self._device = values.device
        self._elements = values.numel()
        self._chunks = len(list(chunk_bounds(self._elements)))
        self._open = set(range(self._chunks))
        self._included = True
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
            frame = MeanChunk(self.name, self._codec, self._elements, chunk, self._weight, payload)
            yield chunk, wire.pack_mean(frame)

    def receive(self, frame: MeanChunk) -> bool:
        """Take one chunk of the mean; return whether that was the last.

        Raises:
            WireError: it does not belong to this operation, or has no meaning.
        """
        fits = frame.codec.name == self._codec.reply.name and frame.elements == self._elements
        if not fits or frame.chunk not in self._open:
            raise WireError(f"{self.name}: a chunk that does not belong here")
        start, stop = frame.bounds
        try:
            self._mean[start:stop] = frame.values()
        except ValueError as error:
            raise WireError(f"{self.name}: {error}") from None
        self._included &= self._rank in frame.contributors
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
        return MeanResult(mean, self._last.weight, self._last.members, self._included)


class GatherOperation(Operation[dict[int, bytes]]):
    """Collecting a payload of every member."""

    def __init__(self, name: str, payload: bytes, meter: Meter) -> None:
        super().__init__(name, meter)
        self._payload = payload
        self._pieces: dict[int, list[memoryview]] = {}
        self._whole: dict[int, bytes] = {}
        self.members: tuple[int, ...] = ()

    def frames(self) -> Iterator[bytes]:
        return wire.pack_payload(BytesChunk(self.name, 0, 0, wire.EMPTY), self._payload)

    def receive(self, frame: BytesChunk) -> bool:
        """Take one piece; return whether that was the last of all. Raises :class:`WireError`."""
        pieces = self._pieces.setdefault(frame.rank, [])
        if frame.rank in self._whole or frame.chunk != len(pieces) or frame.rank not in frame.contributors:
            raise WireError(f"{self.name}: a piece that does not belong here")
        pieces.append(frame.payload)
        self.members = frame.members
        if len(pieces) == frame.chunks:
            self._whole[frame.rank] = b"".join(pieces)
        return len(self._whole) == len(frame.contributors)

    def _result(self) -> dict[int, bytes]:
        return dict(sorted(self._whole.items()))
