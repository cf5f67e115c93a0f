"""How much less a member sends than if all averaged all weights in every step, whatever the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.events import SyncEvent
from training.exchange.base import Exchange

if TYPE_CHECKING:
    from torch import nn

_FP32 = 4


class Compression:
    """Counts what steps send, between two reports of the strategy.

    Args:
        parameters: those that are trained.
        exchange: with the members.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: Exchange) -> None:
        self.weights = sum(parameter.numel() for parameter in parameters)
        self._exchange = exchange
        self._all, self._sent = 0.0, 0

    def step(self, sent: int) -> None:
        """A step of this member is over, in which it sent so many bytes."""
        count = len(self._exchange.members)
        self._all += _FP32 * self.weights * 2 * (count - 1) / count
        self._sent += sent

    def told(self, report: SyncEvent, step: int) -> SyncEvent:
        """Return a report of the strategy with its step, and the ratio since the one before."""
        ratio = self._all / self._sent if self._sent and self._all else None
        self._all, self._sent = 0.0, 0
        return report.model_copy(update={"step": step, "compression": ratio})
