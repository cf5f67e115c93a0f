"""The schedule of a stream: its samples are dealt out as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from profiles.errors import BadInput
from training.data.sample_order import Cursor, SampleRange, SampleSchedule
from training.lazy import np
from training.numerics.schedule import steps_in
from training.tasks.own_code.streams import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNENDING = 1 << 52
"""Size of a stream: a position never reaches it."""


class StreamSchedule(SampleSchedule):
    """Assigns the next samples of a stream to the members, step by step: consecutive ones, in rank order.

    A pass has no smaller last step: the step goes on with the first samples of the next pass.

    Args:
        length: samples of a pass; ``None``: unknown.
    """

    def __init__(self, stream: Stream | None, seed: int, accumulation: int) -> None:
        super().__init__(UNENDING, seed, accumulation)
        self._stream = stream

    def draw_step(self, cursor: Cursor, size: int, rank: int) -> list[list[int]]:
        """Return a step for a newcomer: the samples that the others take next, which it can reach."""
        begin = cursor.offset
        return [[*range(begin + n * size, begin + (n + 1) * size)] for n in range(self.accumulation)]

    def total_steps(self, batch_sizes: Mapping[int, int], epochs: float) -> int:
        length = self._stream.length if self._stream is not None else None
        if length is None:
            raise BadInput("the training data are a stream that does not say how long it is", "set max_steps")
        return steps_in(length / self._group_batch(batch_sizes), epochs)

    def epoch_fraction(self, cursor: Cursor, batch_sizes: Mapping[int, int]) -> float:
        return self._stream.passes(cursor.offset) if self._stream is not None else 0.0

    def _indices(self, pieces: Sequence[SampleRange]) -> NDArray[np.int64]:
        ranges = [np.arange(piece.start, piece.stop, dtype=np.int64) for piece in pieces]
        return np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
