"""Evaluation shared over the members, and early stopping on its result."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from profiles.schema import EvaluationSettings
from training.batches import move
from training.data import evaluation_slice
from training.events import EvaluationEvent
from training.exchange.base import Exchange
from training.precision import Precision
from training.tasks.base import Task


class Evaluator:
    """Every member evaluates its share of a split; sums are gathered, so all see the same metrics."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        exchange: Exchange,
        settings: EvaluationSettings,
        batch_size: int,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._task = task
        self._model = model
        self._exchange = exchange
        self._settings = settings
        self._batch_size = settings.eval_batch_size or batch_size
        self._precision = precision
        self._device = device

    def evaluate(self, split: str, step: int, members: tuple[int, ...]) -> EvaluationEvent:
        """Evaluate ``split`` with the weights the model holds."""
        start = time.monotonic()
        data = self._task.evaluation[split]
        mine = self._sums(split, evaluation_slice(len(data), members, self._exchange.rank))
        gathered = self._exchange.gather(f"eval/{split}/{step}", json.dumps(mine).encode())
        sums = add_sums(json.loads(gathered[rank]) for rank in sorted(gathered))
        samples = int(sums.pop("samples", 0))
        metrics = self._task.metrics(sums)
        return EvaluationEvent(
            step=step,
            split=split,
            loss=metrics.get("loss"),
            metrics=metrics,
            samples=samples,
            seconds=time.monotonic() - start,
        )

    @torch.no_grad()
    def _sums(self, split: str, indices: range) -> dict[str, float]:
        data = self._task.evaluation[split]
        training = self._model.training
        self._model.eval()
        totals: list[dict[str, float]] = []
        try:
            for start in range(indices.start, indices.stop, self._batch_size):
                part = range(start, min(start + self._batch_size, indices.stop))
                batch = move(self._task.collate([data[i] for i in part], None), self._device)
                with self._precision.autocast():
                    sums = self._task.evaluate(self._model, batch, self._settings.eval_generate)
                totals.append({**sums, "samples": float(len(part))})
        finally:
            self._model.train(training)
        return add_sums(totals)


def add_sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add dictionaries of sums key by key."""
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


@dataclass
class EarlyStopping:
    """Stops after ``patience`` evaluations in a row without a better result; smaller is better."""

    patience: int
    min_delta: float
    best: float = float("inf")
    best_step: int = -1
    waited: int = 0

    def update(self, value: float, step: int) -> bool:
        """Note a result; return whether it is the best so far."""
        if value < self.best - self.min_delta:
            self.best, self.best_step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    @property
    def should_stop(self) -> bool:
        return 0 < self.patience <= self.waited

    def to_state(self) -> dict[str, float | int | None]:
        """JSON-able state for a snapshot."""
        best = None if self.best == float("inf") else self.best
        return {"best": best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: Mapping[str, float | int | None]) -> None:
        best = state["best"]
        self.best = float("inf") if best is None else float(best)
        self.best_step, self.waited = int(state["best_step"] or 0), int(state["waited"] or 0)
