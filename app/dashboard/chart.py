"""A chart with axes: the widget around :mod:`app.dashboard.braille`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from textual.content import Content
from textual.widgets import Static

from app.dashboard.braille import Curve, Raster, Window, ticks, together, window_of
from app.shell.frame import app_of
from app.shell.text import literal

_LEFT = 8
"""Cells of the labels at the left."""


@dataclass(frozen=True)
class Mark:
    """A sign on the axis of the steps."""

    step: float
    sign: str
    style: str


@dataclass(frozen=True)
class ChartData:
    """Everything that a chart shows."""

    title: str = ""
    curves: tuple[Curve, ...] = ()
    """Those behind come first."""
    marks: tuple[Mark, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    """Words and their styles, beside the title."""
    unit: str = ""
    """``%`` for shares, ``B`` for bytes, ``s`` for seconds; empty: a plain number."""
    log: bool = False
    zero: bool = False
    left: float | None = None
    right: float | None = None
    empty: str = "no values yet"


class Chart(Static):
    """Draws its data for its size, only when one of them changed."""

    DEFAULT_CSS = "Chart { width: 1fr; height: 1fr; min-height: 4; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(markup=False, id=id, classes=classes)
        self._data = ChartData()
        self._drawn: tuple[ChartData, int, int, Content] | None = None

    def show(self, data: ChartData) -> None:
        """Show other data."""
        if data != self._data:
            self._data = data
            self.refresh()

    def render(self) -> Content:
        width, height = self.content_size
        if self._drawn is None or self._drawn[:3] != (self._data, width, height):
            plain = app_of(self).ascii_only
            self._drawn = (self._data, width, height, Content("\n").join(drawn(self._data, width, height, plain)))
        return self._drawn[3]


def drawn(data: ChartData, width: int, height: int, ascii_only: bool = False) -> list[Content]:
    """Return the lines of a chart: title, curves with labels at the left, axis with marks, steps.

    Args:
        ascii_only: draw curves without braille, whose points would all look alike.
    """
    if width < _LEFT + 8 or height < 4:
        return [_title(data, width)]
    across, down = width - _LEFT - 1, height - 3
    window = window_of(data.curves, data.log, data.left, data.right, data.zero)
    if window is None:
        empty = literal(" " * (_LEFT + 1) + data.empty, "$text-muted").truncate(width, ellipsis=True)
        return [_title(data, width), Content(""), empty]
    raster = Raster(across, down, ascii_only)
    for curve in data.curves:
        raster.draw(curve, window)
    labels = _labels(window, down, data.unit)
    lines = [_title(data, width)]
    for row, runs in enumerate(raster.lines()):
        label = f"{labels.get(row, ''):>{_LEFT}.{_LEFT}}"
        edge = "┤" if row in labels else "│"
        lines.append(Content.assemble((label + edge, "$text-muted"), *runs))
    return [*lines, _axis(data, window, across), _steps(window, across)]


def value_text(value: float, unit: str = "") -> str:
    """Return a value in at most seven cells."""
    if unit == "%":
        return f"{value * 100:.3g} %"
    if unit == "B":
        for name in ("B", "kB", "MB", "GB", "TB"):
            if abs(value) < 999.5 or name == "TB":
                return f"{value:.3g} {name}"
            value /= 1000
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 0.9995 else f"{value:.3g} s"
    if unit in ("°C", "W"):
        return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value / 1000:.3g} k{unit}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _title(data: ChartData, width: int) -> Content:
    words = [Content.styled(word, style) for word, style in data.legend]
    parts = [literal(data.title, "bold"), *words]
    return Content("  ").join(parts).truncate(width, ellipsis=True) if data.title or words else Content("")


def _labels(window: Window, down: int, unit: str) -> dict[int, str]:
    most = max(2, min(6, down // 2 - 1))
    found: dict[int, str] = {}
    for value in ticks(window, most):
        row = round((1 - window.up(value)) * (down - 1))
        if 0 <= row < down:
            found[row] = value_text(0.0 if abs(value) < 1e-12 * max(abs(window.top), 1e-300) else value, unit)
    return found


def _axis(data: ChartData, window: Window, across: int) -> Content:
    cells = [("─", "$text-muted")] * across
    for mark in data.marks:
        place = window.across(mark.step)
        if 0 <= place <= 1:
            cells[min(across - 1, int(place * across))] = (mark.sign, mark.style)
    return Content.assemble((" " * _LEFT + "└", "$text-muted"), *together(cells))


def _steps(window: Window, across: int) -> Content:
    first, last = f"{math.floor(window.left)}", f"step {math.ceil(window.right)}"
    middle = f"{round((window.left + window.right) / 2)}"
    room = across - len(first) - len(last)
    text = first + (middle.center(room) if room > len(middle) + 4 else " " * max(1, room)) + last
    return literal(" " * (_LEFT + 1) + text[:across], "$text-muted")
