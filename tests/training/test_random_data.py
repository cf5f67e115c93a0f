"""Data sets that draw from the generators everybody shares: reproducible, and resumed exactly."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import losses, train
from toy_task import ToyTask, toy_plan

from training.data.batches import BatchSource, Samples
from training.data.sample_order import Cursor, SampleSchedule
from training.numerics import randomness
from training.numerics.randomness import Closed, Turns
from training.run.orders import Command, Control


class _Augmented:
    """Adds noise from all three generators, as augmentation in ``__getitem__`` does."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> Any:
        number, x, y = self._samples[index]
        return number, x + 0.1 * torch.randn(x.shape) + 0.1 * float(np.random.randn()), y + 0.1 * random.random()


class RandomTask(ToyTask):
    """Its data are random, and so is its model."""

    def prepare(self, progress: Any) -> None:
        super().prepare(progress)
        self.train = _Augmented(self.train)  # a list in ToyTask
        self.evaluation = {"validation": _Augmented(self.evaluation["validation"])}


OPTIONS: dict[str, Any] = {"training": {"max_steps": 24}, "evaluation": {"eval_interval": 7}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing interrupts."""
    return losses(train(toy_plan(**OPTIONS), tmp_path_factory.mktemp("whole"), RandomTask(dropout=0.3))[1])


@pytest.mark.slow
@pytest.mark.parametrize("state", [0, 1])
def test_random_data_and_dropout_give_the_same_losses_whatever_was_drawn_before(
    whole: list[float], tmp_path: Path, state: int
) -> None:
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)
    _, second = train(toy_plan(**OPTIONS), tmp_path, RandomTask(dropout=0.3))
    assert losses(second) == whole


@pytest.mark.parametrize("stop_at", [10, 17])
def test_a_resumed_run_on_random_data_is_exact(whole: list[float], tmp_path: Path, stop_at: int) -> None:
    control = Control()
    control.post(Command(command="stop", at_step=stop_at))
    _, first = train(toy_plan(**OPTIONS), tmp_path, RandomTask(dropout=0.3), control)
    _, rest = train(toy_plan(**OPTIONS, resume=True), tmp_path, RandomTask(dropout=0.3))
    assert losses(first) + losses(rest) == whole


def batches_of(group: dict[int, int], steps: int) -> torch.Tensor:
    """What a group trains on, in the order of the epoch."""
    parts = []
    for rank in group:
        task = RandomTask(16)
        task.prepare(lambda *_: None)
        source = BatchSource(task, SampleSchedule(16, 3, 1), rank, Samples(task, 3))
        cursor, mine = Cursor(), []
        for _ in range(steps):
            step = source.take(cursor, group, remaining_steps=True)
            cursor = step.cursor
            mine.append(torch.cat([batch["x"] for batch in step.micro_batches]))
        source.close()
        parts.append(mine)
    return torch.cat([rows for step in zip(*parts, strict=True) for rows in step])


def test_a_sample_is_augmented_alike_however_the_work_is_shared() -> None:
    alone = batches_of({0: 8}, 4)  # two epochs
    assert torch.equal(alone, batches_of({0: 4, 1: 4}, 4))
    assert torch.equal(alone, batches_of({0: 5, 1: 2, 2: 1}, 4))
    assert not torch.equal(alone[:16].sort(0).values, alone[16:].sort(0).values)  # another epoch, other noise


def test_making_batches_leaves_everybodys_generators_as_they_were() -> None:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    batches_of({0: 8}, 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_the_loader_works_only_while_the_trainer_lends_it_the_turn() -> None:
    turns, worked = Turns(), threading.Event()

    def load() -> None:
        with turns.taken():
            worked.set()

    thread = threading.Thread(target=load)
    thread.start()
    assert not worked.wait(0.05)
    with turns.lent():
        assert worked.wait(60)
    thread.join(60)
    turns.close()
    with pytest.raises(Closed), turns.taken():
        pass


def test_the_time_in_which_the_trainer_waits_for_its_turn_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, held, go = Turns(), threading.Event(), threading.Event()

    def clock() -> float:
        before, _ = go.is_set(), go.set()
        return 10.0 if before else 0.0

    def load() -> None:
        with turns.taken():
            held.set()
            go.wait(60)

    thread = threading.Thread(target=load)
    thread.start()
    with turns.lent():
        assert held.wait(60)
        monkeypatch.setattr(randomness.time, "monotonic", clock)
    assert turns.waited >= 10.0
    thread.join(60)
