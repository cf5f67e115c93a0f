"""Early stopping: when to stop, and the state of the best evaluation, to end with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from training.buffers import persistent_buffers

_CPU = torch.device("cpu")


@dataclass
class EarlyStopping:
    """Stops after ``patience`` evaluations in a row without a better result; smaller is better."""

    patience: int
    min_delta: float
    best: float = float("inf")
    best_step: int = -1
    waited: int = 0
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Trained weights and buffers of the best evaluation, on the CPU; empty where early stopping is off."""

    def update(self, value: float, step: int) -> bool:
        """Note a result; return whether it is the best so far."""
        if value < self.best - self.min_delta:
            self.best, self.best_step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def note(self, value: float | None, step: int, model: nn.Module) -> None:
        """Note what an evaluation of ``model`` has measured; keep its state if it is the best so far."""
        if value is not None and self.update(value, step) and self.patience:
            self.kept = {name: value.detach().to(_CPU, copy=True) for name, value in _state(model).items()}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give ``model`` the best state, if one was kept."""
        state = _state(model)
        for name, value in self.kept.items():
            state[name].copy_(value)

    @property
    def verdict(self) -> str:
        """When it was best, in words."""
        return f"was best at step {self.best_step} ({self.best:.4g})"

    @property
    def should_stop(self) -> bool:
        return 0 < self.patience <= self.waited

    def to_state(self) -> dict[str, float | int | None]:
        """JSON-able state for a snapshot."""
        best = None if self.best == float("inf") else self.best
        return {"best": best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: Mapping[str, float | int | None], kept: Mapping[str, torch.Tensor]) -> None:
        """Take back what :meth:`to_state` gave, and :attr:`kept`."""
        best = state["best"]
        self.best = float("inf") if best is None else float(best)
        self.best_step, self.waited = int(state["best_step"] or 0), int(state["waited"] or 0)
        self.kept = dict(kept)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: weights with a gradient, and persistent buffers. Their names do not meet."""
    trained: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return trained | persistent_buffers(model)
