"""Two optimizers, each for its own weights, as one: for the learning rate, loss scaling, snapshots and newcomers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OptimizerPair(torch.optim.Optimizer):
    """Steps with one optimizer after the other; holds the groups and states of both.

    Args:
        optimizers: of different weights. From now on they work on the groups and states of this one.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self._groups = [len(optimizer.param_groups) for optimizer in optimizers]
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = 0
        for optimizer, count in zip(self._optimizers, self._groups, strict=True):
            optimizer.param_groups, optimizer.state = self.param_groups[start : start + count], self.state
            optimizer.step()
            start += count
        return loss
