"""The learning rate's course and the global-batch rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.schema import Profile, TrainingSettings
from training.schedule import ScalingRule, Schedule, ends_in_warm_up, learning_rate_at, scaled_learning_rate

SCHEDULES: list[Schedule] = ["constant", "linear", "cosine"]


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


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 350), st.sampled_from(SCHEDULES))
def test_rate_stays_between_zero_and_the_peak(step: int, total: int, warmup: int, schedule: Schedule) -> None:
    assert 0.0 <= learning_rate_at(step, total, warmup, schedule, 0.5) <= 0.5


@pytest.mark.parametrize(("rule", "factor"), [("off", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rule_for_a_four_times_larger_batch(rule: ScalingRule, factor: float) -> None:
    assert scaled_learning_rate(1e-3, rule, 32, 8) == pytest.approx(factor * 1e-3)


@pytest.mark.parametrize("rule", ["off", "sqrt", "linear"])
def test_same_batch_keeps_the_rate_exactly(rule: ScalingRule) -> None:
    assert scaled_learning_rate(1e-3, rule, 8, 8) == 1e-3


TUNED = Profile(name="tuned", training=TrainingSettings(warmup_steps=50))


@pytest.mark.parametrize(("steps", "told"), [(0, False), (9, True), (49, True), (50, False)])
def test_a_run_that_ends_in_its_warm_up_is_told(steps: int, told: bool) -> None:
    said = ends_in_warm_up(steps, TUNED)
    assert bool(said) is told
    if steps == 9:
        assert "18% of its peak" in said
    if told:
        assert f"reaches {learning_rate_at(steps - 1, steps, 50, 'linear', 1.0):.0%}" in said


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({}, "once wrong transcripts are corrected, raise epochs"),
        ({"from_scratch": True}, "raise epochs, or lower warmup_steps"),
        ({"teacher_path": "large"}, "raise epochs, or lower warmup_steps"),
    ],
)
def test_more_epochs_are_advised_and_what_comes_before_them(change: dict[str, Any], advice: str) -> None:
    """A published model learns the wrong transcripts of few recordings by heart (docs/whisper.md)."""
    model = TUNED.model.model_copy(update=change)
    assert advice in ends_in_warm_up(9, TUNED.model_copy(update={"model": model}))
