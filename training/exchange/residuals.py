"""What encoding the means of a stream lost, kept by the owners that average: the owners' side of error feedback."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from training.exchange.codecs import Codec, SparseCodec, all_finite
from training.exchange.staging import decode_there, encode_there
from training.lazy import torch


@dataclass(frozen=True)
class Residual:
    """Pieces of a residual vector."""

    values: torch.Tensor
    """Flat fp32 on the CPU: the pieces, concatenated."""
    bounds: torch.Tensor | None = None
    """int64 of [pieces, 2]: start and stop of each in the vector; ``None``: it is the whole vector."""

    def pieces(self) -> dict[int, torch.Tensor]:
        """Return the pieces by their start in the vector.

        Raises:
            ValueError: the bounds do not match the values.
        """
        if self.bounds is None:
            return {0: self.values}
        starts, sizes = self.bounds[:, 0].tolist(), (self.bounds[:, 1] - self.bounds[:, 0]).tolist()
        if min([*starts, *sizes], default=0) < 0 or sum(sizes) != self.values.numel():
            raise ValueError("what was kept of a mean does not fit its bounds")
        return dict(zip(starts, torch.split(self.values, sizes)))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return it as named tensors of a snapshot."""
        return {name: self.values} | ({f"{name}/bounds": self.bounds} if self.bounds is not None else {})

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], name: str) -> Residual | None:
        """Read it from the tensors of a snapshot; ``None`` if it is not there."""
        return cls(tensors[name], tensors.get(f"{name}/bounds")) if name in tensors else None


class MeanResiduals:
    """An averaging owner's residuals: what encoding the means of every stream lost, piece by piece. Thread-safe."""

    def __init__(self) -> None:
        self._residuals: dict[str, dict[int, torch.Tensor]] = {}
        """By stream, and by the start of each piece in the vector."""
        self._lock = threading.Lock()

    def settle(self, stream: str, pending: Mapping[int, torch.Tensor]) -> None:
        """Keep what encoding all of this owner's pieces of one mean lost; it replaces all residuals of the stream.

        Where the pieces differ from those of the mean before, because the owners' shards have changed, the old
        residuals of their ranges have been added to them.
        """
        with self._lock:
            self._residuals[stream] = dict(pending)

    def between(self, stream: str, start: int, stop: int) -> torch.Tensor | None:
        """Return the residual of a range of a stream's vector, on the CPU; ``None`` if there is none."""
        pieces = self._pieces(stream).items()
        overlapping = [(at, piece) for at, piece in pieces if at < stop and at + piece.numel() > start]
        if not overlapping:
            return None
        values = torch.zeros(stop - start)
        for at, piece in overlapping:
            begin, end = max(at, start), min(at + piece.numel(), stop)
            values[begin - start : end - start] = piece[begin - at : end - at].to("cpu")
        return values

    def whole_vector(self, stream: str) -> Residual | None:
        """Return all residuals of a stream's vector, on the CPU; ``None`` if there are none."""
        pieces = self._pieces(stream)
        bounds: list[list[int]] = []
        for start in sorted(pieces):
            if not bounds or bounds[-1][1] != start:
                bounds.append([start, start])
            bounds[-1][1] = start + pieces[start].numel()
        if not pieces:
            return None
        return Residual(torch.cat([pieces[start].to("cpu") for start in sorted(pieces)]), torch.tensor(bounds))

    def restore(self, stream: str, residual: Residual) -> None:
        """Restore residuals before the first mean of their stream; later calls have no effect.

        Raises:
            ValueError: the bounds do not match the values.
        """
        pieces = residual.pieces()
        with self._lock:
            if not self._residuals.get(stream) and all_finite(residual.values):
                self._residuals[stream] = pieces

    def _pieces(self, stream: str) -> Mapping[int, torch.Tensor]:
        with self._lock:
            return self._residuals.get(stream, {})

    def of_piece(self, stream: str, start: int, mean: torch.Tensor) -> torch.Tensor:
        """Return the residual of a piece, whose bounds may have changed."""
        residual = self._pieces(stream).get(start)
        if residual is None or residual.shape != mean.shape:
            residual = self.between(stream, start, start + mean.numel())
        return torch.zeros_like(mean) if residual is None else residual.to(mean.device)


class MeanEncoder:
    """What the owner of a part of a vector does with its mean, on whatever device: encodes it piece by piece, and adds
    what that loses to the stream's next mean, once this one is final.

    Args:
        stream: empty: nothing is added, and nothing kept.
        codec: of the outcome.
    """

    def __init__(self, residuals: MeanResiduals, stream: str, codec: Codec) -> None:
        self._residuals, self._stream, self._codec = residuals, stream, codec
        self._pending: dict[int, torch.Tensor] = {}

    def encode(self, start: int, mean: torch.Tensor) -> torch.Tensor:
        """Return the piece of the mean (flat fp32) that begins at ``start``, encoded, on the device of the mean.

        Raises:
            ValueError: the codec cannot carry the mean.
        """
        codec = self._codec
        if not self._stream:
            return encode_there(codec, mean)
        residual = self._residuals.of_piece(self._stream, start, mean)
        # Zeros of a sparse reply cost no bytes: a residual there waits until its position is sent again.
        compensated = residual * (mean != 0) if isinstance(codec, SparseCodec) else residual
        total = mean + compensated
        if not codec.carries(total):
            total, compensated = mean, torch.zeros_like(mean)
        data = encode_there(codec, total)
        self._pending[start] = residual - compensated + (total - decode_there(codec, data, mean.numel()))
        return data

    def settle(self) -> None:
        """Keep what encoding lost, now that the mean is final."""
        self._residuals.settle(self._stream, self._pending)
