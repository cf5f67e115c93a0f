"""Top-k: only the largest magnitudes travel, as positions and bf16 values.

Encoded: ``u32 kept``, the positions, then ``kept`` bf16 values. Positions are either a list (``u32`` count for every
segment of 65,536 elements, then ``u16`` offsets in their segment, ascending) or a bitmap (bit ``i % 8`` of byte
``i // 8``), whichever is shorter for this ``kept``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from training.exchange.codecs.base import CHUNK_ELEMENTS, Codec, all_finite, check_length, typed_view
from training.exchange.codecs.registry import register
from training.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_SEGMENT = 65_536
_HEAD = 4
_BIN = 19
"""Bits of an fp32 number below those that select its histogram bin."""
_BF16_MAX = (2 - 2**-7) * 2.0**127


def _list_bytes(elements: int, count: int) -> int:
    return 4 * -(-elements // _SEGMENT) + 2 * count


def _bitmap_bytes(elements: int) -> int:
    return -(-elements // 8)


def _encoded_bytes(elements: int, count: int) -> int:
    return _HEAD + min(_list_bytes(elements, count), _bitmap_bytes(elements)) + 2 * count


class SparseCodec(Codec):
    """Every element that is not zero, rounded to bf16 (saturating): the reply of :class:`TopKCodec`, where the kept
    positions of all members are in the mean."""

    name = "sparse"
    nanoseconds = (2.8, 0.4)
    block = CHUNK_ELEMENTS

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = values.detach().to("cpu")  # which of equal magnitudes go differs between devices
        if not all_finite(values):
            raise ValueError(f"{self.name}: cannot carry NaN or infinity")
        positions = self._select(values)
        kept_values = values[positions].clamp(-_BF16_MAX, _BF16_MAX).to(torch.bfloat16)
        head = torch.tensor([positions.numel()], dtype=torch.int32).view(torch.uint8)
        packed_positions = torch.from_numpy(_pack_positions(positions.numpy(), values.numel()))
        return torch.cat([head, packed_positions, kept_values.view(torch.uint8)])

    def decode(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        if data.numel() < _HEAD:
            raise ValueError(f"{self.name}: {data.numel()} bytes are too few")
        count = int(typed_view(data[:_HEAD], torch.int32))
        self._check_count(count, elements)
        check_length(self, data, _encoded_bytes(elements, count))
        split = data.numel() - 2 * count
        positions = self._positions(data[_HEAD:split].numpy(), elements, count)
        values = typed_view(data[split:], torch.bfloat16).to(torch.float32)
        if not all_finite(values):
            raise ValueError(f"{self.name}: impossible value")
        result = torch.zeros(elements)
        result[torch.from_numpy(positions)] = values
        return result

    def max_encoded_bytes(self, elements: int) -> int:
        return _encoded_bytes(elements, elements)

    def _select(self, values: torch.Tensor) -> torch.Tensor:
        """Return the positions to keep, ascending."""
        return torch.from_numpy(np.flatnonzero(values.numpy() != 0))  # takes a third of torch's time

    def _check_count(self, count: int, elements: int) -> None:
        if not 0 <= count <= elements:
            raise ValueError(f"{self.name}: impossible count")

    def _positions(self, packed: Bytes, elements: int, count: int) -> npt.NDArray[np.int64]:
        positions = _unpack_positions(packed, elements, count)
        ascending = positions.size == count and bool((np.diff(positions) > 0).all())
        if not ascending or (positions.size and int(positions[-1]) >= elements):
            raise ValueError(f"{self.name}: impossible positions")
        return positions


def share_of(text: str) -> float:
    """Parse the share of elements in a codec's argument.

    Raises:
        ValueError: it is no number above 0 and at most 1.
    """
    with contextlib.suppress(ValueError):
        if 0.0 < (share := float(text)) <= 1.0:
            return share
    raise ValueError("bad share")


class TopKCodec(SparseCodec):
    """The ``share`` of elements with the largest magnitude, the rest read as zero (Aji and Heafield 2017,
    arXiv 1704.05021). About ``4 * share`` bytes an element. Wants error feedback.

    Args:
        share: part of the elements that travels, above 0 and at most 1; rounded up to whole elements.
    """

    fewest_rounds = 300  # with 10, the loss ended above a single machine's
    wants_feedback = True
    sources: ClassVar[Mapping[str, str]] = {
        "sparse": "sparse deltas over hundreds of rounds: as dense ones (SparseLoCo, arXiv 2508.15706)"
    }

    def __init__(self, share: str) -> None:
        self.share = share_of(share)
        self.name = f"topk:{self.share!r}"

    @property
    def reply(self) -> Codec:
        return SparseCodec()

    def max_encoded_bytes(self, elements: int) -> int:
        return _encoded_bytes(elements, self._kept_count(elements))

    def expected_bytes(self, elements: int) -> float:
        """4 bytes, a 16-bit position and a bf16 value, for each element that travels."""
        return 4.0 * self.share * elements

    def expected_reply_bytes(self, elements: int, members: int) -> float:
        """A mean holds what any member kept: at most all elements, which then travel in 16 bits."""
        return min(members * self.expected_bytes(elements), 2.0 * elements)

    def _kept_count(self, elements: int) -> int:
        return min(elements, math.ceil(self.share * elements))

    def _select(self, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(_largest(values.view(torch.int32) & 0x7FFF_FFFF, self._kept_count(values.numel())))

    def _check_count(self, count: int, elements: int) -> None:
        if count != self._kept_count(elements):
            raise ValueError(f"{self.name}: impossible count")


def _largest(magnitudes: torch.Tensor, count: int) -> npt.NDArray[np.int64]:
    """Return the positions of the ``count`` largest fp32 magnitudes, ascending; of equal ones the first.

    Their bits, int32, rise with them: a histogram of exponents, with four bits of mantissa, leaves few to choose from.
    """
    if not count:
        return np.empty(0, dtype=np.int64)
    from_above = torch.bincount(magnitudes >> _BIN).numpy()[::-1].cumsum()
    lowest = from_above.size - 1 - int(np.searchsorted(from_above, count))
    bits = magnitudes.numpy()
    candidates = np.flatnonzero(bits >= lowest << _BIN)
    candidate_bits = bits[candidates]
    threshold = np.partition(candidate_bits, candidate_bits.size - count)[candidate_bits.size - count]
    chosen = candidate_bits > threshold
    chosen[np.flatnonzero(candidate_bits == threshold)[: count - int(np.count_nonzero(chosen))]] = True
    result: npt.NDArray[np.int64] = candidates[chosen]
    return result


def _pack_positions(positions: npt.NDArray[np.int64], elements: int) -> Bytes:
    if _list_bytes(elements, positions.size) > _bitmap_bytes(elements):
        bits = np.zeros(elements, dtype=np.uint8)
        bits[positions] = 1
        return np.packbits(bits, bitorder="little")
    counts = np.bincount(positions // _SEGMENT, minlength=-(-elements // _SEGMENT)).astype("<u4")
    return np.concatenate([counts.view(np.uint8), (positions % _SEGMENT).astype("<u2").view(np.uint8)])


def _unpack_positions(packed: Bytes, elements: int, count: int) -> npt.NDArray[np.int64]:
    if _list_bytes(elements, count) > _bitmap_bytes(elements):
        return np.flatnonzero(np.unpackbits(packed, bitorder="little")).astype(np.int64)
    segments = -(-elements // _SEGMENT)
    counts = np.frombuffer(packed.tobytes(), dtype="<u4", count=segments).astype(np.int64)
    offsets = np.frombuffer(packed.tobytes(), dtype="<u2", offset=4 * segments).astype(np.int64)
    if int(counts.sum()) != count:
        raise ValueError("sparse: impossible positions")
    return np.repeat(np.arange(segments, dtype=np.int64) * _SEGMENT, counts) + offsets


register(
    "topk",
    TopKCodec,
    "about 4 bytes for each element that is sent, the share of largest magnitude; needs error feedback",
    example="0.03",
    argument="SHARE",
)
