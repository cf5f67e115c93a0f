"""The compression ratio of a strategy: bytes of averaging all weights in every step over the bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.exchange.base import Exchange
from training.records.events import SyncEvent

if TYPE_CHECKING:
    from torch import nn

_FP32 = 4


class CompressionRatio:
    """Counts the bytes that steps send between two reports of the strategy.

    Args:
        parameters: the trained ones.
        exchange: its members share the average.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: Exchange) -> None:
        self.weights = sum(parameter.numel() for parameter in parameters)
        self._exchange = exchange
        self._dense_bytes, self._sent_bytes = 0.0, 0

    def step(self, bytes_sent: int) -> None:
        """Count a finished step of this member."""
        count = len(self._exchange.members)
        self._dense_bytes += _FP32 * self.weights * 2 * (count - 1) / count
        self._sent_bytes += bytes_sent

    def complete_report(self, report: SyncEvent, step: int) -> SyncEvent:
        """Return a report of the strategy with its step and the compression ratio since the previous report."""
        ratio = self._dense_bytes / self._sent_bytes if self._sent_bytes and self._dense_bytes else None
        self._dense_bytes, self._sent_bytes = 0.0, 0
        return report.model_copy(update={"step": step, "compression": ratio})
