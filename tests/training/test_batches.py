"""Batches made ahead: the same as made on demand, and never two at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from toy_task import ToyTask

from training.data.batches import BatchSource, Samples
from training.data.sample_order import Cursor, SampleSchedule
from training.hardware.device import pin
from training.tasks.base import Batch


class _OneAtATime(ToyTask):
    """Notices when two batches are made at once; the first one made ahead takes until it is let go."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.busy = threading.Lock()
        self.overlaps = 0
        self.made = 0
        self.ahead, self.go_on = threading.Event(), threading.Event()

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        if not self.busy.acquire(blocking=False):
            self.overlaps += 1
            return super().collate(samples, rngs)
        try:
            self.made += 1
            if self.made == 2:
                self.ahead.set()
                self.go_on.wait(60)
            return super().collate(samples, rngs)
        finally:
            self.busy.release()


def test_what_was_made_ahead_in_vain_does_not_disturb_what_is_wanted() -> None:
    task = _OneAtATime(16)
    task.prepare(lambda *_: None)
    source = BatchSource(task, SampleSchedule(16, 0, 1), 0, Samples(task, 0))
    first = source.take(Cursor(0, 0), {0: 8, 1: 4}, remaining_steps=0)
    source.begin(first.cursor, {0: 8, 1: 4}, 0, 0)
    with source.turns.lent():
        assert task.ahead.wait(60)
        threading.Timer(0.1, task.go_on.set).start()
        # Member 1 is lost: the next step is another one than that which is being made, at the end of the epoch at that.
        second = source.take(first.cursor, {0: 8}, remaining_steps=0)
    source.close()
    order = SampleSchedule(16, 0, 1).step(Cursor(0, 12), {0: 8}, 0)[0]
    assert second.indices == order
    assert second.cursor == Cursor(1, 0)
    assert task.overlaps == 0


class _Pair(NamedTuple):
    first: torch.Tensor
    second: list[Any]


class _Movable:
    """What moves to a device by itself."""

    def to(self, device: torch.device) -> _Movable:
        return self


class _SomeWeighNothing(ToyTask):
    """As texts of which no word is to be learnt: their loss is a mean over nothing."""

    def weight(self, batch: Batch) -> float:
        return float((batch["x"][:, 0] > 0).sum())


def test_a_micro_batch_without_weight_takes_no_part_in_a_step() -> None:
    task = _SomeWeighNothing(8)
    task.prepare(lambda *_: None)
    source = BatchSource(task, SampleSchedule(8, 0, 1), 0, Samples(task, 0))
    batches = source.take(Cursor(0, 0), {0: 8}, remaining_steps=0, max_micro_batch=1)
    source.close()
    heavy = {index for index, inputs, _ in task.train if inputs[0] > 0}
    assert 0 < len(heavy) < 8 and {index for (index,) in batches.indices} == heavy
    assert batches.weights == [1.0] * len(heavy) and len(batches.micro_batches) == len(heavy)
    assert batches.samples == 8


def test_every_tensor_of_a_batch_is_pinned_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    movable = _Movable()
    batch = {"x": torch.zeros(2), "pair": _Pair(torch.zeros(1), [torch.zeros(()), "text", 3]), "own": movable}
    found = pin(batch)
    assert found["x"].tolist() == [1, 1] and found["own"] is movable
    assert isinstance(found["pair"], _Pair) and found["pair"].first.tolist() == [1]
    assert [str(one) for one in found["pair"].second] == ["tensor(1.)", "text", "3"]


def test_where_no_more_can_be_pinned_a_batch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", none_left)
    batch = [torch.zeros(2)]
    assert pin(batch)[0] is batch[0]
