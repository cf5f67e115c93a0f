"""The end of a step: the loss is checked, gradients are made final and clipped, the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from training.exchange.base import Exchange
from training.hardware.device import Precision, clip, gradient_norm, read
from training.loop.last_step import LastStep
from training.strategies.base import Strategy


@dataclass(frozen=True)
class StepFigures:
    """Loss and gradient norms of a step."""

    loss: float
    norm: float | None
    """Of the gradient before clipping; ``None`` without clipping."""
    own_norm: float | None
    """Of this member's own gradient, if it becomes part of a mean; ``None``: it does not, or is not finite."""


@dataclass
class Update:
    """Steps with the gradients that the strategy makes final.

    All work of the device is queued before the host reads results, so it waits for the device once, for loss and norm
    together. If members merge gradients, it reads the loss before the merge and the norm of the result after it.
    """

    parameters: list[nn.Parameter]
    precision: Precision
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    exchange: Exchange
    last_step: LastStep
    max_norm: float
    member_norm: Callable[[], float | None] = lambda: None
    """Returns the norm of the member's whole gradient; ``None``: ``parameters`` have all of it."""

    def run(self, losses: list[torch.Tensor], check: Callable[[float], None]) -> StepFigures:
        """Make the step.

        Args:
            losses: of the micro-batches; their sum is the loss.
            check: raises for a loss that is not finite; the weights are unchanged then.
        """
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        together = self.strategy.merges == "gradients" and len(self.exchange.members) > 1
        if together or self.strategy.replaces_optimizer:
            return self._looking_first(total, check, together)
        self.strategy.gradients()
        loss, (norm,) = read(total, self._clip())
        check(loss)
        self._step()
        return StepFigures(loss, self._norm_of(norm), None)

    def _looking_first(self, total: torch.Tensor, check: Callable[[float], None], together: bool) -> StepFigures:
        updates = self.strategy.replaces_optimizer
        own_gradient_norm = self._own_norm() if together else None
        loss, (own_norm, norm) = read(
            total, own_gradient_norm, clip(self.parameters, self.max_norm) if updates else None
        )
        check(loss)
        self.strategy.gradients()
        merged = self._clip()
        self._step()
        norm = norm if updates or merged is None else float(merged)
        is_finite = own_norm is not None and math.isfinite(own_norm)
        return StepFigures(loss, self._norm_of(norm), own_norm if is_finite else None)

    def _own_norm(self) -> torch.Tensor:
        whole = self.member_norm()
        if whole is not None:
            return torch.tensor(whole)
        return gradient_norm(self.parameters, self.precision.loss_scale)

    def _clip(self) -> torch.Tensor | None:
        leaves_it = self.strategy.replaces_optimizer or self.strategy.clips
        max_norm, global_norm = 0.0 if leaves_it else self.max_norm, self.strategy.gradient_norm
        if max_norm and global_norm is None:
            global_norm = self.member_norm()
        return self.precision.clip(self.optimizer, self.parameters, max_norm, global_norm)

    def _step(self) -> None:
        self.last_step.stage = "changing"
        self.precision.step(self.optimizer, self.parameters)

    def _norm_of(self, clipped: float | None) -> float | None:
        return self.strategy.gradient_norm if self.strategy.clips else clipped
