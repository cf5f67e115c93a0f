"""Top-k in blocks with 2 bits a value: 14 bits for each element that is sent (SparseLoCo, arXiv 2508.15706).

Of every 4096 elements the share of largest magnitude is kept. Its values share four levels, chosen as the code that is
published with the paper chooses them: with the mean ``m`` and the standard deviation ``s`` (over count - 1) of all kept
values of the vector, a value ``v`` has the number ``clamp(round((v - m) / (1.5 s)) + 2, 0, 3)``, and a number reads as
the mean of the values that have it.

Encoded: four fp32 levels, then for every kept element, block by block and ascending in each, its place in its block
(12 bits, the first one in the highest bits), then the numbers (2 bits, the first one in the highest bits).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from training.exchange.codecs.base import CHUNK_ELEMENTS, Codec, all_finite, check_length, typed_view
from training.exchange.codecs.registry import register
from training.exchange.codecs.sparsification import SparseCodec, share_of
from training.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

BLOCK = 4096
_LEVELS = 4
_SIGMAS = 6
"""Standard deviations that the levels span."""
_HEAD = 4 * _LEVELS
_PLACE_BITS, _NUMBER_BITS = 12, 2


class TwoBitCodec(Codec):
    """The ``share`` of largest magnitude of every block, in four levels; the rest reads as zero. Wants error feedback.

    Args:
        share: part of the elements that travels, above 0 and at most 1; rounded, at least one element of a block.
    """

    block = CHUNK_ELEMENTS
    nanoseconds = (3.6, 0.4)
    fewest_rounds = 100  # with 10 they ended above one machine alone
    wants_feedback = True
    sources: ClassVar[Mapping[str, str]] = {
        "two-bits": "sparse deltas in 2 bits over hundreds of rounds: as dense ones (SparseLoCo, arXiv 2508.15706)"
    }

    def __init__(self, share: str) -> None:
        self.share = share_of(share)
        self.name = f"topk2bit:{self.share!r}"

    @property
    def reply(self) -> Codec:
        """Of a mean, which holds what any member kept; all of it travels then."""
        return SparseCodec()

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = values.detach().to("cpu")  # which of equal magnitudes go differs between devices
        if not all_finite(values):
            raise ValueError(f"{self.name}: cannot carry NaN or infinity")
        places, kept = self._select(values)
        levels, numbers = _quantised(kept)
        packed = np.concatenate([_packed_places(places), _packed_numbers(numbers)])
        return torch.cat([levels.view(torch.uint8), torch.from_numpy(packed)])

    def decode(self, data: torch.Tensor, elements: int) -> torch.Tensor:
        check_length(self, data, self.max_encoded_bytes(elements))
        levels = typed_view(data[:_HEAD], torch.float32)
        if not all_finite(levels):
            raise ValueError(f"{self.name}: impossible level")
        counts, split = self._counts(elements), _HEAD + _bytes(self.kept(elements), _PLACE_BITS)
        places = _unpacked_places(data[_HEAD:split].numpy(), int(counts.sum()))
        places += np.repeat(np.arange(counts.size, dtype=np.int64) * BLOCK, counts)
        # Ascending over all blocks: nothing is there twice, and nothing lies beyond its block.
        ends = np.repeat(np.arange(1, counts.size + 1, dtype=np.int64) * BLOCK, counts)
        if places.size and not ((np.diff(places) > 0).all() and (places < np.minimum(ends, elements)).all()):
            raise ValueError(f"{self.name}: impossible positions")
        numbers = _unpacked_numbers(data[split:].numpy(), int(counts.sum()))
        result = torch.zeros(elements)
        result[torch.from_numpy(places)] = levels[torch.from_numpy(numbers)]
        return result

    def max_encoded_bytes(self, elements: int) -> int:
        kept = self.kept(elements)
        return _HEAD + _bytes(kept, _PLACE_BITS) + _bytes(kept, _NUMBER_BITS)

    def expected_reply_bytes(self, elements: int, members: int) -> float:
        """4 bytes for each element that any member kept; at most all of them, which then travel in 16 bits."""
        return min(4.0 * members * self.kept(elements), 2.0 * elements)

    def kept(self, elements: int) -> int:
        """Return how many of so many elements travel."""
        whole, rest = divmod(elements, BLOCK)
        return whole * self._of(BLOCK) + (self._of(rest) if rest else 0)

    def _of(self, block: int) -> int:
        return min(block, max(1, round(self.share * block)))

    def _counts(self, elements: int) -> npt.NDArray[np.int64]:
        """Return how many elements of every block travel."""
        whole, rest = divmod(elements, BLOCK)
        return np.array([self._of(BLOCK)] * whole + [self._of(rest)] * bool(rest), dtype=np.int64)

    def _select(self, values: torch.Tensor) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
        """Return the places of the kept elements in their blocks, and their values."""
        whole = values.numel() // BLOCK * BLOCK
        places, kept = [], []
        for part in (values[:whole].view(-1, BLOCK), values[whole:].view(1, -1)):
            if part.numel():
                found = part.abs().topk(self._of(part.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
                places.append(found.reshape(-1).numpy())
                kept.append(part.gather(1, found).reshape(-1))
        if not kept:
            return np.empty(0, dtype=np.int64), values
        return np.concatenate(places), torch.cat(kept)


def _quantised(values: torch.Tensor) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
    """Return the levels, fp32, and the number of every value's."""
    exact = values.to(torch.float64)
    centred = exact - exact.mean() if exact.numel() else exact
    deviation = float(centred.norm()) / math.sqrt(max(1, exact.numel() - 1))
    scale = _SIGMAS * deviation / _LEVELS or 1.0
    numbers = ((centred / scale).round() + _LEVELS // 2).clamp(0, _LEVELS - 1).to(torch.int64)
    counts = torch.bincount(numbers, minlength=_LEVELS)
    sums = torch.bincount(numbers, weights=exact, minlength=_LEVELS)
    return (sums / counts.clamp(min=1)).to(torch.float32), numbers.numpy()


def _bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _packed_places(places: npt.NDArray[np.int64]) -> Bytes:
    """Return two places in three bytes."""
    pairs = np.zeros((-(-places.size // 2), 2), dtype=np.uint16)
    pairs.reshape(-1)[: places.size] = places
    one, two = pairs.T
    found = np.stack([one >> 4, (one & 15) << 4 | two >> 8, two & 255], axis=1).astype(np.uint8)
    return found.reshape(-1)[: _bytes(places.size, _PLACE_BITS)]


def _unpacked_places(data: Bytes, count: int) -> npt.NDArray[np.int64]:
    triples = np.zeros((-(-count // 2), 3), dtype=np.int64)
    triples.reshape(-1)[: data.size] = data
    one, two, three = triples.T
    return np.stack([one << 4 | two >> 4, (two & 15) << 8 | three], axis=1).reshape(-1)[:count]


def _packed_numbers(numbers: npt.NDArray[np.int64]) -> Bytes:
    """Return four numbers in a byte."""
    fours = np.zeros((-(-numbers.size // 4), 4), dtype=np.uint8)
    fours.reshape(-1)[: numbers.size] = numbers
    one, two, three, four = fours.T
    found: Bytes = one << 6 | two << 4 | three << 2 | four
    return found


def _unpacked_numbers(data: Bytes, count: int) -> npt.NDArray[np.int64]:
    fours = np.stack([data >> 6, data >> 4 & 3, data >> 2 & 3, data & 3], axis=1)
    return fours.reshape(-1)[:count].astype(np.int64)


register(
    "topk2bit",
    TwoBitCodec,
    "14 bits for each element that is sent, the share of largest magnitude; needs error feedback",
    example="0.015625",
    argument="SHARE",
)
