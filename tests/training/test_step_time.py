from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.files.resolve import profile_from_options
from training.run.local_plan import plan_local_run
from training.trial import short_run, short_run_start, step_timer
from training.trial.step_timer import (
    LEAST_SECONDS,
    LEAST_STEPS,
    MORE_SECONDS,
    MOST_SECONDS,
    SHARE_OF_RUN,
    WARM_UP,
    StepTime,
    StepTimer,
)


def taken(steps: Iterator[float], period: float = 0.0, run_steps: int = 0) -> tuple[StepTime, int]:
    """Take steps as a short run does; return what they tell, and how many it took."""
    timer = StepTimer(period, run_steps)
    for number in itertools.count(1):
        timer.add(next(steps))
        if timer.enough:
            found = timer.step_time()
            assert found is not None
            return found, number
    raise AssertionError


def throttled(work: float, cores: float, period: float, begin: float = 0.0) -> Iterator[float]:
    """Times of steps of a process that runs ``cores * period`` seconds of each period and then stands still."""
    now, left = begin, cores * period
    while True:
        start, todo = now, work
        while todo > 1e-12:
            run = min(todo, left)
            now, left, todo = now + run, left - run, todo - run
            if left <= 1e-12:
                now, left = (math.floor(now / period + 1e-9) + 1) * period, cores * period
        yield now - start


@settings(max_examples=40, deadline=None)
@given(st.floats(0.002, 0.5), st.floats(0.2, 0.95), st.sampled_from([0.02, 0.1]))
def test_a_throttled_machine_is_as_slow_as_it_is(work: float, cores: float, period: float) -> None:
    found, _ = taken(throttled(work, cores, period), period)
    assert found.seconds == pytest.approx(work / cores, rel=0.06)


@pytest.mark.parametrize("work", [0.003, 0.011, 0.035])
def test_a_quota_that_nobody_tells_of(work: float) -> None:
    """A limit outside of what this process can read, as of a virtual machine."""
    assert taken(throttled(work, 0.4, 0.1))[0].seconds == pytest.approx(work / 0.4, rel=0.06)


def noisy(mean: float, share: float, seed: int = 1) -> Iterator[float]:
    chance = random.Random(seed)
    while True:
        yield mean * max(0.2, chance.gauss(1, share))


def test_even_steps_are_measured_for_a_short_time_and_uneven_ones_longer() -> None:
    even, few = taken(noisy(0.3, 0.01))
    uneven, more = taken(noisy(0.3, 0.3))
    assert few <= WARM_UP + LEAST_STEPS + 1
    assert more > 2 * few
    assert 0 < even.error < uneven.error
    assert uneven.spread == pytest.approx(0.09, rel=0.5)


@pytest.mark.slow
def test_equal_machines_differ_by_their_errors_only() -> None:
    paces = [taken(noisy(0.08, 0.4, seed))[0] for seed in range(40)]
    within = [abs(a.seconds - b.seconds) <= 2 * math.hypot(a.error, b.error) for a, b in itertools.pairwise(paces)]
    assert sum(within) >= 0.8 * len(within)


def test_one_stall_is_not_the_machines_pace() -> None:
    steps = itertools.chain([0.1] * 12, [1.0], itertools.repeat(0.1))
    assert taken(steps)[0].seconds == pytest.approx(0.1)


@pytest.mark.parametrize("step", [1e-4, 0.05, 4.0, 30.0])
def test_it_ends_in_time_whatever_a_step_takes(step: float) -> None:
    found, count = taken(itertools.cycle([step, 1.9 * step]))
    assert step <= found.seconds <= 1.9 * step
    assert count * step <= max(MORE_SECONDS, MOST_SECONDS) + 4 * step


@pytest.mark.parametrize(("step", "run_steps"), [(2.75, 28), (7.0, 28), (0.5, 40), (0.01, 300), (0.3, 2000)])
def test_a_short_run_is_measured_for_a_share_of_it(step: float, run_steps: int) -> None:
    found, count = taken(itertools.cycle([step, 1.4 * step]), run_steps=run_steps)
    seconds, longest = count * found.seconds, max(2 * LEAST_SECONDS, SHARE_OF_RUN * run_steps * found.seconds)
    assert step <= found.seconds <= 1.4 * step
    assert seconds <= max(longest, (WARM_UP + 1) * found.seconds) + 2 * step


@pytest.mark.parametrize(("step", "run_steps"), [(2.75, 28), (0.3, 2000), (4.0, 0), (0.001, 0)])
def test_the_time_that_steps_will_take_is_known_early(step: float, run_steps: int) -> None:
    timer = StepTimer(run_steps=run_steps)
    timer.add(step)
    expected = timer.expected()
    while not timer.enough:
        timer.add(step)
    assert timer.seconds == pytest.approx(expected, rel=0.4)


def trainer(task: Any) -> Any:
    evaluator = SimpleNamespace(seconds_per_sample=lambda split: 0.25)
    return SimpleNamespace(model=nn.Linear(2, 2), task=task, evaluator=evaluator)


def test_a_very_slow_machine_is_measured_at_one_batch_size() -> None:
    sizes: list[int] = []

    def measure(plan: Any, task: Any, batch: int, *_: Any) -> tuple[Any, float]:
        sizes.append(batch)
        return trainer(task), 30.0 if batch > 4 else 5.0

    for batch in (8, 16):
        options = {"batch_size": batch, "device": "cpu", "threads": torch.get_num_threads()}
        plan = plan_local_run(profile_from_options("p", options), 1)
        short_run.carry_out(plan, lambda said: None, task_of=lambda profile: ToyTask(), measured=measure)
    assert sizes == [4, 8, 8]


def test_a_measurement_asks_for_few_samples_and_tells_of_all() -> None:
    class Large(ToyTask):
        def prepare_subset(self, progress: Any, limit: int) -> int:
            asked.append(limit)
            return super().prepare_subset(progress, limit) + 1_000_000

    asked: list[int] = []
    told: list[dict[str, Any]] = []

    def measure(plan: Any, task: Any, *_: Any) -> tuple[Any, float]:
        return trainer(task), 0.1

    for batch in (8, 100):
        options = {"batch_size": batch, "device": "cpu", "threads": torch.get_num_threads()}
        plan = plan_local_run(profile_from_options("p", options), 1)
        short_run.carry_out(plan, told.append, lambda: asked.append(0), task_of=lambda _: Large(), measured=measure)
    assert asked == [0, 128, 0, 200]  # 0: it waits
    assert all(one["samples"] > 1_000_000 for one in told if one["kind"] == "workload")
    assert told[-1] == {"kind": "evaluation", "seconds": 0.25}


def test_what_evaluating_a_sample_takes_is_measured_where_none_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Subset(ToyTask):
        def prepare_subset(self, progress: Any, limit: int) -> int:
            count = super().prepare_subset(progress, limit)
            self.evaluation, self.evaluation_sizes = {}, {"validation": 30, "test": 60}
            return count

    monkeypatch.setattr(step_timer, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(step_timer, "WELL_KNOWN", math.inf)
    told: list[dict[str, Any]] = []
    options = {"batch_size": 4, "device": "cpu", "threads": torch.get_num_threads()}
    plan = plan_local_run(profile_from_options("p", options), 1)
    short_run.carry_out(plan, told.append, task_of=lambda _: Subset())
    figures = {one["kind"]: one for one in told}
    assert figures["workload"]["evaluated"] == {"validation": 30, "test": 60}
    assert 0 < figures["evaluation"]["seconds"] < 1e6


@pytest.mark.parametrize("cores", [1, 2])
def test_a_machine_of_one_core_imports_nothing_before_the_word(cores: int) -> None:
    told: list[str] = []

    def loaded(wait: Callable[[], object]) -> None:
        told.append("loaded")
        wait()

    short_run_start.main(lambda: cores, lambda: told.append("word"), loaded)
    assert told == (["word", "loaded"] if cores == 1 else ["loaded", "word"])


def test_no_step_no_pace() -> None:
    assert StepTimer().step_time() is None


def test_a_short_run_waits_for_no_compiler() -> None:
    assert short_run.plan_for(toy_plan(training={"compile": "on"}), 4).profile.training.compile == "off"
