"""Block formats: 32 elements share one power-of-two scale.

The scale is one byte ``E`` of the OCP Microscaling Formats Specification v1.0 (E8M0: the value ``2^(E-127)``). Encoded
vectors are ``[scale of every block][elements]``; the last block may be short. A scale is always a normal fp32 number
and so is every decoded value but zero, therefore machines that flush subnormals decode the same bits. Blocks whose
largest magnitude is below about 2^-119 (int8) or 2^-123 (mxfp4) lose precision to that rule.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from training.exchange.codecs.base import Codec, check_length
from training.exchange.codecs.registry import register
from training.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    torch, functional = lazy("torch"), lazy("torch.nn.functional")

BLOCK = 32
_NOT_FINITE = 255
_TOP_EXPONENT = 254


def _whole_blocks(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


class _BlockCodec(Codec):
    """Shared part: scales from the largest magnitude of every block."""

    block = BLOCK
    element_exponent: int
    """Exponent of the largest element: a block is scaled so that its largest magnitude has this exponent."""
    smallest_scale: int

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        elements = values.numel()
        blocks = _whole_blocks(values.detach())
        exponents = blocks.abs().amax(1).view(torch.int32) >> 23
        if elements and int(exponents.max()) == _NOT_FINITE:
            raise ValueError(f"{self.name}: cannot carry NaN or infinity")
        scales = (exponents - self.element_exponent).clamp_(min=self.smallest_scale)
        inverse = ((_TOP_EXPONENT - scales) << 23).view(torch.float32)
        packed = self._quantise(blocks * inverse.unsqueeze(1)).view(-1)[: self._packed_bytes(elements)]
        return torch.cat([scales.to(torch.uint8), packed]).to("cpu")

    def decode(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        check_length(self, data, self.max_encoded_bytes(elements))
        blocks = -(-elements // BLOCK)
        scales, packed = data[:blocks], data[blocks:]
        largest = _TOP_EXPONENT - self.element_exponent
        if blocks and not (self.smallest_scale <= int(scales.min()) and int(scales.max()) <= largest):
            raise ValueError(f"{self.name}: impossible scale")
        padded = _whole_blocks(self._expand(packed, elements))
        padded *= (scales.to(torch.int32) << 23).view(torch.float32).unsqueeze(1)
        return padded.view(-1)[:elements]

    def max_encoded_bytes(self, elements: int) -> int:
        return -(-elements // BLOCK) + self._packed_bytes(elements)

    @abstractmethod
    def _packed_bytes(self, elements: int) -> int: ...

    @abstractmethod
    def _quantise(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return whole blocks, divided by their scale, as uint8."""

    @abstractmethod
    def _expand(self, packed: torch.Tensor, elements: int) -> torch.Tensor:
        """Return at least ``elements`` fp32 values, not yet scaled, in memory of their own."""


class Int8Codec(_BlockCodec):
    """Signed integers -127..127, rounded to nearest even: 33 bytes for 32 elements.

    Error of an element: at most 1/127.5 of the block's largest magnitude.
    """

    name = "int8"
    nanoseconds = (2.2, 1.7)
    element_exponent = 6
    smallest_scale = 1

    def _packed_bytes(self, elements: int) -> int:
        return elements

    def _quantise(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)

    def _expand(self, packed: torch.Tensor, elements: int) -> torch.Tensor:
        if bool((packed == 0x80).any()):
            raise ValueError(f"{self.name}: impossible element -128")
        return packed.view(torch.int8).to(torch.float32)


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 values by code; bit 3 is the sign."""
_BOUNDARIES = tuple((low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES))


def _nearest_code(magnitude: float) -> int:
    """Return the code of the nearest E2M1 magnitude; a tie goes to the even code, beyond 6 saturates."""
    return sum(
        magnitude > boundary if lower % 2 == 0 else magnitude >= boundary for lower, boundary in enumerate(_BOUNDARIES)
    )


def _codes_by_key() -> list[int]:
    """E2M1 codes for all ``2 * trunc(8 v) + (8 v is not whole)``, as a byte; all boundaries are whole eighths."""
    codes = []
    for key in range(256):
        truncated = (key - 256 if key >= 128 else key) >> 1
        code = _nearest_code((abs(truncated) + 0.5 * (key & 1)) / 8)
        codes.append(code | 8 if truncated < 0 and code else code)
    return codes


class MxFp4Codec(_BlockCodec):
    """MXFP4 of the OCP Microscaling Formats Specification v1.0: E2M1 elements, 17 bytes for 32 elements.

    Scale and rounding follow its section 6.3 (shared exponent ``floor(log2(max)) - 2``, round to nearest even,
    saturate at 6). The element of even index is the low half of its byte; the spare half of an odd tail is 0. There
    is no negative zero. Error of an element: at most 1/4 of the block's largest magnitude.
    """

    name = "mxfp4"
    nanoseconds = (4.3, 1.0)
    sources: ClassVar[Mapping[str, str]] = {"mxfp4": "4-bit deltas: no loss (arXiv 2501.18512; own check)"}
    element_exponent = 2
    smallest_scale = 2

    @cached_property
    def _packed(self) -> torch.Tensor:
        codes = torch.tensor(_codes_by_key(), dtype=torch.uint8)
        return (codes.unsqueeze(0) | codes.unsqueeze(1) << 4).view(-1)

    @cached_property
    def _pairs(self) -> torch.Tensor:
        values = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=torch.float32)
        values[8] = 0.0
        packed = torch.arange(256)
        return torch.stack([values[packed & 15], values[packed >> 4]], 1).view(torch.float64).view(-1)

    def _packed_bytes(self, elements: int) -> int:
        return -(-elements // 2)

    def _quantise(self, scaled: torch.Tensor) -> torch.Tensor:
        eighths = scaled.mul_(8.0)
        key = eighths.to(torch.int8)
        inexact = (eighths != key.to(torch.float32)).view(torch.int8)
        key.add_(key).add_(inexact)
        # One key stands for all v in (n, n+1) above zero and (n-1, n) below; two keys give one byte.
        pairs = key.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF).view(-1)
        return self._packed.to(scaled.device).index_select(0, pairs)

    def _expand(self, packed: torch.Tensor, elements: int) -> torch.Tensor:
        return self._pairs.index_select(0, packed.to(torch.int32)).view(torch.float32)


_INT8, _MXFP4 = Int8Codec(), MxFp4Codec()
register("int8", lambda _: _INT8, "1.03 bytes an element; at most 1/127.5 of the largest of 32 neighbours is lost")
register("mxfp4", lambda _: _MXFP4, "0.53 bytes an element; at most 1/4 of the largest of 32 neighbours is lost")
