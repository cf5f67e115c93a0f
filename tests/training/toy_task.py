"""A small regression task whose every number follows from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from profiles.optimisation import EvaluationSettings, SnapshotSettings, TrainingSettings
from profiles.run_settings import RunSettings
from profiles.schema import Profile
from tests.strategies.settings import strategy_settings
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run
from training.tasks.base import Batch, Progress, Task


class ToyTask(Task):
    name = "toy"
    start_seed = 42

    def __init__(self, samples: int = 48, poison: int | None = None, dropout: float = 0.0) -> None:
        self._samples = samples
        self._poison = poison
        self._dropout = dropout
        self.saved_to: Path | None = None
        self.seen: list[int] = []

    def prepare(self, progress: Progress) -> None:
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(self._samples, 6, generator=generator)
        targets = torch.sin(inputs.sum(1, keepdim=True))
        if self._poison is not None:
            targets[self._poison] = float("nan")
        self.train = [(i, inputs[i], targets[i]) for i in range(self._samples)]
        self.evaluation = {"validation": self.train[:10] if self._poison is None else self.train[:0]}
        progress("data", self._samples, self._samples)

    def build_model(self) -> nn.Module:
        # A generator of its own: members that are threads of one process share torch's.
        generator = torch.Generator().manual_seed(self.start_seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(self._dropout), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        return model

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        if rngs is not None:
            self.seen += [index for index, _, _ in samples]
        return {"x": torch.stack([x for _, x, _ in samples]), "y": torch.stack([y for _, _, y in samples])}

    def weight(self, batch: Batch) -> float:
        return float(len(batch["x"]))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def save(self, model: nn.Module, directory: Path) -> None:
        torch.save(dict(model.state_dict()), directory / "weights.pt")
        self.saved_to = directory


Change = Callable[[Profile], Profile]


def toy_plan(
    workers: int = 1,
    training: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    snapshot: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    resume: bool = False,
) -> RunPlan:
    """A plan of 12 steps of 4 samples a worker in fp32 unless said otherwise."""
    profile = Profile(
        name="toy",
        training=TrainingSettings(
            **{"max_steps": 12, "batch_size": 4, "learning_rate": 0.01, "warmup_steps": 0, "lr_scaling": "off"}
            | {"mixed_precision": "off"}
            | (training or {})
        ),
        evaluation=EvaluationSettings(**{"eval_interval": 0, "eval_before": False} | (evaluation or {})),
        snapshot=SnapshotSettings(**{"snapshot_interval": 0} | (snapshot or {})),
        strategy=strategy_settings(**{"strategy": "allreduce"} | (strategy or {})),
        run=RunSettings(**(run or {})),
    )
    return plan_local_run(profile, workers).model_copy(update={"resume": resume})
