"""A group of one: the exchange of a run with a single worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from training.exchange.base import ANCHOR_DEADLINE, Anchor, Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec

V = TypeVar("V")


@dataclass(frozen=True)
class Finished(Generic[V]):
    """A result that is already there."""

    value: V

    def wait(self, timeout: float | None = None) -> V:
        return self.value

    def done(self) -> bool:
        return True


class SoloExchange(Exchange):
    """Every mean is the member's own contribution, unencoded; nothing is sent."""

    engine = "solo"

    def __init__(self) -> None:
        self.rank = 0
        self.traffic = Traffic()

    @property
    def members(self) -> tuple[int, ...]:
        return (0,)

    @property
    def is_newcomer(self) -> bool:
        return False

    @property
    def anchor_wanted(self) -> bool:
        return False

    def _start_mean(
        self, name: str, values: torch.Tensor, weight: float, codec: Codec, flags: bytes, stream: str
    ) -> Pending[MeanResult]:
        return Finished(MeanResult(values.clone(), weight, (0,), flags=flags))

    def _start_gather(self, name: str, payload: bytes) -> Pending[dict[int, bytes]]:
        return Finished({0: payload})

    def residual(self, stream: str, elements: int) -> torch.Tensor | None:
        return None

    def restore_residual(self, stream: str, values: torch.Tensor) -> None:
        """Nothing is encoded."""

    def publish_anchor(self, anchor: Anchor) -> None:
        raise ExchangeError("a group of one has no newcomers")

    def fetch_anchor(self, timeout: float = ANCHOR_DEADLINE) -> Anchor:
        raise ExchangeError("a group of one has no anchor to fetch")

    def close(self) -> None:
        """Nothing to leave."""
