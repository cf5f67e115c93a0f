"""A member that makes every step longer than without it gets no samples for a while, and is tried again."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import group
import pytest
import torch
from group import Serve, run_group
from hypothesis import given
from hypothesis import strategies as st
from test_balance import Recorded
from toy_task import toy_plan

from training.data import set_aside
from training.data.balance import Decision, ShareBalance, Speed, window_steps
from training.data.sample_order import Cursor, SampleSchedule
from training.data.set_aside import FIRST_PAUSE, LEAST_SECONDS, LEAST_STEPS, MOST_PAUSE
from training.loop.uneven_trainer import BalancedTrainer
from training.records.events import StepEvent, WarningEvent

PLANNED = {0: 8, 1: 8, 2: 8}


class World:
    """Members of scripted speed, whose step takes as long as the slowest of them computes, and a link besides."""

    def __init__(self, *seconds: float, link: float = 0.0) -> None:
        self.seconds, self.link = dict(enumerate(seconds)), link
        self.balance = ShareBalance(sets_aside=True)
        self.planned = dict(PLANNED)
        self.step, self.now = 0, 0.0
        self.decisions: list[tuple[float, Decision]] = []
        self.set_aside: dict[int, list[float]] = {rank: [] for rank in PLANNED}
        """When each was set aside."""

    @property
    def sizes(self) -> dict[int, int]:
        return self.balance.sizes_of(self.planned)

    def window(self) -> None:
        """Members train until they meet, and decide; each has the other half of the state from a snapshot."""
        sizes = self.sizes
        whole = max(size * self.seconds[rank] for rank, size in sizes.items()) + self.link
        steps = max(1, self.balance.next_report - self.step)
        self.step, self.now = self.step + steps, self.now + steps * whole
        speeds = {rank: Speed(self.seconds[rank], whole, steps) for rank, size in sizes.items() if size}
        decision = self.balance.decide(self.step, sizes, speeds, "abc".__getitem__)
        if decision is not None:
            self.decisions.append((self.now, decision))
            if not decision.sizes[decision.rank]:
                self.set_aside[decision.rank].append(self.now)
        self.balance.load(json.loads(json.dumps(self.balance.state())))

    def until(self, moment: float) -> None:
        while self.now < moment:
            self.window()


def test_who_takes_longer_for_one_sample_than_the_others_for_all_is_set_aside_and_tried_again() -> None:
    world = World(0.01, 0.01, 0.5)
    while world.sizes[2]:
        world.window()
    assert world.sizes == {0: 12, 1: 12, 2: 0}
    at, decision = world.decisions[-1]
    assert decision.rank == 2 and decision.reason == (
        "c takes 500 ms for the smallest share of a step, the others 120 ms for all of it: it is set aside for 10 min"
    )
    assert world.step >= LEAST_STEPS + 20 and at >= LEAST_SECONDS
    world.until(at + FIRST_PAUSE - 5)
    assert world.sizes[2] == 0
    world.until(at + FIRST_PAUSE + 30)
    trial, again = world.decisions[-2:]
    assert trial[1].reason == "c was set aside, and gets the smallest share of a step again"
    assert trial[1].sizes == {0: 12, 1: 11, 2: 1} or trial[1].sizes == {0: 11, 1: 12, 2: 1}
    assert again[1].reason.endswith("it is set aside for 20 min") and again[0] - trial[0] < 10


def test_who_is_faster_when_it_is_tried_stays() -> None:
    world = World(0.01, 0.01, 0.5)
    while world.sizes[2]:
        world.window()
    world.seconds[2] = 0.01
    world.until(world.now + FIRST_PAUSE + 60)
    assert world.sizes == PLANNED


@pytest.mark.parametrize("seconds", [(0.01, 0.01, 0.1), (0.3, 0.3, 0.3)])
def test_who_adds_anything_stays_whatever_the_links_take(seconds: tuple[float, ...]) -> None:
    world = World(*seconds, link=3.0)
    for _ in range(60):
        world.window()
    assert min(world.sizes.values()) >= 1


def test_the_last_of_two_goes_on_alone_and_none_of_them_alone_is_set_aside() -> None:
    world = World(0.01, 0.9)
    world.planned = {0: 8, 1: 8}
    world.until(FIRST_PAUSE / 2)
    assert world.sizes == {0: 16, 1: 0}
    world.planned = {1: 8}
    assert world.sizes == {1: 8}
    world.until(3 * FIRST_PAUSE)
    assert world.sizes == {1: 8}


def test_who_joins_as_another_is_set_aside_takes_its_share() -> None:
    world = World(0.01, 0.01, 0.5)
    world.planned = {0: 8, 2: 8}
    world.until(FIRST_PAUSE / 2)
    world.planned = dict(PLANNED)
    sizes = world.sizes
    assert sizes[2] == 0 and sum(sizes.values()) == 24 and min(sizes[0], sizes[1]) > 0


histories = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.002, 0.01, 0.02, 0.05, 0.2, 1.0, 4.0]), st.integers(1, 60),
              st.sampled_from(["", "lose", "return"])), min_size=1, max_size=12,
)  # fmt: skip


@given(histories)
def test_whatever_speeds_do_the_batch_stays_whole_and_nobody_flaps(moves: list[tuple[int, float, int, str]]) -> None:
    world, schedule = World(0.01, 0.01, 0.01), SampleSchedule(100, 0, 1)
    cursor, counted = Cursor(), Counter[int]()
    for rank, seconds, windows, change in moves:
        world.seconds[rank] = seconds
        if change == "lose" and len(world.planned) > 1 and world.planned.pop(rank, None):
            world.set_aside[rank].append(-1.0)  # who comes back is judged anew
        if change == "return":
            world.planned[rank] = PLANNED[rank]
        for _ in range(windows):
            world.window()
            sizes = world.sizes
            assert sizes.keys() == world.planned.keys() and min(sizes.values()) >= 0
            assert sum(sizes.values()) == sum(world.planned.values())
            epoch = cursor.epoch
            for member in sizes:
                batches, after = schedule.step(cursor, sizes, member)
                counted.update(index for batch in batches for index in batch)
            cursor = after
            if cursor.epoch > epoch:
                assert set(counted.values()) == {1} and len(counted) == 100
                counted.clear()
    for rank in PLANNED:
        pause = FIRST_PAUSE / 2
        for a, b in pairwise(world.set_aside[rank]):
            pause = min(MOST_PAUSE, 2 * pause) if a >= 0 else pause
            assert a < 0 or b < 0 or b - a >= pause - 1e-6


def test_windows_stay_short_enough_to_count_pauses() -> None:
    assert window_steps(1e-3) * 1e-3 < LEAST_SECONDS


@pytest.mark.slow
def test_it_holds_the_same_weights_and_every_sample_counts_once(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members are real; only what a sample takes is scripted."""
    monkeypatch.setattr(set_aside, "LEAST_SECONDS", 1.0)
    monkeypatch.setattr(set_aside, "FIRST_PAUSE", 20.0)
    notes = ShareBalance.note_step

    class Timed(ShareBalance):
        rank = 0

        def note_step(self, compute: float, seconds: float, samples: int) -> None:
            notes(self, samples * (5.0 if self.rank == 2 else 0.01), 0.5, samples)

    class TimedTrainer(BalancedTrainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._balance = self.position.balance = Timed(1, self._balance.sets_aside)
            self._balance.rank = self.rank

    monkeypatch.setattr(group, "trainer_class", lambda plan: TimedTrainer)
    plan = toy_plan(
        3, {"max_steps": 0, "epochs": 3}, {"eval_interval": 10}, {"snapshot_interval": 25}, run={"balance": "on"}
    )
    tasks = {rank: Recorded(64) for rank in range(3)}
    members = run_group(plan, serve(plan), tasks.__getitem__, tmp_path)
    assert [member.error for member in members.values()] == [None] * 3
    assert sorted(index for task in tasks.values() for index in task.trained) == sorted([*range(480)] * 3)
    weights = [torch.cat([p.detach().reshape(-1) for p in m.trainer.parameters]) for m in members.values()]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    samples = [event.samples for event in members[2].events if isinstance(event, StepEvent)]
    assert samples.count(0) >= 40 and samples[-1] in (0, 1)
    told = [event.message for event in members[2].events if isinstance(event, WarningEvent)]
    assert all(" share " in line for line in told)
    assert any("it is set aside for 20 s" in line for line in told)
    assert any("gets the smallest share of a step again" in line for line in told)
    assert any("it is set aside for 40 s" in line for line in told)
