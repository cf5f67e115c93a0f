"""What a lost member had in hand goes back: every sample of an epoch counts once, whoever is lost and comes back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from group import Serve, run_group
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import ExitCode
from training.data.partitions import Schedule, SplitSchedule
from training.data.sample_order import Cursor, SampleRange, SampleSchedule
from training.loop.position import EarlyStopping, Position
from training.run.orders import Command, Control
from training.tasks.base import Batch

PLANNED = {0: 2, 1: 3, 2: 1}


class Group:
    """Members that train in rounds of some steps; what a round holds counts when it ends."""

    def __init__(self, schedule: Schedule, delay: int = 0) -> None:
        self.schedule, self.delay = schedule, delay
        self.live, self.in_hand = set(PLANNED), list[tuple[int, set[int], list[tuple[int, int]]]]()
        self.counted = Counter[tuple[int, int]]()
        """How often samples count, by epoch and index."""
        self.position = self.member()
        self.position.begin(0)

    def member(self, state: Any = None, absent: tuple[int, ...] = ()) -> Position:
        position = Position(EarlyStopping(0, 0.0), batch_sizes=dict(PLANNED), schedule=self.schedule)
        if state is not None:
            position.load(json.loads(json.dumps(state)), {}, absent)
        return position

    def step(self) -> None:
        """Everybody takes its samples, also a member that is lost before the round ends."""
        position, sizes = self.position, self.position.batch_sizes
        begin = self.schedule.start(position.cursor, sizes)
        for rank in sizes.keys() & self.live:
            batches, _ = self.schedule.step(begin, sizes, rank)
            epoch = self.schedule.epoch_of(begin, rank)
            self.in_hand.append((position.step, rank, [(epoch, index) for batch in batches for index in batch]))
        position.step, position.cursor = position.step + 1, self.schedule.step(begin, sizes, min(sizes))[1]

    def lose(self, rank: int) -> None:
        if self.live - {rank}:
            self.live.discard(rank)
            self.in_hand = [entry for entry in self.in_hand if entry[1] != rank]

    def end_round(self) -> None:
        unsent = self.delay
        for step, _, samples in self.in_hand:
            if step < self.position.step - unsent:
                self.counted.update(samples)
        self.in_hand = [entry for entry in self.in_hand if entry[0] >= self.position.step - unsent]
        self.position.follow({rank: PLANNED[rank] for rank in self.live}, unsent)

    def resume(self, rank: int) -> None:
        """Go on from a snapshot, in mid-round too, without a member."""
        absent = (rank,) if self.live - {rank} else ()
        self.lose(rank)
        self.position = self.member(self.position.state(), absent)
        self.position.begin(1)


histories = st.lists(
    st.tuples(st.sampled_from(["lose", "return", "resume", "none"]), st.integers(0, 2), st.booleans()), max_size=25
)


@pytest.mark.slow
@given(st.integers(10, 80), st.integers(1, 2), st.integers(1, 4), histories)
def test_every_sample_of_an_epoch_counts_once(
    n: int, accumulation: int, interval: int, history: list[tuple[str, int, bool]]
) -> None:
    group = Group(SampleSchedule(n, 7, accumulation))

    def train(event: str = "none", rank: int = 0, in_round: bool = False) -> None:
        happened = {"lose": group.lose, "resume": group.resume, "return": group.live.add, "none": lambda rank: None}
        if not in_round:
            happened[event](rank)
        for number in range(interval):
            group.step()
            if in_round and number == interval // 2 and event != "return":  # who comes back meets the others first
                happened[event](rank)
        group.end_round()

    for entry in history:
        train(*entry)
    epoch = group.position.cursor.epoch
    while group.position.cursor.epoch < epoch + 1 or group.position.cursor.returned:
        train()
    for number in range(group.position.cursor.epoch):
        assert {index: group.counted[number, index] for index in range(n)} == dict.fromkeys(range(n), 1)


def test_what_a_late_mean_does_not_hold_goes_back_too() -> None:
    """A mean that arrives a step after it began holds nothing of that step."""
    group = Group(SampleSchedule(600, 7, 1), delay=1)
    for lost in (None, None, 1, None):
        for _ in range(3):
            group.step()
        if lost is not None:
            group.lose(lost)
        group.end_round()
    group.delay = 0
    group.end_round()
    while group.position.cursor.epoch < 1:
        group.step()
        group.end_round()
    assert {index: group.counted[0, index] for index in range(600)} == dict.fromkeys(range(600), 1)


def test_a_returned_share_comes_next_and_ends_its_epoch_before_another_begins() -> None:
    schedule, both = SampleSchedule(10, 3, 1), {0: 2, 1: 3}
    second = schedule.after(Cursor(), both)
    end = schedule.after(second, both)
    back = schedule.give_back(end, second, 1, both, [0])
    assert end == Cursor(1, 0) and back == Cursor(1, 0, returned=(SampleRange(0, 5, 7),))
    (taken,), after = schedule.step(back, {1: 4}, 1)
    assert [taken] == schedule.step(second, both, 0)[0] and schedule.epoch_of(back, 1) == 0 and after == Cursor(1, 0)
    assert schedule.epoch_fraction(back, {1: 4}) == pytest.approx(0.8)
    assert schedule.give_back(end, second, 1, both, [1]) == Cursor(0, 7)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["lose", "return"]), st.integers(0, 1)), max_size=12))
def test_a_partition_waits_with_what_its_member_had_in_hand(history: list[tuple[str, int]]) -> None:
    parts = [np.arange(12), np.arange(12, 31), np.arange(31, 38)]
    group = Group(SplitSchedule(parts, [SampleSchedule(len(part), 5, 1) for part in parts]))
    for event, rank in history:
        if event == "lose":
            group.step()
            group.lose(rank)
        else:
            group.live.add(rank)
        group.end_round()
    group.live = set(PLANNED)
    group.end_round()
    target = 1 + max(cursor.epoch for cursor in group.position.cursor.parts or (Cursor(),))
    while min(cursor.epoch for cursor in group.position.cursor.parts or (Cursor(),)) < target:
        group.step()
        group.end_round()
    for part in parts:
        assert {group.counted[0, index] for index in part.tolist()} == {1}


class Counting(ToyTask):
    """Records the samples of each step."""

    def __init__(self) -> None:
        super().__init__(samples=120)
        self.steps: list[list[int]] = []

    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        return {**super().collate(samples, rngs), "indices": torch.tensor([index for index, *_ in samples])}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if model.training:
            self.steps.append(batch["indices"].tolist())
        return super().loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco", "local_sgd"])
def test_a_run_that_resumes_in_mid_round_without_a_member_trains_on_its_samples(
    tmp_path: Path, serve: Serve, strategy: str
) -> None:
    """Steps of 12 samples, of which the third member's of steps 5 and 6 are in no round; then steps of 8."""

    def stopping(rank: int) -> Control:
        control = Control()
        control.post(Command(command="stop", at_step=6))
        return control

    own = {strategy: {"sync_interval": 4}}
    first = toy_plan(3, training={"max_steps": 13}, strategy={"strategy": strategy, "owned": own})
    before, after = [[Counting() for _ in range(3)] for _ in range(2)]
    run_group(first, serve(first), before.__getitem__, tmp_path, stopping)
    rest = first.model_copy(update={"resume": True, "absent": (2,)})
    members = run_group(rest, serve(rest), after.__getitem__, tmp_path)
    assert [members[rank].ending for rank in (0, 1)] == [ExitCode.DONE] * 2
    assert [len(task.steps) for task in (*before, *after)] == [6, 6, 6, 7, 7, 0]
    del before[2].steps[4:]
    counted = [index for task in (*before, *after) for step in task.steps for index in step]
    assert sorted(counted) == list(range(120))


def test_earlier_snapshots_have_pairs_for_partitions_and_tell_of_no_synchronisation() -> None:
    position = Group(SampleSchedule(30, 7, 1)).position
    state = position.state()
    del state["since"]
    state["cursor"] = {"epoch": 0, "offset": 6, "parts": [[0, 3], [1, 2]]}
    again = Position(EarlyStopping(0, 0.0), batch_sizes=dict(PLANNED), schedule=position.schedule)
    again.load(json.loads(json.dumps(state)), {}, (2,))
    assert again.cursor == Cursor(0, 6, (Cursor(0, 3), Cursor(1, 2))) and again.batch_sizes == {0: 2, 1: 3}
