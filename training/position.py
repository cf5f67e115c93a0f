"""Where a run stands: the same on every member, part of every snapshot and of every newcomer's anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from training.data import Cursor
from training.early_stopping import EarlyStopping
from training.named_tensors import part, prefixed

_BEST = "best"
MOST_CUT_SHORT = 3
"""Evaluations in a row that members may cut short: who says so stops before its next step, unless it lies."""


@dataclass
class Position:
    """Steps done, place in the data, and what the evaluations said so far."""

    stopping: EarlyStopping
    step: int = 0
    """Optimizer steps done."""
    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    next_evaluation: int = 0
    cut_short: int = 0
    """Evaluations in a row that had no outcome, because a member said that it stops."""
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """Micro-batch of every live member by rank."""

    def state(self) -> dict[str, Any]:
        """JSON-able part for a snapshot."""
        return {
            "step": self.step,
            "cursor": self.cursor.to_dict(),
            "next_evaluation": self.next_evaluation,
            "cut_short": self.cut_short,
            "stopping": self.stopping.to_state(),
            "live": list(self.batch_sizes),
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensor part for a snapshot."""
        return prefixed(_BEST, self.stopping.kept)

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take back what :meth:`state` and :meth:`tensors` gave; ``batch_sizes`` holds all that may be live."""
        self.step = int(state["step"])
        self.cursor = Cursor.from_dict(state["cursor"])
        self.next_evaluation, self.cut_short = int(state["next_evaluation"]), int(state.get("cut_short", 0))
        self.stopping.load(state["stopping"], part(_BEST, tensors))
        self.batch_sizes = {rank: self.batch_sizes[rank] for rank in state["live"] if rank in self.batch_sizes}
