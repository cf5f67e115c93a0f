"""Energy from counters that wrap and are reset, and from power that is read now and then."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.hardware.sensors import LONGEST_GAP, MOST_WATTS, Counter, Integral

READINGS = st.lists(st.tuples(st.floats(0.1, 60.0), st.floats(0.0, 400.0)), min_size=1, max_size=40)
"""Seconds since the reading before, and the power meanwhile."""


@given(READINGS, st.integers(0, 262_143), st.integers(65_000, 262_143))
def test_a_counter_that_wraps_counts_everything(readings: list[tuple[float, float]], first: int, range_: int) -> None:
    counter, at, total = Counter(float(range_)), 0.0, float(first % range_)
    start = total
    counter.add(total, at)
    for seconds, power in readings:  # at most 60 s of 400 W between two readings: it wraps once at most
        at, total = at + seconds, total + seconds * power
        assert counter.add(total % range_, at) == pytest.approx(power, rel=1e-6, abs=1e-3)
    assert counter.joules == pytest.approx(total - start, rel=1e-6, abs=1e-3)


@given(st.lists(st.floats(0, 1e12), max_size=30), st.none() | st.floats(1, 1e6))
def test_no_readings_make_energy_shrink_or_jump(values: list[float], range_: float | None) -> None:
    counter, before = Counter(range_), 0.0
    for at, value in enumerate(values):
        watts = counter.add(value, float(at))
        assert watts is None or 0 <= watts <= MOST_WATTS
        assert before <= counter.joules <= before + MOST_WATTS
        before = counter.joules


def test_a_counter_that_was_reset_goes_on_from_there() -> None:
    counter = Counter()
    assert [counter.add(value, at) for value, at in ((5000, 0), (5500, 5), (20, 10), (520, 15))] == [
        None, 100.0, None, 100.0,
    ]  # fmt: skip
    assert counter.joules == 1000.0


def test_a_reset_is_not_taken_for_a_wrap() -> None:
    counter = Counter(262_143.0)
    counter.add(100_000.0, 0.0)
    assert counter.add(3.0, 5.0) is None
    assert counter.joules == 0.0


def test_a_clock_that_stands_still_loses_nothing() -> None:
    counter = Counter()
    for counted, at in ((0.0, 1.0), (10.0, 1.0), (30.0, 2.0)):
        counter.add(counted, at)
    assert counter.joules == 30.0


@given(READINGS)
def test_power_is_summed_up_by_trapezoids(readings: list[tuple[float, float]]) -> None:
    meter, points = Integral(), list[tuple[float, float]]()
    at = 0.0
    for seconds, power in readings:
        at += seconds
        assert meter.add(power, at) == power
        points.append((at, power))
    whole = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points) if b[0] - a[0] <= LONGEST_GAP)
    assert meter.joules == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_a_long_gap_and_nonsense_are_not_summed_up() -> None:
    meter = Integral()
    assert [meter.add(*point) for point in ((100.0, 0.0), (100.0, 1.0), (100.0, 100.0), (1e9, 101.0))] == [
        100.0, 100.0, 100.0, None,
    ]  # fmt: skip
    assert meter.joules == 100.0
