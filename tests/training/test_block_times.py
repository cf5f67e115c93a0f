"""A model is measured block by block where no machine could hold the whole of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from profiles.files.resolve import profile_from_options
from tests.layouts.families import architecture, batch, loss, shallow
from training.layouts.stages.bounds import kinds_of_blocks
from training.run.local_plan import plan_local_run
from training.tasks.base import Task
from training.trial import block_times as measuring
from training.trial import short_run
from training.trial.block_times import block_times


class FamilyTask:
    """Trains a tiny model of a family, of which no more than one block is ever made."""

    uses_global_rng, bf16_is_faster, evaluation, evaluation_sizes = False, False, dict[str, Any](), dict[str, int]()
    name = "family"

    def __init__(self, family: str, blocks: int = 8) -> None:
        self.config, self.train = shallow(family, blocks), range(8)
        self.held: list[int] = []

    def prepare_subset(self, progress: Any, limit: int) -> int:
        return len(self.train)

    def build_stage(self, stages: Any) -> nn.Module:
        stage: nn.Module = stages.reader(architecture(self.config), self.config).from_config(self.config)
        self.held.append(sum(parameter.numel() for parameter in stage.parameters()))
        return stage

    def collate(self, samples: Any, rngs: Any) -> Any:
        return batch(self.config, 0, len(samples), 12)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LEAST_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("blocks", "encoder", "expected"),
    [
        (6, 0, (0, 1, 1, 1, 1, 5)),
        (2, 0, (0, 1)),
        (8, 4, (0, 1, 1, 3, 4, 5, 5, 7)),
        (3, 1, (0, 1, 2)),
    ],
)
def test_blocks_that_are_alike_are_measured_once(blocks: int, encoder: int, expected: tuple[int, ...]) -> None:
    assert kinds_of_blocks(blocks, encoder) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("family", "blocks"), [("llama-tied", 8), ("whisper", 4)])
def test_every_block_has_a_time_and_all_parameters_are_counted_once(family: str, blocks: int) -> None:
    task: Any = FamilyTask(family, blocks)
    profile = profile_from_options("p", {"batch_size": 4, "mixed_precision": "off"})
    times = block_times(task, profile, torch.device("cpu"))
    whole = architecture(task.config)(task.config)
    assert len(times.seconds) == blocks and min(times.seconds) > 0
    assert times.total == sum(parameter.numel() for parameter in whole.parameters())
    assert max(task.held) < times.total / 2


@pytest.mark.slow
def test_the_short_run_of_a_divided_model_tells_of_its_blocks() -> None:
    task, told = FamilyTask("llama"), list[dict[str, Any]]()
    options = {"batch_size": 4, "device": "cpu", "threads": torch.get_num_threads(), "mixed_precision": "off"}
    plan = plan_local_run(profile_from_options("p", options), 1)
    run = plan.profile.run.model_copy(update={"layout": "pipeline"})
    plan = plan.model_copy(update={"profile": plan.profile.model_copy(update={"run": run})})

    def task_of(_: Any) -> Task:
        named: Any = task
        return named

    short_run.carry_out(plan, told.append, task_of=task_of)
    figures = {report["kind"]: report for report in told}
    assert len(figures["blocks"]["seconds"]) == figures["workload"]["layers"] == 8
    assert "measurement" not in figures and figures["workload"]["samples"] == 8
    assert SimpleNamespace(**figures["facts"]).memory_total > 0
