"""The learning rate of each step, by the options or by a schedule of the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from muster import LocalTrainer
from profiles.errors import BadInput
from profiles.optimisation import TrainingSettings
from training.optimization.learning_rates import LearningRates
from training.records.events import Event, StepEvent

SETTINGS = TrainingSettings(lr_schedule="linear", warmup_steps=2)


def rates(scheduler: Callable[..., Any] | None) -> list[float]:
    chosen = LearningRates(SETTINGS, 6, 0.1, scheduler)
    return [chosen.at(step) for step in range(6)]


def halves(step: int, total_steps: int) -> float:
    return 1.0 if step < total_steps // 2 else 0.5


def quarters(step: int, total_steps: int) -> np.float32:
    return np.float32(0.25)


def one_cycle(opt: torch.optim.Optimizer, total_steps: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(opt, 0.3, total_steps=total_steps)


def test_a_scheduler_may_ask_for_the_steps_of_the_run_and_numbers_may_be_numpys() -> None:
    assert rates(one_cycle) == rates(lambda optimizer: one_cycle(optimizer, 6))
    assert rates(quarters) == pytest.approx([0.025] * 6)


def test_without_one_the_options_decide() -> None:
    assert rates(None) == pytest.approx([0.05, 0.1, 0.1, 0.075, 0.05, 0.025])


def test_a_function_of_the_step_gives_the_share_of_the_peak() -> None:
    assert rates(halves) == pytest.approx([0.1] * 3 + [0.05] * 3)


@pytest.mark.parametrize(
    "scheduler",
    [
        functools.partial(lr_scheduler.StepLR, step_size=2),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
    ids=["partial", "one cycle", "lambda"],
)
def test_a_scheduler_of_torch_gives_the_rates_that_it_gives_in_a_loop(scheduler: Callable[..., Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    loop, expected = scheduler(optimizer), []
    for _ in range(6):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        loop.step()
    assert rates(scheduler) == expected
    resumed = LearningRates(SETTINGS, 6, 0.1, scheduler)
    assert resumed.at(4) == expected[4] and resumed.at(1) == expected[1]


@pytest.mark.parametrize(
    ("scheduler", "problem"),
    [
        (lr_scheduler.CosineAnnealingWarmRestarts, "CosineAnnealingWarmRestarts: .*T_0"),
        (lr_scheduler.ReduceLROnPlateau, "follows a figure of the training"),
        (lambda step: 0.5, "returned float, not a scheduler"),
        (lambda step, total_steps: -1.0, "gave -1.0 in step 1"),
        (lambda step, total_steps: float("nan"), "gave nan in step 1"),
        (lambda step, total_steps: np.ones(2), "gave .1. 1.. in step 1"),
        (lambda step, total_steps: "0.5", "gave 0.5 in step 1"),
        (lambda step, total_steps: 1 / (2 - step), "fails in step 3 of 6: ZeroDivisionError"),
        (lambda optimizer: one_cycle(optimizer, 3), "fails in step 4 of 6: ValueError: .*total steps is 3"),
    ],
)
def test_what_gives_no_rate_is_refused(scheduler: Callable[..., Any], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        rates(scheduler)


def test_fit_follows_it_and_refuses_the_options_that_it_stands_in_for(tmp_path: Path) -> None:
    events: list[Event] = []
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    settings: dict[str, Any] = {"loss": nn.functional.mse_loss, "lr_scheduler": halves, "output_dir": tmp_path}
    trainer = LocalTrainer(nn.Linear(2, 1), data, simulate=2, on_event=events.append, **settings)
    with pytest.raises(BadInput, match="lr_scheduler stands in for warmup_steps"):
        trainer.fit(warmup_steps=3)
    trainer.fit("allreduce", max_steps=4, batch_size=2, learning_rate=0.1, lr_scaling="off")
    steps = {event.step: event.learning_rate for event in events if isinstance(event, StepEvent)}
    assert steps == {1: 0.1, 2: 0.1, 3: 0.05, 4: 0.05}
