"""The moving average of the weights: as torch computes it, alike on all members, kept over a stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from memory_exchange import RoomExchange, together
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy_task import ToyTask, toy_plan

from training.exchange.base import SoloExchange
from training.loop.trainer import Trainer
from training.optimization.weight_average import WeightAverage
from training.records.events import EvaluationEvent, Event
from training.records.plan import RunPlan
from training.run.orders import Command, Control


def walk(model: nn.Module, average: WeightAverage, seed: int, steps: int = 5) -> AveragedModel:
    """Move the weights at random; return torch's average of them."""
    generator = torch.Generator().manual_seed(seed)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(steps):
        with torch.no_grad():
            for weights in model.parameters():
                weights.add_(torch.randn(weights.shape, generator=generator))
        average.update()
        theirs.update_parameters(model)
    return theirs


def test_it_is_the_average_of_torch_and_the_weights_come_back() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    theirs, last = walk(model, average, 1), model.weight.detach().clone()
    with average.in_use(cast(Any, None), SoloExchange(), "x"):
        assert torch.equal(model.weight, theirs.module.weight) and not torch.equal(model.weight, last)
    assert torch.equal(model.weight, last)


@pytest.mark.parametrize("equal", ["always", "never"])
def test_members_hold_the_same_average(equal: str) -> None:
    """Those that differ hold the mean, as the average of the mean weights would be."""

    def held(exchange: RoomExchange) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.5)
        average = WeightAverage(model, 0.9)
        theirs = walk(model, average, 1 if equal == "always" else exchange.rank)
        with average.in_use(cast(Any, SimpleNamespace(equal=equal)), exchange, "ema/5"):
            return model.weight.detach().clone(), theirs.module.weight.detach()

    found, _ = together(2, held)
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][0], (found[0][1] + found[1][1]) / 2)


def train(plan: RunPlan, folder: Path, stop_at: int = 0) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Return the saved weights and the losses of the evaluations."""
    events: list[Event] = []
    control, task = Control(), ToyTask()
    if stop_at:
        control.post(Command(command="stop", at_step=stop_at))
    task.prepare(lambda *_: None)
    Trainer(plan, 0, task, SoloExchange(), events.append, control, folder).run()
    saved = folder / "model" / "weights.pt"
    weights = torch.load(saved) if saved.exists() else {}
    return weights, [event.loss for event in events if isinstance(event, EvaluationEvent)]


def test_a_resumed_run_saves_and_evaluates_the_same_average(tmp_path: Path) -> None:
    options: dict[str, Any] = {"training": {"ema": 0.9}, "evaluation": {"eval_interval": 4}}
    whole, losses = train(toy_plan(**options), tmp_path / "a")
    train(toy_plan(**options), tmp_path / "b", stop_at=5)
    again, rest = train(toy_plan(**options, resume=True), tmp_path / "b")
    assert all(torch.equal(again[name], whole[name]) for name in whole) and rest == losses[1:]
    plain, without = train(toy_plan(evaluation=options["evaluation"]), tmp_path / "c")
    assert not torch.equal(plain["0.weight"], whole["0.weight"]) and without != losses
    options["training"] |= {"ema_evaluated": False}
    saved, last = train(toy_plan(**options), tmp_path / "d")
    assert torch.equal(saved["0.weight"], whole["0.weight"]), "it is saved all the same"
    assert last == [*without[:-1], losses[-1]], "and the last evaluation is of what is saved"


def test_an_early_stop_saves_the_best_that_was_evaluated(tmp_path: Path) -> None:
    training = {"max_steps": 200, "learning_rate": 1.0, "max_grad_norm": 0, "lr_schedule": "constant", "ema": 0.5}
    evaluation = {"eval_interval": 2, "early_stopping_patience": 3}
    _, losses = train(toy_plan(training=training, evaluation=evaluation), tmp_path)
    assert losses[-1] == pytest.approx(min(loss for loss in losses if loss is not None))
