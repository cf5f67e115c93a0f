"""Operations that a member of the hub has started, and the account of what they cost."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from training.exchange import wire
from training.exchange.base import ExchangeError, ExchangeTimeout, MeanResult, Traffic
from training.exchange.codecs import Codec, chunk_bounds
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

    CPU vectors are copied at once and encoded chunk by chunk as they are sent; from other devices the encoded chunks
    are fetched at once, because their streams belong to the calling thread.
    """

    def __init__(self, name: str, values: torch.Tensor, weight: float, codec: Codec, rank: int, meter: Meter) -> None:
        super().__init__(name, meter)
        self._codec = codec
        self._weight = weight
        self._rank = rank
        self._device = values.device
        self._elements = values.numel()
        self._encoded = _staged(values, codec)
        self._mean = torch.empty(self._elements)
        self._chunks = len(list(chunk_bounds(self._elements)))
        self._open = set(range(self._chunks))
        self._included = True
        self._last: MeanChunk | None = None

    def frames(self) -> Iterator[bytes]:
        for chunk in range(self._chunks):
            if chunk not in self._open:
                continue  # closed without us
            payload = self._encoded(chunk).numpy().data
            yield wire.pack_mean(MeanChunk(self.name, self._codec, self._elements, chunk, self._weight, payload))
        self._encoded = _nothing

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


def _staged(values: torch.Tensor, codec: Codec) -> Callable[[int], torch.Tensor]:
    bounds = list(chunk_bounds(values.numel()))
    if values.device.type != "cpu":
        return [codec.encode(values[start:stop]) for start, stop in bounds].__getitem__
    copy = values.detach().clone()
    return lambda chunk: codec.encode(copy[bounds[chunk][0] : bounds[chunk][1]])


def _nothing(chunk: int) -> torch.Tensor:
    raise AssertionError("sent already")
