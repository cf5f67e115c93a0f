"""A vector that stays encoded: what a device has encoded goes to the wire, and what arrives goes to a device, without
being decoded on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from training.exchange.codecs.base import CHUNK_ELEMENTS, Codec
from training.lazy import torch


def _pageable(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


class EncodedVector:
    """A flat fp32 vector on the host as ``codec`` encodes it, of which any piece can be read and written.

    A piece begins at a multiple of the codec's block, and ends at one or with the vector.

    Args:
        codec: one with :meth:`~training.exchange.codecs.base.Codec.planes`.
        device: where the mean of such vectors is wanted.
        allocate: returns flat uint8 memory of so many bytes.
    """

    def __init__(
        self,
        codec: Codec,
        elements: int,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor] = _pageable,
    ) -> None:
        self.codec, self.elements, self.device, self._allocate = codec, elements, device, allocate
        self.planes = [allocate(size) for size in codec.planes(elements)]

    def empty_like(self) -> EncodedVector:
        """Return one of the same size, in such memory."""
        return EncodedVector(self.codec, self.elements, self.device, self._allocate)

    def parts(self, start: int, stop: int, planes: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the view of a piece in each plane, or in the copies of all ``planes`` elsewhere."""
        bounds = zip(self.codec.planes(start), self.codec.planes(stop), strict=True)
        return [plane[a:b] for plane, (a, b) in zip(planes or self.planes, bounds, strict=True)]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of ``codec.encode`` of a piece, flat uint8; they may share memory with the vector."""
        parts = self.parts(start, stop)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Set a piece to what ``codec.encode`` returned for it.

        Raises:
            ValueError: the codec would not decode it, or it is no piece.
        """
        block = self.codec.block
        if start % block or (stop % block and stop != self.elements):
            raise ValueError(f"{self.codec.name}: {start} to {stop} is no piece of whole blocks")
        parts = self.codec.cut(data, stop - start)
        for target, source in zip(self.parts(start, stop), parts, strict=True):
            target.copy_(source)

    def decode(self) -> torch.Tensor:
        """Return the vector, flat fp32 on the host."""
        values = self._allocate(4 * self.elements).view(torch.float32)
        for start in range(0, self.elements, CHUNK_ELEMENTS):
            piece = values[start : start + CHUNK_ELEMENTS]
            self.codec.decode_into(self.read(start, start + piece.numel()), piece)
        return values
