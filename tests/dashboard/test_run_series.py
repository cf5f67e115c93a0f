from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.dashboard.tabs.charts import UNITS
from app.run_view.run_series import MOST_BUCKETS, SNAPSHOTS, Point, Series, add, coarser, merged, smoothed, summed

value = st.floats(-1e6, 1e6)
steps = st.lists(st.tuples(st.integers(0, 60), value, st.floats(0.1, 100)), min_size=1, max_size=60).map(
    lambda rows: sorted(rows, key=lambda row: row[0])
)


def series_of(rows: list[tuple[int, float, float]]) -> Series:
    series = Series()
    for step, number, weight in rows:
        series = add(series, step, number, weight)
    return series


def test_a_run_of_any_length_is_bounded_and_loses_neither_its_ends_nor_its_mean() -> None:
    series = Series()
    for step in range(10_000):
        series = add(series, step, float(step))
    points = series.points()
    assert len(points) <= MOST_BUCKETS + 1
    assert (points[0].low, points[-1].high, series.count) == (0.0, 9999.0, 10_000)
    assert sum(b.total for b in series.buckets) == pytest.approx(sum(range(10_000)))


@settings(max_examples=60)
@given(steps, st.sampled_from([1, 2, 4, 8, 64]))
def test_coarser_buckets_keep_count_ends_and_mean(rows: list[tuple[int, float, float]], width: int) -> None:
    fine = series_of(rows)
    coarse = coarser(fine, width)
    assert coarse.count == fine.count == len(rows)
    assert min(b.low for b in coarse.buckets) == min(row[1] for row in rows)
    assert max(b.high for b in coarse.buckets) == max(row[1] for row in rows)
    assert sum(b.weight for b in coarse.buckets) == pytest.approx(sum(row[2] for row in rows))


@settings(max_examples=60)
@given(st.lists(steps, min_size=1, max_size=4))
def test_members_together_have_what_each_of_them_has(members: list[list[tuple[int, float, float]]]) -> None:
    together = merged(series_of(rows) for rows in members)
    assert together.count == sum(map(len, members))
    every = [row for rows in members for row in rows]
    mean = sum(b.total for b in together.buckets) / sum(b.weight for b in together.buckets)
    assert mean == pytest.approx(sum(v * w for _, v, w in every) / sum(w for _, _, w in every), rel=1e-6, abs=1e-4)


@settings(max_examples=60)
@given(steps, st.integers(0, 60))
def test_steps_done_a_second_time_replace_the_first(rows: list[tuple[int, float, float]], back_to: int) -> None:
    went_back = add(series_of(rows), back_to, 7.0)
    expected = [row for row in rows if row[0] < back_to] if rows[-1][0] > back_to else rows
    assert went_back.count == len(expected) + 1
    assert went_back.buckets[-1].number == back_to


def test_what_is_not_finite_is_counted_and_kept_out() -> None:
    series = add(add(add(Series(), 1, 2.0), 2, math.nan), 3, math.inf)
    assert (series.count, series.invalid, series.newest) == (1, 2, 2.0)


def test_sums_add_what_the_members_did_at_the_same_steps() -> None:
    one, other = series_of([(0, 1.0, 1.0), (1, 2.0, 1.0)]), series_of([(1, 5.0, 1.0)])
    assert [point.mean for point in summed([one, other]).points()] == [1.0, 7.0]


@given(st.lists(value, min_size=1, max_size=30), st.floats(0, 0.99))
def test_smoothing_stays_between_the_least_and_the_greatest(values: list[float], strength: float) -> None:
    points = smoothed([Point(n, v, v, v) for n, v in enumerate(values)], strength)
    slack = 1e-6 * max(1.0, *map(abs, values))
    assert all(min(values) - slack <= point.mean <= max(values) + slack for point in points)


def test_smoothing_neither_delays_a_falling_curve_nor_hides_where_it_ends() -> None:
    falling = [Point(n, v, v, v) for n, v in enumerate(20.0 - n for n in range(20))]
    assert [point.mean for point in smoothed(falling, 0.9)] == pytest.approx([point.mean for point in falling])


@given(st.lists(value, min_size=3, max_size=24), st.floats(0.1, 0.99))
def test_smoothing_is_the_mean_of_as_many_neighbours_on_both_sides(values: list[float], strength: float) -> None:
    found = smoothed([Point(n, v, v, v) for n, v in enumerate(values)], strength)
    for place, point in enumerate(found):
        reach = min(place // 3, len(values) - 1 - place)
        weights = {place + d: strength ** abs(d) for d in range(-reach, reach + 1)}
        expected = sum(values[n] * weight for n, weight in weights.items()) / sum(weights.values())
        near = values[max(0, place - 2) : place + 3]
        held = min(max(near), max(min(near), expected))
        assert point.mean == pytest.approx(held, abs=1e-6 * max(1.0, *map(abs, values)))


@pytest.mark.parametrize("course", [lambda n: 0.3 + 9 * math.exp(-n / 5), lambda n: 8 / n, lambda n: 8 / n**0.5])
@pytest.mark.parametrize("strength", [0.6, 0.8, 0.98])
def test_the_line_of_a_loss_that_falls_fast_stays_with_its_points(
    course: Callable[[int], float], strength: float
) -> None:
    points = [Point(n, course(n), course(n), course(n)) for n in range(1, 61)]
    for place, point in enumerate(smoothed(points, strength)):
        near = points[max(0, place - 2) : place + 3]
        assert near[-1].low <= point.mean <= near[0].high
        assert point.mean < 1.15 * points[place].mean


@pytest.mark.parametrize("name", ["step time", "sync time", "sync wait", SNAPSHOTS])
def test_times_are_shown_in_seconds(name: str) -> None:
    assert UNITS[name] == "s"
