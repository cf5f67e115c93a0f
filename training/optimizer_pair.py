"""Two optimizers, each for its own weights, as one: for the learning rate, loss scaling, snapshots and newcomers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Pair(torch.optim.Optimizer):
    """Steps with one optimizer after the other; holds the groups and states of both.

    Args:
        parts: of different weights. They work on this one's groups and states from now on.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        self._groups = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for part, count in zip(self._parts, self._groups, strict=True):
            part.param_groups, part.state = self.param_groups[first : first + count], self.state
            part.step()
            first += count
        return loss
