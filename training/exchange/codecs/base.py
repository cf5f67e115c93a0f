"""The interface of codecs, and the codecs that only change the number format."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from training.lazy import torch

if sys.byteorder != "little":
    raise ImportError("the wire format is little-endian and this machine is not; it cannot take part in a run")

CHUNK_ELEMENTS = 262_144
"""A vector travels in chunks of at most this many elements: 1 MiB in fp32. A multiple of every codec's block except
top-k's, which it equals."""


class Codec(ABC):
    """Turns a flat fp32 vector into bytes and back.

    Encoded bytes are little-endian and mean the same on every machine: :meth:`decode` uses only operations that IEEE
    754 rounds correctly and never makes a subnormal number out of a scale, so all members decode the same bits.
    """

    name: str
    """Name in settings and on the wire."""
    block: int
    """Elements that must stay together when a vector is split."""
    fewest_rounds: int = 0
    """Rounds below which its loss is too high where weights are merged."""
    wants_feedback: bool = False
    """Whether what it drops has to be added to the next exchange."""
    sources: ClassVar[Mapping[str, str]] = {}
    """What is known about its effect on the loss, one line for each key."""
    nanoseconds: tuple[float, float]
    """Time of one core to encode and to decode an element (benchmarks/exchange_work.py)."""
    exact: bool = False
    """Whether the fp32 values travel unchanged."""
    works_on_devices: bool = False
    """Whether :meth:`encode_on_device` and :meth:`decode_on_device` are possible."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return flat fp32 ``values`` (any device) as flat uint8 on the CPU; cast on the device, then copied. Both may
        share memory.

        Raises:
            ValueError: ``values`` hold NaN or infinity and the codec cannot carry them.
        """

    def encode_on_device(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return flat fp32 ``values`` of another device encoded as flat uint8 on it, without waiting for it; ``None``:
        that is not possible.

        Encoding the decoded values again gives the bytes of :meth:`encode`. Values that cannot be carried decode to
        non-finite ones, or are refused.
        """
        return None

    def decode_on_device(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        """Return what :meth:`decode` returns, bit for bit, on the device of ``data`` and without waiting for it.

        Args:
            data: as :meth:`encode_on_device` returned it; of values that cannot be carried the result is arbitrary.
        """
        raise NotImplementedError(f"{self.name} decodes on the host only")

    def planes(self, elements: int) -> tuple[int, ...]:
        """Return the bytes of the planes that the encoded form of ``elements`` values consists of, one behind another.

        A piece from one multiple of the block to another has the same bytes alone as in the planes of the vector.
        Empty: the encoded form cannot be cut.
        """
        return ()

    def cut(self, data: torch.Tensor, elements: int) -> list[torch.Tensor]:
        """Return the planes of encoded ``data``, as views.

        Raises:
            ValueError: :meth:`decode` would not accept them.
        """
        check_length(self, data, self.max_encoded_bytes(elements))
        return list(torch.split(data, list(self.planes(elements))))

    def carried(self, planes: Sequence[torch.Tensor]) -> bool:
        """Return whether values that :meth:`encode_on_device` has encoded, as planes on the host, are all finite.

        Raises:
            NotImplementedError: this codec has no planes; nobody asks one that has none.
        """
        raise NotImplementedError(f"{self.name} cannot be cut")

    def carries(self, values: torch.Tensor) -> bool:
        """Return whether all of flat fp32 ``values`` arrive as finite numbers: none is NaN, infinity, or beyond the
        range."""
        return all_finite(values)

    def encode_into(self, values: torch.Tensor, buffer: torch.Tensor) -> int:
        """Encode to the beginning of ``buffer``, flat uint8 on the CPU of at least :meth:`max_encoded_bytes` bytes;
        return the encoded size."""
        data = self.encode(values)
        buffer[: data.numel()] = data
        return data.numel()

    def decode_into(self, data: torch.Tensor, values: torch.Tensor) -> None:
        """Like :meth:`decode`, into flat fp32 ``values`` on the CPU."""
        values.copy_(self.decode(data, values.numel()))

    @abstractmethod
    def decode(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        """Return flat uint8 CPU ``data`` as ``elements`` fp32 values on the CPU. May share memory with ``data``.

        Raises:
            ValueError: wrong length, or invalid contents.
        """

    @abstractmethod
    def max_encoded_bytes(self, elements: int) -> int:
        """Return the encoded size of ``elements`` values in bytes; an upper bound for sparse replies, else exact."""

    @property
    def reply(self) -> Codec:
        """The codec of the mean that is sent back to the members."""
        return self

    def expected_bytes(self, elements: int) -> float:
        """Return the encoded size of ``elements`` values that a plan assumes."""
        return float(self.max_encoded_bytes(elements))

    def expected_reply_bytes(self, elements: int, members: int) -> float:
        """Return the encoded size of a mean of so many members' vectors that a plan assumes."""
        return self.expected_bytes(elements)


class CastCodec(Codec):
    """IEEE numbers of 16 or 32 bits, rounded to nearest even. NaN and infinity pass through; a value beyond the
    range of fp16 (65,504) becomes infinity."""

    block = 1
    works_on_devices = True

    def __init__(self, name: str, dtype: str, width: int, nanoseconds: tuple[float, float]) -> None:
        self.name = name
        self.nanoseconds = nanoseconds
        self._dtype = dtype
        self._width = width
        self.exact = dtype == "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that travels."""
        dtype: torch.dtype = getattr(torch, self._dtype)
        return dtype

    @cached_property
    def _limit(self) -> float:
        """The smallest magnitude that becomes infinite: half of the last bit above the largest number."""
        info = torch.finfo(self.dtype)
        return info.max * (2.0 - info.eps / 2.0) / (2.0 - info.eps)

    def carries(self, values: torch.Tensor) -> bool:
        return all_finite(values) if self.exact else _within(values, self._limit)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().to(self.dtype).to("cpu").contiguous().view(torch.uint8)

    def encode_on_device(self, values: torch.Tensor) -> torch.Tensor | None:
        return values.detach().to(self.dtype).view(torch.uint8)

    def decode_on_device(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        return data.view(self.dtype).to(torch.float32)

    def planes(self, elements: int) -> tuple[int, ...]:
        return (elements * self._width,)

    def carried(self, planes: Sequence[torch.Tensor]) -> bool:
        return _within(planes[0].view(self.dtype), math.inf)

    def encode_into(self, values: torch.Tensor, buffer: torch.Tensor) -> int:
        size = self.max_encoded_bytes(values.numel())
        buffer[:size].view(self.dtype).copy_(values.detach())
        return size

    def decode_into(self, data: torch.Tensor, values: torch.Tensor) -> None:
        check_length(self, data, self.max_encoded_bytes(values.numel()))
        values.copy_(typed_view(data, self.dtype))

    def decode(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        check_length(self, data, self.max_encoded_bytes(elements))
        return typed_view(data, self.dtype).to(torch.float32)

    def max_encoded_bytes(self, elements: int) -> int:
        return elements * self._width


def all_finite(values: torch.Tensor) -> bool:
    """Return whether no element is NaN or infinite: both show in the sum, and in the extremes, which do not overflow
    but cost five times as much; testing each costs fifty times as much."""
    if values.device.type == "cpu" and math.isfinite(values.detach().sum().item()):
        return True
    return _within(values, math.inf)


def _within(values: torch.Tensor, limit: float) -> bool:
    """Return whether all magnitudes are below a limit; NaN is not."""
    if values.numel() == 0:
        return True
    extremes = values.detach().aminmax()
    lowest, highest = map(float, extremes) if values.device.type == "cpu" else torch.stack(extremes).tolist()
    return -limit < lowest and highest < limit


def check_length(codec: Codec, data: torch.Tensor, expected: int) -> None:
    """Raise ``ValueError`` unless ``data`` holds ``expected`` bytes."""
    if data.numel() != expected:
        raise ValueError(f"{codec.name}: {data.numel()} bytes where {expected} belong")


def typed_view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 ``data`` read as ``dtype``; copies only where the memory is not aligned for it."""
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
