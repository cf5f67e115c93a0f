"""What the tests of strategies train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.strategies.settings import strategy_settings
from tests.training.memory_exchange import Late, RoomExchange, together
from training.exchange.base import Contribution, Group, MeanResult, Pending
from training.strategies.base import Strategy, StrategyContext


class Vectors(nn.Module):
    """Two vectors, of which a loss may use both, one or none."""

    def __init__(self, elements: int = 64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(elements))
        self.second = nn.Parameter(torch.zeros(elements))


def attached(
    make: type[Strategy], member: RoomExchange, model: nn.Module, warnings: list[str], **settings: Any
) -> Strategy:
    """Return a strategy for ``model`` that compares no weights unless ``settings`` say so."""
    chosen = strategy_settings(**{"verify_interval": 0} | settings)
    strategy = make(StrategyContext(chosen, 100, 0, warnings.append))
    strategy.attach(model, member)
    return strategy


def step(strategy: Strategy, loss: torch.Tensor | None, number: int = 0, scale: float | None = None) -> None:
    """Make the gradients of one step; a member without a sample has no loss."""
    strategy.begin_step(number, 0.0 if loss is None else 1.0, scale)
    strategy.last_backward()
    if loss is not None:
        (loss * (scale or 1.0)).backward()
    strategy.gradients()


class Watched(RoomExchange):
    """Keeps to whom it gives how many bytes; no group is that of all."""

    def __init__(self, exchange: RoomExchange) -> None:
        vars(self).update(vars(exchange))
        self.given: list[tuple[Group, int]] = []

    def _start_mean(self, given: Contribution, waits: bool = False) -> Pending[MeanResult]:
        self.given.append((given.group, len(given.codec.encode(given.values)) + len(given.flags)))
        return super()._start_mean(given, waits)

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        self.given.append((group, len(payload)))
        return super()._start_gather(name, payload, group, waits)


def in_a_group(
    size: int, body: Callable[[RoomExchange], Any], late: Late = lambda name: (), newcomers: int = 0
) -> list[Any]:
    """Let ``size`` members do ``body`` together; return their results by rank, or raise what one of them raised."""
    found, _ = together(size, body, late, newcomers)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return [found[rank] for rank in range(size)]
