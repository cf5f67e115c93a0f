"""Samples that cannot be read: named, left out, and too many of them end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_exchange import together
from test_trainer import losses, steps, train
from toy_task import ToyTask, toy_plan

from profiles.errors import RunFailed
from profiles.schema import DataSettings
from tests.strategies.settings import strategy_settings
from training.data.batches import Samples
from training.loop.trainer import Trainer
from training.records.events import EvaluationEvent, Event, WarningEvent
from training.records.plan import RunPlan
from training.run.orders import Control


class Damaged:
    """A list of samples, some of which cannot be read."""

    def __init__(self, samples: list[Any], broken: set[int]) -> None:
        self._samples, self._broken = samples, broken

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> Any:
        if index in self._broken:
            raise OSError(f"clip-{index}.flac is no sound file")
        return self._samples[index]


class DamagedTask(ToyTask):
    def __init__(self, *broken: int, samples: int = 48) -> None:
        super().__init__(samples)
        self._broken = set(broken)

    def prepare(self, progress: Any) -> None:
        super().prepare(progress)
        self.train = Damaged(self.train, self._broken)  # a list in ToyTask
        self.evaluation = {"validation": Damaged(self.evaluation["validation"], self._broken)}


def allowing(share: float, workers: int = 1, **training: Any) -> RunPlan:
    plan = toy_plan(workers, training={"max_steps": 0, "epochs": 2, **training})
    data = DataSettings(max_broken_share=share)
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"data": data})})


def warnings(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, WarningEvent)]


def test_bad_samples_are_named_once_and_left_out(tmp_path: Path) -> None:
    task = DamagedTask(3, 17)
    _, events = train(allowing(0.1), tmp_path, task)
    assert sorted(task.seen) == sorted(2 * [index for index in range(48) if index not in (3, 17)])
    assert sum(event.samples for event in steps(events)) == 92
    said = sorted(message for message in warnings(events) if "of train" in message)
    assert [message.partition(":")[0] for message in said] == [
        "sample 17 of train cannot be read and is left out",
        "sample 3 of train cannot be read and is left out",
    ]
    assert "OSError: clip-17.flac is no sound file (test_broken_samples.py, line" in said[0]
    assert [event.samples for event in events if isinstance(event, EvaluationEvent)] == [9]


def test_too_many_end_the_run_with_their_number_and_names(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"worker-0: 2 of 48 samples of train cannot be read, more than 2.5 %") as it:
        train(allowing(0.025), tmp_path, DamagedTask(3, 17))
    assert "3" in it.value.message and "17" in it.value.message and "max_broken_share" in it.value.hint


def test_too_many_are_told_also_where_they_were_read_in_vain_before() -> None:
    task = DamagedTask(3, 17)
    task.prepare(lambda *_: None)
    samples = Samples(task, 1, max_broken_share=0.025)
    for _ in range(2):
        with pytest.raises(RunFailed, match="2 of 48 samples"):
            samples.training_batch([3, 4, 17], 0)


@pytest.mark.parametrize("strategy", ["allreduce", "diloco"])
def test_members_go_on_together_where_one_has_nothing_left_of_a_step(tmp_path: Path, strategy: str) -> None:
    plan = allowing(1.0, 2, batch_size=1)
    profile = plan.profile
    way = strategy_settings(strategy=strategy, sync_interval=2, codec="fp32")
    plan = plan.model_copy(update={"profile": profile.model_copy(update={"strategy": way})})

    def start(exchange: Any) -> Any:
        task, events = DamagedTask(1, 2, 3, 5, samples=8), list[Event]()
        task.prepare(lambda *_: None)
        trainer = Trainer(plan, exchange.rank, task, exchange, events.append, Control(), tmp_path)
        trainer.run()
        return torch.cat([p.detach().reshape(-1) for p in trainer.parameters]), events

    found, _ = together(2, start)
    assert torch.equal(found[0][0], found[1][0])
    taken = [[event.samples for event in steps(events)] for _, events in found.values()]
    assert 0 in taken[0] + taken[1] and sum(map(sum, taken)) == 8  # two epochs of four good ones


@pytest.mark.slow
def test_a_good_run_loses_nothing(tmp_path: Path) -> None:
    _, plain = train(allowing(0.0), tmp_path / "a")
    _, guarded = train(allowing(0.5), tmp_path / "b", DamagedTask())
    assert losses(plain) == losses(guarded)
