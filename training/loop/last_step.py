"""The last finished step of a member, kept until the next one is finished: a member that loses its group in the middle
of a step writes a snapshot of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from profiles.errors import RunFailed
from training.exchange.base import ExchangeError
from training.loop.state import persistent_buffers
from training.numerics.randomness import generator_resetter
from training.strategies.base import Strategy

Stage = Literal["between", "open", "changing", "ending"]
"""Between two steps; forward, backward and the exchange of gradients, which leave the weights as they are; the step of
the optimizer; what a strategy exchanges after it."""


class LastStep:
    """The stage of a step, and the state that its forward passes change: random state and buffers.

    Args:
        strategy: of the training.
    """

    def __init__(self, model: nn.Module, device: torch.device, strategy: type[Strategy]) -> None:
        self._buffers = list(persistent_buffers(model).values())
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0
        self._device, self._survives_failed_exchange = device, strategy.survives_failed_exchange
        self._opening_stage: Stage = "changing" if strategy.replaces_optimizer else "open"
        self.stage: Stage = "between"

    def begin(self) -> None:
        """A step begins."""
        if self._steps == 1:  # what the first one left alone is a constant; versions do not tell of running statistics
            self._buffers = [buffer for buffer, before in self._before if not torch.equal(buffer, before)]
        self._steps += 1
        self._before = [(buffer, buffer.clone()) for buffer in self._buffers]
        self._reset_generators = generator_resetter(self._device)
        self.stage = self._opening_stage

    def keep(self, write: Callable[[], object], warn: Callable[[str], None]) -> bool:
        """Restore the state after the last step if needed, and write it; return whether that was possible."""
        if self.stage == "changing" or (self.stage == "ending" and not self._survives_failed_exchange):
            return False
        if self.stage == "open":
            self._go_back()
        try:
            write()
        except (RunFailed, ExchangeError) as error:  # the loss of the group is reported elsewhere
            warn(str(error))
            return False
        return True

    @torch.no_grad()
    def _go_back(self) -> None:
        for buffer, before in self._before:
            buffer.copy_(before)
        self._reset_generators()
        self.stage = "between"
