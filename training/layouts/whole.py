"""The layout of a member with one device, which holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from profiles.schema import Profile
from training.exchange.base import Traffic
from training.hardware.device import Precision
from training.layouts.base import Layout, StepBackward
from training.model.model_building import prepare_model
from training.model.saved_model import save_copy, save_model
from training.optimization.backward import Backward
from training.strategies.weights import trainable
from training.tasks.base import Answer, Batch, Task
from training.tasks.outputs.showcase import SampleOutput


class WholeModel(Layout):
    """One device holds everything."""

    names = ("this machine",)

    def __init__(self) -> None:
        self.traffic = Traffic()

    def build(self, task: Task, profile: Profile, precision: Precision) -> nn.Module:
        self._task, self._profile, self._precision = task, profile, precision
        self.model = prepare_model(task.build_model(), profile.model, precision)
        return self.model

    def backward(self, release: Callable[[], None], total_steps: int) -> StepBackward:
        compiling = self._profile.training.compile
        return Backward(self._task, self.model, self._precision, release, compiling, total_steps)

    def trained_weights(self) -> int:
        return sum(parameter.numel() for parameter in trainable(self.model))

    def norm(self) -> float | None:
        return None

    def answer(self, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        return self._task.answer(self.model, batch, generate)

    def sample_output(self, batch: Batch) -> SampleOutput:
        return self._task.sample_output(self.model, batch)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def save(self, run_dir: Path) -> None:
        save_model(self._task, self.model, run_dir)

    def save_copy(self, run_dir: Path) -> str:
        return save_copy(self._task, self.model, run_dir)

    def close(self) -> None:
        pass
