"""A run keeps a few held-out samples as its model makes of them before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from profiles.optimisation import EvaluationSettings
from tests.training.memory_exchange import RoomExchange, together
from tests.training.toy_task import ToyTask
from training.data.batches import Samples
from training.exchange.base import Exchange, SoloExchange
from training.hardware.device import Precision
from training.loop.evaluation import Evaluator
from training.loop.showcase_sampling import ShowcaseSampler
from training.tasks.base import Batch
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, SampleOutput, Showcase, read_showcase

CPU = torch.device("cpu")


def evaluated(
    folder: Path, steps: tuple[int, ...], task: ToyTask | None = None, member: Exchange | None = None, **settings: Any
) -> list[str]:
    """Evaluate after these steps, between which the model becomes another one; return the warnings."""
    task, warnings = task or ToyTask(), list[str]()
    task.prepare(lambda *_: None)
    samples, model = Samples(task, 0, CPU, 0.0, "here"), task.build_model()
    exchange, how = member or SoloExchange(), EvaluationSettings(**settings)
    evaluator = Evaluator(samples, model, Precision(None, CPU), exchange, how, 4, warn=warnings.append, run_dir=folder)
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 if step == 0 else 0.5)
        evaluator.evaluate("validation", step, dict.fromkeys(exchange.members, 4))
    return warnings


def kept(folder: Path) -> Showcase | None:
    return read_showcase(folder / FOLDER / NAME)


def test_the_best_and_the_worst_item_by_loss(tmp_path: Path) -> None:
    assert evaluated(tmp_path, (0,)) == [] and kept(tmp_path) is None
    assert evaluated(tmp_path, (7,)) == []  # resumed: what was before is that of the first start
    found = kept(tmp_path)
    assert found is not None and (found.kind, found.split, found.step, found.of) == ("items", "validation", 7, 10)
    assert [one.why for one in found.samples] == ["best", "middle", "worst"]
    losses = [one.last for one in found.samples]
    assert losses == sorted(losses, key=lambda loss: loss or 0.0)
    assert all(one.first is not None and one.first != one.last for one in found.samples)


def test_only_the_member_that_evaluates_first_does_it(tmp_path: Path) -> None:
    class Counting(ToyTask):
        asked = 0

        def sample_output(self, model: nn.Module, batch: Batch) -> SampleOutput:
            self.asked += 1
            return super().sample_output(model, batch)

    tasks = [Counting() for _ in range(2)]

    def body(member: RoomExchange) -> list[str]:
        return evaluated(tmp_path / str(member.rank), (0, 7), tasks[member.rank], member)

    assert together(2, body)[0] == {0: [], 1: []}
    assert [task.asked for task in tasks] == [20, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_it_is_off_by_an_option_and_without_an_evaluation_before(tmp_path: Path) -> None:
    evaluated(tmp_path, (0, 7), eval_showcase=False)
    assert not (tmp_path / FOLDER).exists()
    assert evaluated(tmp_path, (7,)) == [] and kept(tmp_path) is None


def test_what_the_users_own_code_raises_is_said_once_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken(ToyTask):
        def sample_output(self, model: nn.Module, batch: Batch) -> SampleOutput:
            raise KeyError("loss")

    (warning,) = evaluated(tmp_path, (0, 7), Broken())
    assert warning.startswith("no samples are shown before and after training: KeyError: 'loss'")


def test_no_more_is_looked_at_than_there_is_time_for(tmp_path: Path) -> None:
    task = ToyTask()
    task.prepare(lambda *_: None)
    samples, model = Samples(task, 0, CPU, 0.0, "here"), task.build_model()
    showing = ShowcaseSampler(
        samples, model, Precision(None, CPU), tmp_path / FOLDER, lambda: False, pytest.fail, seconds=-1.0
    )
    for step in (0, 7):
        showing.items("validation", step)
    found = kept(tmp_path)
    assert found is not None and [one.why for one in found.samples] == ["the only one"]
