"""Strategies side by side: the arithmetic, on runs that were made up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from app.comparison import (
    EqualMachines,
    SeedRun,
    StrategyResult,
    loss_at,
    mean_curve,
    rank_strategies,
    read_run,
    samples_until,
    step_seconds,
)
from app.html_report.comparison import remarks, why_best
from profiles.files.resolve import profile_from_options
from profiles.schema import Profile
from tests.app.app_events import step, sync
from training.records.events import EvaluationEvent, Event, RunEvent

CURVE = ((0.0, 4.0), (100.0, 2.0), (200.0, 1.0))
TRAINABLE = 1_000_000


def profile(strategy: str, **options: str) -> Profile:
    job = {"task": "custom", "model_path": "job.py:build", "batch_size": "5", "epochs": "1", "lr_scaling": "off"}
    return profile_from_options("job", {**job, "strategy": strategy, **options})


def ran(seed: int, *losses: float, **more: Any) -> SeedRun:
    """A run of 20 steps of 10 samples with a loss at its start, its middle and its end."""
    curve = tuple((100.0 * number, loss) for number, loss in enumerate(losses))
    figures = {"steps": 20, "samples": 200, "sent": 1e6, "compute": 0.5, "trainable": TRAINABLE}
    return SeedRun(seed=seed, split="validation", curve=curve, **{**figures, **more})


def row_of(strategy: str, *runs: SeedRun, **options: str) -> StrategyResult:
    return StrategyResult(strategy, profile(strategy, **options), runs)


ALLREDUCE = row_of("allreduce", ran(0, 4, 2, 1))


def evaluated(at: int, loss: float | None, split: str = "validation") -> EvaluationEvent:
    return EvaluationEvent(step=at, split=split, loss=loss, metrics={}, samples=9, seconds=1.0)


def test_between_two_points_the_loss_is_a_straight_line() -> None:
    assert [loss_at(CURVE, samples) for samples in (-1, 0, 50, 150, 200, 999)] == [4.0, 4.0, 3.0, 1.5, 1.0, 1.0]
    assert [samples_until(CURVE, loss) for loss in (5.0, 3.0, 2.0, 1.25, 0.9)] == [0.0, 50.0, 100.0, 175.0, None]


def test_a_curve_that_comes_down_twice_is_there_the_first_time() -> None:
    assert samples_until(((0.0, 3.0), (10.0, 1.0), (20.0, 2.0), (30.0, 1.0)), 2.0) == 5.0


def test_the_mean_of_curves_ends_where_the_shortest_does() -> None:
    other = ((0.0, 2.0), (50.0, 2.0), (150.0, 1.0))
    assert mean_curve([CURVE, other]) == ((0.0, 3.0), (50.0, 2.5), (100.0, 1.75), (150.0, 1.25))


def test_a_run_is_read_from_its_events() -> None:
    events: list[Event] = [RunEvent(status="running", details={"trainable": 7}), evaluated(0, 4.0)]
    for number in (1, 2, 3, 4, 5):
        events += [
            step(number, member=member, samples=5, bytes_sent=100 + member, compute=float(number)) for member in (0, 1)
        ]
        events += [sync(number, member=member, step=number, compression=float(number + member)) for member in (0, 1)]
    events += [evaluated(2, 2.0), evaluated(5, 1.0), evaluated(5, 9.0, "test")]
    found = read_run(3, events)
    assert found is not None
    assert found.exchanges["compression"] == tuple((10 * number, number + 0.5) for number in (1, 2, 3, 4, 5))
    assert found.exchanges.keys() == {"sync bytes", "compression"}
    assert replace(found, exchanges={}) == SeedRun(
        3, "validation", ((0, 4.0), (20, 2.0), (50, 1.0)), 5, 50, 502.5, 4.5, 7
    )
    assert read_run(3, events[:2]) is None


def test_where_nothing_is_evaluated_the_training_loss_counts() -> None:
    events = [
        step(number, member=member, samples=5, loss=number + member) for number in range(1, 41) for member in (0, 1)
    ]
    found = read_run(0, events)
    assert found is not None and found.split == "training"
    assert found.curve[0] == (20, 2.0) and found.curve[-1] == (400, 40.0) and len(found.curve) == 20


def test_a_loss_that_is_not_a_number_is_the_worst() -> None:
    lost = read_run(0, [step(1), step(40), evaluated(0, 4.0), evaluated(1, None), evaluated(40, None)])
    assert lost is not None and lost.curve[-1][1] == math.inf
    result = rank_strategies([ALLREDUCE, row_of("diloco", lost)], 2, [])
    assert result.best == "allreduce" and result.rows[1].loss == math.inf


def test_losses_are_compared_at_equal_samples_with_their_spread() -> None:
    longer = ran(1, 4, 3, 2, 0)
    result = rank_strategies([row_of("allreduce", ran(0, 4, 2, 1), longer)], 2, [100])
    row = result.rows[0]
    assert (result.samples, row.losses, row.loss) == (200, (1, 2), 1.5)
    assert row.spread == pytest.approx(math.sqrt(0.5))
    assert row.memory == 4 * TRAINABLE
    assert rank_strategies([row_of("allreduce", longer)], 2, []).rows[0].spread is None


def test_times_are_steps_of_the_cost_model_and_to_a_loss_a_part_of_them() -> None:
    tried = [row_of("diloco", ran(0, 4, 2, 1.01), **{"diloco.sync_interval": "5"}), ALLREDUCE]
    result = rank_strategies(tried, 4, [20, 1000])
    assert result.target == 1.01
    machines = EqualMachines(4, 0.5)
    for one, row in zip(tried, result.rows, strict=True):
        assert one.profile is not None
        for times in row.times:
            assert times.step == step_seconds(one.profile, one.runs[0], machines, times.mbit)
            assert times.to_end == pytest.approx(20 * times.step)
    slow, fast = result.rows[1].times
    assert slow.step > 0.5 + 4e6 * 8 * 1.5 / 20e6 > fast.step > 0.5  # each sends 1.5 times its weights
    assert slow.to_loss == pytest.approx(slow.to_end * 0.995)
    assert result.best == "diloco" and result.rows[0].times[0].to_loss == result.rows[0].times[0].to_end


def test_what_ends_much_higher_is_not_the_best_and_sets_no_target() -> None:
    tried = [ALLREDUCE, row_of("diloco", ran(0, 4, 3, 2), **{"diloco.sync_interval": "5"})]
    result = rank_strategies(tried, 4, [20])
    assert (result.best, result.target) == ("allreduce", 1)
    assert result.rows[1].times[0].to_loss is None and result.rows[1].times[0].to_end > 0


def test_within_what_the_seeds_differ_a_loss_is_as_good() -> None:
    noisy = (ran(0, 4, 2, 0.8), ran(1, 4, 2, 1.2))
    tried = [row_of("allreduce", *noisy), row_of("diloco", ran(0, 4, 3, 1.2), **{"diloco.sync_interval": "5"})]
    assert rank_strategies(tried, 4, [20]).best == "diloco"


def test_a_strategy_that_is_refused_is_a_row_and_says_why() -> None:
    tried = [StrategyResult("demo", refused="no room"), ALLREDUCE]
    result = rank_strategies(tried, 4, [20])
    assert [row.refused for row in result.rows] == ["no room", ""] and result.best == "allreduce"
    assert rank_strategies(tried[:1], 4, [20]).best == ""


def test_a_run_that_did_not_say_its_size_has_no_times() -> None:
    result = rank_strategies([row_of("allreduce", ran(0, 4, 2, 1, trainable=0))], 4, [20])
    assert result.rows[0].times == () and "how many parameters" in result.rows[0].unpredicted
    assert result.best == "allreduce"


def test_a_strategy_that_hardly_exchanged_is_not_the_best() -> None:
    tried = [ALLREDUCE, row_of("diloco", ran(0, 4, 2, 1), **{"diloco.sync_interval": "9"})]
    result = rank_strategies(tried, 4, [20])
    assert result.rows[1].rounds == 2 and result.best == "allreduce"
    (remark,) = remarks(result)
    assert remark.startswith("diloco: 2 exchanges in the whole run, one every 9 steps")
    assert rank_strategies(tried[1:], 4, [20]).best == "diloco"


def test_runs_that_tell_the_time_of_simulated_machines_are_compared_by_it() -> None:
    events: list[Event] = [
        step(number, member=member, clock=30.0 * number) for number in (1, 2, 3) for member in (0, 1)
    ]
    found = read_run(0, events)
    assert found is not None and found.clock == 90.0
    first, second = ran(0, 4.0, 2.0, 1.0, clock=600.0), ran(0, 4.0, 3.0, 1.0, clock=200.0)
    tried = [row_of("allreduce", first), row_of("local_sgd", second, **{"local_sgd.sync_interval": "2"})]
    result = rank_strategies(tried, 4, [100.0])
    assert [(one.mbit, one.step, one.to_end) for row in result.rows for one in row.times] == [
        (0.0, 30.0, 600.0),
        (0.0, 10.0, 200.0),
    ]
    assert why_best(result).endswith("on the simulated machines") and result.best == "local_sgd"
