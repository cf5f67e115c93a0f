"""Curves as characters: two by four points a cell in braille, or one sign a cell in ASCII. Pure.

It draws what no terminal library offers: a band from least to greatest under a line of means, marks under the curve,
gaps where there are no values, a logarithmic scale, and distinct colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from textual.content import Content

from app.run_view.run_series import Point
from app.shell.text import DOTS, together

BAND, LINE = 0, 1
_BAND_SIGN = "░"
"""One shade for a whole cell: separate points for each column would look like rain."""
PATTERNS = ((1, 0), (6, 4), (2, 2), (12, 4), (1, 3))
"""Columns of points drawn, and left out: solid, dashed, dotted, long dashes, sparse dots."""
SAMPLES = ("━", "╍", "┅", "╸", "┈")
"""Each pattern as a sign for legends."""


@dataclass(frozen=True)
class Curve:
    """One line and the band around it."""

    points: Sequence[Point]
    style: str = "$text-primary"
    """Style of the line of means; empty: no line."""
    band: str = ""
    """Style of the band from least to greatest; empty: no band."""
    gap: float = math.inf
    """Steps without a point above which the line is interrupted."""
    pattern: int = 0
    """Index in :data:`PATTERNS` for the line, so that lines do not differ by colour alone."""


@dataclass(frozen=True)
class Window:
    """The visible part of the plane."""

    left: float
    right: float
    bottom: float
    top: float
    log: bool = False

    def across(self, step: float) -> float:
        """Return the horizontal position of a step, 0 to 1 inside the window."""
        return (step - self.left) / (self.right - self.left) if self.right > self.left else 0.5

    def up(self, value: float) -> float:
        """Return the vertical position of a value, 0 to 1 inside the window."""
        low, high = self._scaled(self.bottom), self._scaled(self.top)
        return (self._scaled(value) - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def window_of(curves: Sequence[Curve], log: bool = False, left: float | None = None, right: float | None = None,
              zero: bool = False) -> Window | None:  # fmt: skip
    """Return the window that contains all curves; ``None`` where there is nothing to show.

    Args:
        left: first step; ``None``: that of the curves.
        zero: whether 0 must be inside.
    """
    points = [p for curve in curves for p in curve.points if left is None or left <= p.step]
    points = [p for p in points if right is None or p.step <= right]
    points = [p for p in points if p.mean > 0] if log else points
    if not points:
        return None
    banded = any(curve.band for curve in curves)
    low = min(_low(p, log) if banded else p.mean for p in points)
    high = max(p.high if banded else p.mean for p in points)
    if zero and not log:
        low, high = min(0.0, low), max(0.0, high)
    if low == high:
        padding = abs(low) * 0.1 or 1.0
        floor = (
            low if low == 0 else 0.0 if low > 0 else low - padding
        )  # no axis below 0 for values that are never negative
        low, high = (low / 2, high * 2) if log else (max(floor, low - padding), high + padding)
    start = min(p.step for p in points) if left is None else left
    end = max(p.step for p in points) if right is None else right
    return Window(start, max(start, end), low, high, log)


def _low(point: Point, log: bool) -> float:
    return point.low if not log or point.low > 0 else point.mean


class _Column(NamedTuple):
    """The points that fall into one column."""

    column: int
    first_step: float
    """Step of the first point; that of the last one is in ``point``."""
    points: int
    point: Point


class Raster:
    """The bitmap of ``width`` by ``height`` cells."""

    def __init__(self, width: int, height: int, ascii_only: bool = False) -> None:
        self.width, self.height = width, height
        self._fine = (1, 1) if ascii_only else (2, 4)
        self._ascii = ascii_only
        self._bits: list[dict[int, int]] = [{}, {}]
        self._styles: list[dict[int, str]] = [{}, {}]
        self._lines: dict[int, Curve] = {}
        """The curve whose line a cell shows."""

    def cells_of(self, curve: Curve) -> int:
        """Return how many cells show the line of a curve that was drawn: others may lie over it."""
        return sum(shown is curve for shown in self._lines.values())

    def draw(self, curve: Curve, window: Window) -> None:
        """Draw a curve over earlier ones; lines always lie over bands."""
        columns = self._columns(curve, window)
        for column, low, high in self._edges(columns, curve, window) if curve.band else ():
            for row in range(high, low + 1):
                self._set(BAND, column, row, curve.band)
        if curve.style:
            self._draw_line(columns, curve, window)

    def _edges(self, columns: Sequence[_Column], curve: Curve, window: Window) -> Iterator[tuple[int, int, int]]:
        """Yield each column with its rows of least and greatest, interpolated between points."""
        rows = [
            (self._row(_low(column_data.point, window.log), window), self._row(column_data.point.high, window))
            for column_data in columns
        ]
        for (column_data, (low, high)), (next_data, (next_low, next_high)) in pairwise(zip(columns, rows, strict=True)):
            across = (
                next_data.column - column_data.column
                if next_data.first_step - column_data.point.step <= curve.gap
                else 1
            )
            for column in range(across):
                share = column / across
                yield (
                    column_data.column + column,
                    round(low + share * (next_low - low)),
                    round(high + share * (next_high - high)),
                )
        for column_data, (low, high) in zip(columns[-1:], rows[-1:], strict=True):
            yield column_data.column, low, high

    def line_of(self, value: float, window: Window) -> int:
        """Return the line of cells, from the top, in which a value is drawn."""
        return self._row(value, window) // self._fine[1]

    def lines(self) -> Iterator[Content]:
        """Yield the lines of cells from the top one on."""
        for row in range(self.height):
            cells = [(" ", "")] * self.width
            for column, layer in product(range(self.width), (BAND, LINE)):
                index = row * self.width + column
                if bits := self._bits[layer].get(index):
                    sign = (":", "*")[layer] if self._ascii else (_BAND_SIGN, chr(0x2800 + bits))[layer]
                    cells[column] = (sign, self._styles[layer][index])
            yield together(cells)

    def _columns(self, curve: Curve, window: Window) -> list[_Column]:
        """Return one point a column: the mean of the points that fall into it."""
        across = self.width * self._fine[0]
        columns: list[_Column] = []
        for point in curve.points:
            if not window.left <= point.step <= window.right or (window.log and point.mean <= 0):
                continue
            column = min(across - 1, int(window.across(point.step) * across))
            if columns and columns[-1].column == column:
                _, first_step, count, merged = columns[-1]
                mean = (merged.mean * count + point.mean) / (count + 1)
                joined = Point(point.step, min(merged.low, point.low), mean, max(merged.high, point.high))
                columns[-1] = _Column(column, first_step, count + 1, joined)
            else:
                columns.append(_Column(column, point.step, 1, point))
        return columns

    def _draw_line(self, columns: list[_Column], curve: Curve, window: Window) -> None:
        before: tuple[int, float, int] | None = None
        for column, first_step, _, point in columns:
            row = self._row(point.mean, window)
            if before is None or first_step - before[1] > curve.gap:
                self._point(column, row, curve)
            else:
                self._stroke(before[0], before[2], column, row, curve)
            before = (column, point.step, row)

    def _stroke(self, x0: int, y0: int, x1: int, y1: int, curve: Curve) -> None:
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for n in range(count + 1):
            self._point(round(x0 + (x1 - x0) * n / count), round(y0 + (y1 - y0) * n / count), curve)

    def _point(self, x: int, y: int, curve: Curve) -> None:
        drawn, left_out = PATTERNS[curve.pattern % len(PATTERNS)]
        if x % (drawn + left_out) < drawn:
            self._set(LINE, x, y, curve.style)
            self._lines[y // self._fine[1] * self.width + x // self._fine[0]] = curve

    def _row(self, value: float, window: Window) -> int:
        high = self.height * self._fine[1] - 1
        return min(high, max(0, round((1 - window.up(value)) * high)))

    def _set(self, layer: int, x: int, y: int, style: str) -> None:
        across, down = self._fine
        index = (y // down) * self.width + x // across
        bit = 1 if self._ascii else DOTS[y % 4][x % 2]
        if self._styles[layer].get(index, style) != style and layer == LINE:
            self._bits[layer][index] = 0  # the newest line keeps its colour
        self._bits[layer][index] = self._bits[layer].get(index, 0) | bit
        self._styles[layer][index] = style


def ticks(window: Window, max_ticks: int) -> list[float]:
    """Return at most ``max_ticks`` round values inside the window for the axis at the left, ascending."""
    if window.log:
        lowest, highest = math.ceil(math.log10(window.bottom)), math.floor(math.log10(window.top))
        stride = max(1, -(-(highest - lowest + 1) // max(1, max_ticks)))
        powers = [10.0**power for power in range(lowest, highest + 1, stride)]
        return powers if len(powers) > 1 else [window.bottom, window.top]
    span = window.top - window.bottom
    if not math.isfinite(span) or span <= 0:
        return [window.bottom]
    raw = span / max(1, max_ticks)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    lowest = math.ceil(window.bottom / step - 1e-9)
    slack = 1e-9 * span
    inside = (number * step for number in range(lowest, lowest + max_ticks + 1))
    return [value for value in inside if window.bottom - slack <= value <= window.top + slack]
