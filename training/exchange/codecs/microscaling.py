"""Block formats: 32 elements share one power-of-two scale.

The scale is one byte ``E`` of the OCP Microscaling Formats Specification v1.0 (E8M0: the value ``2^(E-127)``). Encoded
vectors are ``[scale of every block][elements]``; the last block may be short. A scale is always a normal fp32 number
and so is every decoded value but zero, therefore machines that flush subnormals decode the same bits. Blocks whose
largest magnitude is below about 2^-119 (int8) or 2^-123 (mxfp4) lose precision to that rule.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

from training.exchange.codecs.base import Codec
from training.exchange.codecs.registry import register
from training.lazy import nn, torch

BLOCK = 32
_EXPONENT = 0x7F80_0000
"""Exponent bits of an fp32 number: alone they are the power of two below it."""
_TWO_OVER = 255 << 23
"""Bits of a power of two, taken from these, leave those of two over that power: normal for all but the smallest."""
_TOP_EXPONENT = 254


def _whole_blocks(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % BLOCK
    return (nn.functional.pad(values, (0, missing)) if missing else values).reshape(-1, BLOCK)


@cache
def _row(value: float, device: torch.device) -> torch.Tensor:
    """A row with the value for every element of a block: with a scalar beside a broadcast scale the processor would not
    vectorise."""
    return torch.full((BLOCK,), value).to(device)  # complete when this returns, whichever stream uses it


class _BlockCodec(Codec):
    """Base of the block codecs: scales from the largest magnitude of every block."""

    block = BLOCK
    works_on_devices = True
    element_exponent: int
    """Exponent of the largest element: a block is scaled so that its largest magnitude has this exponent."""
    smallest_scale: int

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        elements = values.numel()
        blocks, powers, largest = self._scaled(values)
        greatest = int(largest.max()) if elements else 0
        if greatest == _EXPONENT:
            raise ValueError(f"{self.name}: cannot carry NaN or infinity")
        return self._joined(elements, blocks, powers, largest, greatest).to("cpu")

    def encode_on_device(self, values: torch.Tensor) -> torch.Tensor | None:
        """A block that is not finite gets a scale that :meth:`decode` refuses."""
        return self._joined(values.numel(), *self._scaled(values), _EXPONENT)

    def _scaled(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return whole blocks, the bits of the power of two below every magnitude, and the greatest of each block."""
        blocks = _whole_blocks(values.detach())
        powers = blocks.view(torch.int32) & _EXPONENT
        return blocks, powers, powers.amax(1, keepdim=True)

    def _joined(
        self, elements: int, blocks: torch.Tensor, powers: torch.Tensor, largest: torch.Tensor, greatest: int
    ) -> torch.Tensor:
        largest.clamp_(min=self.smallest_scale + self.element_exponent << 23)
        inverse = (_TWO_OVER - largest).view(torch.float32)
        packed = self._quantise(blocks, powers.view(torch.float32), inverse, greatest)
        scales = (largest.view(-1) >> 23).to(torch.uint8).sub_(self.element_exponent)
        return torch.cat([scales, packed.view(-1)[: self._packed_bytes(elements)]])

    def decode(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        scales, packed = self.cut(data, elements)
        return self._scaled_back(scales, packed, elements)

    def planes(self, elements: int) -> tuple[int, ...]:
        return -(-elements // BLOCK), self._packed_bytes(elements)

    def cut(self, data: torch.Tensor, elements: int) -> list[torch.Tensor]:
        planes = super().cut(data, elements)
        if not self.carried(planes):
            raise ValueError(f"{self.name}: impossible scale")
        self._check(planes[1])
        return planes

    def carried(self, planes: Sequence[torch.Tensor]) -> bool:
        scales, largest = planes[0], _TOP_EXPONENT - self.element_exponent
        return not scales.numel() or (self.smallest_scale <= int(scales.min()) and int(scales.max()) <= largest)

    def decode_on_device(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        blocks = -(-elements // BLOCK)
        return self._scaled_back(data[:blocks], data[blocks:], elements)

    def _scaled_back(self, scales: torch.Tensor, packed: torch.Tensor, elements: int) -> torch.Tensor:
        padded = _whole_blocks(self._expand(packed, elements))
        padded *= (scales.to(torch.int32) << 23).view(torch.float32).unsqueeze(1)
        return padded.view(-1)[:elements]

    def max_encoded_bytes(self, elements: int) -> int:
        return sum(self.planes(elements))

    @abstractmethod
    def _packed_bytes(self, elements: int) -> int: ...

    @abstractmethod
    def _quantise(
        self, blocks: torch.Tensor, powers: torch.Tensor, inverse: torch.Tensor, greatest: int
    ) -> torch.Tensor:
        """Return whole blocks as uint8.

        Args:
            powers: the power of two below every magnitude, 0 for subnormal ones; may be overwritten.
            inverse: what scales a block so that its largest magnitude is below 4, and unless it is tiny at least 2.
            greatest: bits of the largest of ``powers``, or more.
        """

    def _check(self, packed: torch.Tensor) -> None:
        """Raise ``ValueError`` for elements that :meth:`encode` never writes."""

    @abstractmethod
    def _expand(self, packed: torch.Tensor, elements: int) -> torch.Tensor:
        """Return at least ``elements`` fp32 values, not yet scaled, in memory of their own."""


_THIRTY_SECONDTHS = 1.5 * 2.0**18


class Int8Codec(_BlockCodec):
    """Signed integers -127..127, rounded to nearest even: 33 bytes for 32 elements.

    Error of an element: at most 1/127.5 of the block's largest magnitude.
    """

    name = "int8"
    nanoseconds = (0.9, 0.3)
    element_exponent = 6
    smallest_scale = 1

    def _packed_bytes(self, elements: int) -> int:
        return elements

    def _quantise(
        self, blocks: torch.Tensor, powers: torch.Tensor, inverse: torch.Tensor, greatest: int
    ) -> torch.Tensor:
        # In so large a sum there are no bits for less than 1/32, and the largest is 127/32: the lowest byte is the
        # integer, rounded to even.
        rounded = torch.addcmul(_row(_THIRTY_SECONDTHS, blocks.device), blocks, inverse, out=powers)
        rounded.clamp_(_THIRTY_SECONDTHS - 127 / 32, _THIRTY_SECONDTHS + 127 / 32)
        return rounded.view(torch.int32).to(torch.int8).view(torch.uint8)

    def _check(self, packed: torch.Tensor) -> None:
        if packed.numel() and int(packed.view(torch.int8).amin()) == -128:
            raise ValueError(f"{self.name}: impossible element -128")

    def _expand(self, packed: torch.Tensor, elements: int) -> torch.Tensor:
        return packed.view(torch.int8).to(torch.float32)


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 values by code; bit 3 is the sign."""
_HALVES = 1.5 * 2.0**22
"""Times a power of two: beside that, bits are left for its halves, which is what E2M1 tells between it and the next."""
_HUGE = (127 + 100) << 23
"""Bits of 2^100."""
_APART = 16.0
"""64, 32 or 16 halves of the powers 1/2, 1 and 2, so that the lowest byte tells which power it was."""


def _codes_by_key() -> list[int]:
    """E2M1 codes by ``_APART`` plus the rounded number, counted in halves of its power, as a byte."""
    codes = [0] * 256
    for power in (0.5, 1.0, 2.0):
        for halves in range(-4, 5):
            # Scaled to below 4 where the format ends at 8; what rounds up to that saturates.
            code = max(i for i, magnitude in enumerate(_MAGNITUDES) if magnitude <= abs(halves) * power)
            codes[round(2 * _APART / power) + halves] = code | 8 if halves < 0 else code
    return codes


@cache
def _packed_codes(device: torch.device) -> torch.Tensor:
    """Two E2M1 codes in a byte, by two keys."""
    codes = torch.tensor(_codes_by_key(), dtype=torch.uint8)
    return (codes.unsqueeze(0) | codes.unsqueeze(1) << 4).view(-1).to(device)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Two fp32 values, read as one fp64 number, by the byte that holds their codes."""
    values = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=torch.float32)
    values[8] = 0.0
    packed = torch.arange(256)
    return torch.stack([values[packed & 15], values[packed >> 4]], 1).view(torch.float64).view(-1).to(device)


class MxFp4Codec(_BlockCodec):
    """MXFP4 of the OCP Microscaling Formats Specification v1.0: E2M1 elements, 17 bytes for 32 elements.

    Scale and rounding follow its section 6.3 (shared exponent ``floor(log2(max)) - 2``, round to nearest even,
    saturate at 6). The element of even index is the low half of its byte; the spare half of an odd tail is 0. There
    is no negative zero. Error of an element: at most 1/4 of the block's largest magnitude.
    """

    name = "mxfp4"
    nanoseconds = (1.1, 0.4)
    sources: ClassVar[Mapping[str, str]] = {"mxfp4": "4-bit deltas: no loss (arXiv 2501.18512; own check)"}
    element_exponent = 2
    smallest_scale = 2

    def _packed_bytes(self, elements: int) -> int:
        return -(-elements // 2)

    def _quantise(
        self, blocks: torch.Tensor, powers: torch.Tensor, inverse: torch.Tensor, greatest: int
    ) -> torch.Tensor:
        scale = inverse
        if greatest > _HUGE:  # times _HALVES it would be infinite: scaled separately, at the cost of one operation
            scale, powers = torch.ones_like(inverse), powers.mul_(inverse)
        shifted = torch.addcmul(_row(_APART, blocks.device), powers, scale, value=_HALVES, out=powers)
        shifted.clamp_(min=0.5 * _HALVES + _APART)  # below 1/2 there are no halves of halves
        keys = torch.addcmul(shifted, blocks, inverse, out=shifted).view(torch.int32).to(torch.int8)
        # Two keys give one byte. They are not negative.
        return _packed_codes(blocks.device).index_select(0, keys.view(torch.int16).to(torch.int32).view(-1))

    def _expand(self, packed: torch.Tensor, elements: int) -> torch.Tensor:
        return _pairs(packed.device).index_select(0, packed.to(torch.int32)).view(torch.float32)


_INT8, _MXFP4 = Int8Codec(), MxFp4Codec()
register("int8", lambda _: _INT8, "1.03 bytes an element; at most 1/127.5 of the largest of 32 neighbours is lost")
register("mxfp4", lambda _: _MXFP4, "0.53 bytes an element; at most 1/4 of the largest of 32 neighbours is lost")
