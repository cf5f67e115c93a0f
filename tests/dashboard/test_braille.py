from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.dashboard.braille import SAMPLES, Curve, Raster, Window, ticks, window_of
from app.dashboard.tabs.chart_values import value_text
from app.dashboard.tabs.charts import AxisMark, ChartData, drawn
from app.run_view.run_series import Point

point = st.builds(
    lambda step, low, mean, high: Point(step, *sorted((low, mean, high))),
    st.floats(0, 1e7), st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.floats(-1e12, 1e12),
)  # fmt: skip
curves = st.lists(st.builds(Curve, st.lists(point, max_size=20), band=st.sampled_from(["", "b"])), max_size=3)


@settings(max_examples=80, deadline=None)
@given(curves, st.integers(10, 60), st.integers(4, 20), st.booleans(), st.booleans())
def test_any_curve_fits_its_size(shown: list[Curve], width: int, height: int, log: bool, plain: bool) -> None:
    lines = drawn(ChartData("loss", tuple(shown), log=log), width, height, plain)
    assert len(lines) <= height
    assert all(line.cell_length <= width for line in lines)
    assert not plain or not any("\u2800" <= sign <= "\u28ff" for line in lines for sign in line.plain)


def rows(curve: Curve, window: Window, width: int = 10, height: int = 5) -> list[str]:
    raster = Raster(width, height, ascii_only=True)
    raster.draw(curve, window)
    return [line.plain for line in raster.lines()]


def test_a_promise_that_the_curve_hides_is_not_in_the_legend() -> None:
    curve, below, above = (Curve([Point(n, v, v, v) for n in range(40)], style) for v, style in
                           ((5.0, "bold"), (5.0, "dim"), (1.0, "dim")))  # fmt: skip
    titles = [drawn(ChartData("loss", (one, curve), promised=(one,)), 40, 12)[0].plain for one in (below, above)]
    assert titles == ["loss", "loss  ━ promised"]


def test_a_line_goes_through_its_points() -> None:
    line = rows(Curve([Point(n, n, n, n) for n in range(10)]), Window(0, 9, 0, 9))
    assert (line[0].rstrip()[-1], line[-1][0]) == ("*", "*")


def test_lines_among_others_differ_without_their_colours() -> None:
    points = [Point(n, 1, 1, 1) for n in range(10)]
    drawn_lines = {rows(Curve(points, pattern=pattern), Window(0, 9, 0, 2))[2] for pattern in range(3)}
    assert drawn_lines == {"**********", "******    ", "**  **  **"}
    long = [Point(n, 1, 1, 1) for n in range(20)]
    five = [rows(Curve(long, pattern=pattern), Window(0, 19, 0, 2), width=20)[2] for pattern in range(5)]
    assert len({*five}) == len({*SAMPLES}) == 5


def test_a_gap_is_left_where_there_are_no_values() -> None:
    points = [Point(n, 1, 1, 1) for n in (0, 1, 8, 9)]
    joined, parted = (rows(Curve(points, gap=gap), Window(0, 9, 0, 2))[2] for gap in (100, 2))
    assert joined == "**********"
    assert "   " in parted


def test_many_points_in_a_column_are_no_gap() -> None:
    points = [Point(n, 0, n // 100 % 2, 1) for n in range(1000)]
    assert all("*" in row for row in rows(Curve(points, gap=8), Window(0, 999, 0, 1)))


def test_the_band_lies_under_the_line() -> None:
    line = rows(Curve([Point(n, 0, 5, 9) for n in range(10)], band="b"), Window(0, 9, 0, 9))
    assert line[2] == "**********"
    assert line[0] == line[4] == "::::::::::"


def test_a_band_is_whole_between_its_points() -> None:
    line = rows(Curve([Point(n, 0, 5, 9) for n in (0, 3, 9)], style="", band="b"), Window(0, 9, 0, 9))
    assert {*line} == {"::::::::::"}


def test_a_band_is_one_shade() -> None:
    raster = Raster(10, 5)
    raster.draw(Curve([Point(n, 0, 5, 9) for n in range(10)], style="", band="b"), Window(0, 9, 0, 9))
    assert {line.plain for line in raster.lines()} == {"░" * 10}


def test_marks_stand_on_the_axis() -> None:
    points = (Point(0, 1, 1, 1), Point(9, 2, 2, 2))
    lines = drawn(ChartData(curves=(Curve(points),), marks=(AxisMark(9, "x", ""),)), 30, 8)
    assert lines[-2].plain.endswith("x")


def test_a_logarithmic_scale_leaves_out_what_it_cannot_show() -> None:
    window = window_of([Curve([Point(0, -1, -1, -1), Point(1, 1, 1, 1), Point(2, 100, 100, 100)])], log=True)
    assert window is not None
    assert (window.bottom, window.top, window.up(10)) == (1, 100, 0.5)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(1, 8))
def test_ticks_are_inside_and_few(bottom: float, span: float, most: int) -> None:
    window = Window(0, 1, bottom, bottom + span)
    found = ticks(window, most)
    assert len(found) <= most + 1
    assert all(window.bottom - 1e-6 * span <= tick <= window.top + 1e-6 * span for tick in found)


@pytest.mark.parametrize("plain", [False, True])
def test_a_tick_stands_where_its_value_is_drawn(plain: bool) -> None:
    whole = Curve([Point(0, 0, 0, 1)], "", "b")
    for height, value in product(range(7, 24), (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)):
        flat = Curve([Point(1, value, value, value), Point(2, value, value, value)])
        lines = [line.plain for line in drawn(ChartData(curves=(whole, flat)), 30, height, plain)]
        assert not any(line.lstrip().startswith(f"{value:g}┤") and line.endswith(" ") for line in lines)


@pytest.mark.parametrize(("value", "bottom"), [(0.0, 0.0), (0.5, 0.45), (-2.0, -2.2)])
def test_one_value_has_no_axis_on_the_other_side_of_zero(value: float, bottom: float) -> None:
    window = window_of([Curve([Point(step, value, value, value) for step in (1, 2)])])
    assert window is not None and window.bottom == pytest.approx(bottom) and window.top > value


def test_an_axis_of_one_step_names_no_other() -> None:
    assert drawn(ChartData(curves=(Curve([Point(1, 1, 1, 1)]),)), 40, 8)[-1].plain.split() == ["step", "1"]


def test_values_are_short() -> None:
    for value in (0.0, 1e-9, 0.123456, 1.0, 99_999.0, 1e12, -5e-4):
        assert all(len(value_text(value, unit)) <= 9 for unit in ("", "B"))
    assert [value_text(*one) for one in ((12000.0, ""), (1200.0, "s"), (10.0, "%"))] == ["12000", "1200 s", "1000 %"]
    assert (value_text(0.132, "%"), value_text(0.0042, "s"), value_text(2.5e9, "B")) == ("13.2 %", "4.2 ms", "2.5 GB")


@given(st.floats(1e-9, 1e15) | st.floats(-1e15, -1e-9), st.sampled_from(["", "s", "%", "B"]))
def test_a_value_beside_an_axis_is_whole(value: float, unit: str) -> None:
    """A figure that lost a part of its exponent would be another figure."""
    said = value_text(value, unit)
    number, _, shown = said.partition(" ")
    scale = {"%": 0.01, "ms": 1e-3, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}.get(shown, 1.0)
    assert len(said) <= 8
    assert float(number) * scale == pytest.approx(value, rel=0.51)
