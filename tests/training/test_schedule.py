"""The learning rate's course and the global-batch rule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.optimisation import TrainingSettings
from profiles.quantities import share_text
from profiles.schema import Profile
from training.numerics.schedule import (
    AskedRule,
    ScalingRule,
    Schedule,
    ends_in_warm_up,
    enough_epochs,
    learning_rate_at,
    scaled_learning_rate,
    scaling_rule,
    steps_in,
    warm_up_of,
)

SCHEDULES: list[Schedule] = ["constant", "linear", "cosine", "wsd"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_ends_at_the_peak(schedule: Schedule) -> None:
    rates = [learning_rate_at(step, 100, 4, schedule, 8.0) for step in range(5)]
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_step_has_the_peak(schedule: Schedule) -> None:
    assert learning_rate_at(0, 100, 0, schedule, 8.0) == 8.0


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.5, 0.0), ("cosine", 0.5, 0.0)]
)
def test_course_after_the_warm_up(schedule: Schedule, middle: float, end: float) -> None:
    assert learning_rate_at(60, 110, 10, schedule, 1.0) == pytest.approx(middle)
    assert learning_rate_at(110, 110, 10, schedule, 1.0) == pytest.approx(end)
    assert learning_rate_at(500, 110, 10, schedule, 1.0) == pytest.approx(end)


def test_cosine_is_above_linear_in_the_first_half() -> None:
    assert learning_rate_at(25, 100, 0, "cosine", 1.0) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_inverse_square_root_goes_on_from_the_warm_up() -> None:
    rates = [learning_rate_at(step, 100, 4, "inverse_sqrt", 8.0) for step in (0, 3, 15, 63, 399)]
    assert rates == [2.0, 8.0, 4.0, 2.0, 0.8]
    assert learning_rate_at(3, 100, 0, "inverse_sqrt", 8.0) == 4.0


def test_wsd_stays_and_falls_at_the_end() -> None:
    rates = [learning_rate_at(step, 100, 4, "wsd", 8.0, 0.16) for step in (4, 84, 85, 88, 100, 300)]
    assert rates == [8.0, 8.0, 6.0, 4.0, 0.0, 0.0]
    assert learning_rate_at(9, 10, 9, "wsd", 8.0, 1.0) == 8.0  # no fall before the warm-up has ended


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 350), st.sampled_from([*SCHEDULES, "inverse_sqrt"]))
def test_rate_stays_between_zero_and_the_peak(step: int, total: int, warmup: int, schedule: Schedule) -> None:
    assert 0.0 <= learning_rate_at(step, total, warmup, schedule, 0.5) <= 0.5


@pytest.mark.parametrize(("rule", "factor"), [("off", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rule_for_a_four_times_larger_batch(rule: ScalingRule, factor: float) -> None:
    assert scaled_learning_rate(1e-3, rule, 32, 8) == pytest.approx(factor * 1e-3)


@pytest.mark.parametrize("rule", ["off", "sqrt", "linear"])
def test_same_batch_keeps_the_rate_exactly(rule: ScalingRule) -> None:
    assert scaled_learning_rate(1e-3, rule, 8, 8) == 1e-3


@pytest.mark.parametrize(
    ("asked", "raised", "rule"),
    [("auto", True, "sqrt"), ("auto", False, "off"), ("linear", False, "linear"), ("off", True, "off")],
)
def test_a_strategy_says_whether_the_rate_is_raised_unless_a_rule_is_asked_for(
    asked: AskedRule, raised: bool, rule: ScalingRule
) -> None:
    assert scaling_rule(asked, raised) == rule


TUNED = Profile(name="tuned", training=TrainingSettings(warmup_steps=50))


@pytest.mark.parametrize(("steps", "told"), [(0, False), (9, True), (49, True), (50, False)])
def test_a_run_that_ends_in_its_warm_up_is_told(steps: int, told: bool) -> None:
    said = ends_in_warm_up(steps, TUNED)
    assert bool(said) is told
    if steps == 9:
        assert "18 % of its peak" in said
    if told:
        assert f"reaches {share_text(learning_rate_at(steps - 1, steps, 50, 'linear', 1.0))}" in said


@pytest.mark.parametrize(
    ("each", "epochs", "drop_last", "steps"),
    [(2.5, 3, False, 9), (2.5, 3, True, 6), (2.5, 1.5, False, 3 + 2), (3 * (1 / 3), 4, False, 4), (0.4, 0.1, True, 1)],
)
def test_every_epoch_ends_with_a_step_of_its_own(each: float, epochs: float, drop_last: bool, steps: int) -> None:
    assert steps_in(each, epochs, drop_last) == steps


@pytest.mark.parametrize(("warmup_steps", "steps", "warm_up"), [(50, 20, 50), (0.1, 20, 2), (0.1, 4, 0), (1.0, 20, 1)])
def test_warm_up_as_a_share_of_the_run(warmup_steps: float, steps: int, warm_up: int) -> None:
    assert warm_up_of(TrainingSettings(warmup_steps=warmup_steps), steps) == warm_up


@pytest.mark.parametrize(
    ("samples", "epochs", "max_steps", "passes"),
    [(35, 0.99, 0, 10), (100, 0.99, 0, 6), (500, 0.99, 0, 3), (800, 0.99, 0, 2), (6400, 0.99, 0, 0.99),
     (35, 3, 0, 3), (35, 22, 0, 22), (35, 1, 9, 1), (0, 1, 0, 1)],
)  # fmt: skip
def test_few_samples_are_passed_over_more_often(samples: int, epochs: float, max_steps: int, passes: float) -> None:
    assert enough_epochs(samples, TrainingSettings(epochs=epochs, max_steps=max_steps)) == passes
