"""The end of a step: the loss is checked, gradients are made final and clipped, the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from profiles.errors import RunFailed
from training.exchange.base import Exchange
from training.hardware.device import Precision, clip, gradient_norm, read
from training.loop.last_step import LastStep
from training.strategies.base import Strategy
from training.strategies.weights import MAX_NON_FINITE

NOT_FINITE_HINT = "lower learning_rate, set max_grad_norm = 1, or mixed_precision = off"


@dataclass(frozen=True)
class StepFigures:
    """Loss and gradient norms of a step."""

    loss: float
    norm: float | None
    """Of the gradient before clipping; ``None`` without clipping."""
    own_norm: float | None
    """Of this member's own gradient, if it becomes part of a mean; ``None``: it does not, or is not finite."""
    counts: bool = True
    """Whether loss and gradient were finite; else the others go on without this member's step."""


@dataclass
class LeftOutSteps:
    """Steps of a member among others that are left out because the loss, or what the optimizer would step with, is not
    finite. The member leaves the run after :data:`~training.strategies.weights.MAX_NON_FINITE` of them in a row.

    Args:
        warn: called with a line for each.
        newest_snapshot: returns a sentence on the snapshot that is left.
        possible: whether a step may be left out at all; devices that hold parts of a member would have to agree on it.
    """

    warn: Callable[[str], None]
    newest_snapshot: Callable[[], str]
    possible: bool
    _count: int = field(default=0, init=False)

    def note(self, problem: str, others: bool) -> bool:
        """Record a step; return whether it is left out.

        Args:
            problem: empty: everything is finite.
            others: whether there are other members; one alone has nothing to go on with.

        Raises:
            RunFailed: this member cannot go on.
        """
        self._count = self._count + 1 if problem else 0
        if problem and (not (others and self.possible) or self._count == MAX_NON_FINITE):
            times = f", {self._count} times in a row" if self._count > 1 else ""
            raise RunFailed(f"{problem}{times}; {self.newest_snapshot()}", NOT_FINITE_HINT)
        if problem:
            self.warn(f"{problem}; the others continue without this step")
        return bool(problem)


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
    left_out: LeftOutSteps | None = None
    """Steps that others go on without; ``None``: who calls refuses a loss that is not finite."""

    def run(self, losses: list[torch.Tensor], problem_of: Callable[[float], str]) -> StepFigures:
        """Make the step, or leave it out if loss or gradient is not finite; the weights are unchanged then.

        Args:
            losses: of the micro-batches; their sum is the loss.
            problem_of: returns what is wrong with a loss that is not finite, or raises; empty: it is finite.

        Raises:
            RunFailed: this member cannot go on.
        """
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        together = self.strategy.merges == "gradients" and len(self.exchange.members) > 1
        if together or self.strategy.replaces_optimizer:
            return self._looking_first(total, problem_of, together)
        self.strategy.gradients()
        loss, (norm,) = read(total, self._clip())
        problem = problem_of(loss)
        if not problem and norm is not None and not math.isfinite(norm) and self._may_leave_out:
            problem = "the gradient of a step is not finite on this machine"
        if self._leaves_out(problem):
            return StepFigures(0.0, None, None, counts=False)
        self._step()
        return StepFigures(loss, self._norm_of(norm), None)

    def _looking_first(self, total: torch.Tensor, problem_of: Callable[[float], str], together: bool) -> StepFigures:
        updates = self.strategy.replaces_optimizer
        own_gradient_norm = self._own_norm() if together else None
        loss, (own_norm, norm) = read(
            total, own_gradient_norm, clip(self.parameters, self.max_norm) if updates else None
        )
        is_left_out = self._leaves_out(problem_of(loss))  # the gradient, by all members, where it is merged
        self.strategy.gradients()
        merged = self._clip()
        self._step()
        norm = norm if updates or merged is None else float(merged)
        is_finite = own_norm is not None and math.isfinite(own_norm)
        return StepFigures(
            0.0 if is_left_out else loss, self._norm_of(norm), own_norm if is_finite else None, not is_left_out
        )

    @property
    def _may_leave_out(self) -> bool:
        """Whether others can go on without a step of this member that is not finite, as no loss scale is the reason."""
        are_others = self.left_out is not None and self.left_out.possible and len(self.exchange.members) > 1
        return are_others and self.precision.loss_scale is None

    def _leaves_out(self, problem: str) -> bool:
        return self.left_out is not None and self.left_out.note(problem, len(self.exchange.members) > 1)

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
