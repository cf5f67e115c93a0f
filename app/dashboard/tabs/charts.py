"""Charts with axes around :mod:`app.dashboard.braille`; and the third tab: every series, with zoom, smoothing and an
earlier run for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from app.dashboard.braille import SAMPLES, Curve, Raster, Window, ticks, window_of
from app.dashboard.reader import Picture
from app.dashboard.tabs.chart_values import LABEL_CELLS, value_text
from app.dashboard.tabs.pane import Pane
from app.dashboard.tabs.ribbons import FIGURES_WIDTH, Strip, margin, strip_lines, strips
from app.run_view.metrics import RATES, metric_text
from app.run_view.plan_vs_actual import at_predicted_pace, pace_of
from app.run_view.ribbon import rate_of_run, series_of_member, series_of_run
from app.run_view.run_series import SNAPSHOTS, Point, Series, newest, series_names, smoothed
from app.run_view.run_state import RunState
from app.run_view.tables.evaluations import evaluated_series, old_step
from app.run_view.tables.machine_changes import machine_changes
from app.run_view.timeline import chronological
from app.shell.folding import wrapped
from app.shell.keys import WIDE, Key
from app.shell.row_table import RowTable
from app.shell.terminal_app import app_of
from app.shell.text import TableColumn, TableRow, literal, together
from profiles.quantities import setting_text, share_text

_LEAST_ROWS = 4
"""Fewest rows of a curve, before machines are drawn under it."""
LEAST_CHART = 3 + _LEAST_ROWS
"""Fewest lines of a chart; where two would be lower, one is shown."""
_LEAST_SEEN = 3
"""Fewest cells of a line that can be taken for one."""
BAND_STYLE = "$primary 45%"
"""Style of the band from least to greatest."""
_MOST_MARKS = 24
"""Most marks of synchronisations; more would form a line."""


@dataclass(frozen=True)
class AxisMark:
    """A sign on the step axis."""

    step: float
    sign: str
    style: str


def marks(state: RunState) -> tuple[AxisMark, ...]:
    """Return the signs on the step axis: the newest synchronisations, evaluations, machines lost and back."""
    syncs = sorted({sync.step for member in state.members.values() for sync in member.recent_syncs})
    axis_marks = [AxisMark(step, "┴", "$text-muted") for step in syncs[-_MOST_MARKS:]] if len(syncs) > 1 else []
    evaluated = [
        entry.step for entry in chronological(state.timeline) if entry.kind == "evaluation" and entry.step >= 0
    ]
    axis_marks += [AxisMark(step, "◆", "$text-accent") for step in evaluated]
    for step, entry in machine_changes(state):
        sign = ("+", "bold $text-success") if entry.is_arrival else ("✗", "bold $text-error")
        axis_marks.append(AxisMark(step, *sign))
    return tuple(axis_marks)


@dataclass(frozen=True)
class ChartData:
    """The content of a chart."""

    title: str = ""
    curves: tuple[Curve, ...] = ()
    """In drawing order: the first one is at the back."""
    marks: tuple[AxisMark, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    """Words beside the title, with styles."""
    promised: tuple[Curve, ...] = ()
    """Those of the curves that a plan predicted: named beside the title where they can be seen under the others."""
    unit: str = ""
    """``%`` for shares, ``B`` for bytes, ``s`` for seconds; empty: a plain number."""
    log: bool = False
    zero: bool = False
    left: float | None = None
    right: float | None = None
    empty: str = "no values yet"
    strips: tuple[Strip, ...] = ()
    """Machines, under the axis."""
    shows_figures: bool = False
    """Whether the figures of the machines stand at their right."""


class Chart(Static):
    """Draws its data; only when the data or the size has changed."""

    DEFAULT_CSS = "Chart { width: 1fr; height: 1fr; min-height: 4; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(markup=False, id=id)
        self._data = ChartData()
        self._drawn: tuple[ChartData, int, int, Content] | None = None

    def show(self, data: ChartData) -> None:
        """Show new data."""
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
        ascii_only: draw curves without braille.
    """
    left, figures_width = (
        margin(data.strips, width, LABEL_CELLS),
        FIGURES_WIDTH if data.shows_figures and data.strips else 0,
    )
    head = _title(data, width, max(1, height - LEAST_CHART + 1))
    height -= max(0, len(head) - 1)  # the lines under them
    across, max_strips = width - left - 1 - figures_width, height - 3 - _LEAST_ROWS
    if across < 7 or height < 4:
        return head
    window = window_of(data.curves, data.log, data.left, data.right, data.zero)
    below = strip_lines(data.strips, window, left, across, max_strips, figures_width) if max_strips > 0 else []
    if window is None:
        margin_cells = " " * (left + 1)
        empty = [literal(margin_cells) + line for line in wrapped(literal(data.empty, "$text-muted"), width - left - 1)]
        return [*head, Content(""), *empty[: height - 2], *([Content("")] if below else []), *below]
    down = height - 3 - len(below)
    raster = Raster(across, down, ascii_only)
    for curve in data.curves:
        raster.draw(curve, window)
    if hidden := [curve for curve in data.promised if raster.cells_of(curve) < _LEAST_SEEN]:
        curves = tuple(curve for curve in data.curves if curve not in hidden)
        return drawn(replace(data, curves=curves, promised=()), width, height + len(head) - 1, ascii_only)
    labels = _labels(window, raster, data.unit)
    lines = head
    for row, line in enumerate(raster.lines()):
        label = f"{labels.get(row, ''):>{left}.{left}}"
        edge = "┤" if row in labels else "│"
        lines.append(Content.assemble((label + edge, "$text-muted"), line))
    busy = below and any(strip.figures.endswith("%") for strip in data.strips)
    steps = _steps(window, across) + (f"{'samples  wait':>{figures_width}}" if busy and figures_width else "")
    axis, steps_line = _axis(data, window, across, left), literal(" " * (left + 1) + steps, "$text-muted")
    return [*lines, axis, *below, steps_line]


def ghost(picture: Picture, name: str, points: Sequence[Point]) -> list[Curve]:
    """Return what the plan predicted of a series, as a line to lie under it; none where it predicted nothing.

    The plan predicts no loss, only the time: the line of the loss is the loss at the predicted pace.
    """
    prediction = picture.prediction
    if prediction is None or not points:
        return []
    if name != "loss":
        value = prediction.figures.get(name)
        ends = () if value is None else (points[0].step, points[-1].step)
        shown = [Point(step, value, value, value) for step in ends if value is not None]
    else:
        pace = pace_of(picture.state)
        shown = at_predicted_pace(points, pace, prediction) if pace else []
    return [Curve(shown, "$text-muted", pattern=2)] if shown else []


def predicted_legend(lines: Sequence[Curve]) -> tuple[tuple[str, str], ...]:
    """Return the legend of :func:`ghost`."""
    return tuple((sample("promised", line), line.style) for line in lines)


def sample(words: str, curve: Curve) -> str:
    """Return a legend entry: a sign of the curve's pattern before the words."""
    return f"{SAMPLES[curve.pattern % len(SAMPLES)]} {words}"


def _title(data: ChartData, width: int, max_lines: int) -> list[Content]:
    """Return title and legend, as many to a line as fit; the last line counts those that find no room."""
    titles = [literal(data.title, "bold")] if data.title else []
    legend = (*predicted_legend(data.promised), *data.legend)
    pieces = [*titles, *(Content.styled(word, style) for word, style in legend)]
    lines = [Content("")]
    for number, piece in enumerate(pieces):
        longer = Content("  ").join([lines[-1], piece]) if lines[-1] else piece
        if longer.cell_length > width and lines[-1]:
            if len(lines) == max_lines:
                more = literal(f"  and {len(pieces) - number} more", "$text-muted")
                return [*lines[:-1], lines[-1].truncate(width - more.cell_length, ellipsis=True) + more]
            lines.append(piece)
        else:
            lines[-1] = longer
    return [line.truncate(width, ellipsis=True) for line in lines]


def _labels(window: Window, raster: Raster, unit: str) -> dict[int, str]:
    """Return the axis labels by row: each stands where its value is drawn."""
    max_labels = max(2, min(6, raster.height // 2 - 1))
    values = [
        0.0 if abs(value) < 1e-12 * max(abs(window.top), 1e-300) else value for value in ticks(window, max_labels)
    ]
    return {raster.line_of(value, window): value_text(value, unit) for value in values}


def _axis(data: ChartData, window: Window, across: int, left: int) -> Content:
    cells = [("─", "$text-muted")] * across
    for mark in data.marks:
        position = window.across(mark.step)
        if 0 <= position <= 1:
            cells[min(across - 1, int(position * across))] = (mark.sign, mark.style)
    return Content.assemble((" " * left + "└", "$text-muted"), together(cells))


def _steps(window: Window, across: int) -> str:
    start, end = f"{math.floor(window.left)}", f"step {math.ceil(window.right)}"
    if window.left == window.right:
        return f"{end.center(across)[:across]:{across}}"
    middle = f"{round((window.left + window.right) / 2)}" if window.right - window.left > 1 else ""
    spare = across - len(start) - len(end)
    text = start + (middle.center(spare) if spare > len(middle) + 4 else " " * max(1, spare)) + end
    return f"{text[:across]:{across}}"


# -------------------------------------------------------------------------------------------------------------- the tab


SERIES_COLUMNS = (
    TableColumn("name", "series", max_width=20, min_width=8, folds=True),
    TableColumn("value", "newest", right=True, min_width=5, rank=1),
)
STRENGTHS = (0.0, 0.6, 0.9, 0.98)
ZOOMS = (1.0, 0.5, 0.25, 0.1, 0.02)
COLOURS = ("$text-primary", "$text-success", "$text-accent", "$text-warning", "$text-secondary", "$text-error")
UNITS = {
    "wait share": "%",
    "processor": "%",
    "memory": "B",
    "device memory": "B",
    "bytes/step": "B",
    "sync bytes": "B",
    "step time": "s",
    "sync time": "s",
    "sync wait": "s",
    SNAPSHOTS: "s",
    "temperature": "°C",
    "power": "W",
}


def unit_of(name: str, state: RunState) -> str:
    """Return the unit of a series."""
    return "%" if evaluated_series(state).get(name) in RATES else UNITS.get(name, "")


def newest_text(picture: Picture, name: str, with_step: bool = True) -> str:
    """Return the newest value of a series; with its step where later evaluations of other splits exist."""
    state = picture.state
    if name == "loss":
        return metric_text(name, state.loss)
    if name == "wait share":  # as Machines and Network say it
        return "-" if (waiting := state.waiting_share) is None else share_text(waiting)
    value = rate_of_run(state).newest if name == "samples/s" else newest(state.curves, name)
    if value is None:
        return "-"
    old_at, metric = old_step(state, name), evaluated_series(state).get(name, "")
    words = metric_text(metric, value) if metric else value_text(value, unit_of(name, state))
    return words + (f" at {old_at}" if with_step and old_at is not None else "")


def curve_of(series: Series, style: str, strength: float, pattern: int = 0, band: str = "") -> Curve:
    """Return the curve of a series, smoothed where it has a value in most steps."""
    points = series.points()
    dense = len(points) > 1 and points[-1].step - points[0].step < 4 * series.width * len(points)
    shown = smoothed(points, strength) if dense else points
    return Curve(shown, style, band, gap=8.0 * series.width if dense else float("inf"), pattern=pattern)


def member_curves(name: str, picture: Picture, strength: float) -> tuple[list[Curve], list[tuple[str, str]]]:
    """Return a curve for each machine that has a series, and the legend."""
    ranks = [rank for rank in sorted(picture.state.curves) if name in picture.state.curves[rank]]
    curves = [
        curve_of(series_of_member(picture.state, rank, name), COLOURS[index % len(COLOURS)], strength, index)
        for index, rank in enumerate(ranks)
    ]
    return curves, [(sample(picture.name(rank), curve), curve.style) for rank, curve in zip(ranks, curves)]


class ChartsPane(Pane):
    """A list of all series, and the chart of the one under the cursor."""

    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("l", "pane('l')", "Log", "A logarithmic scale, or a linear one."),
        Key("w", "pane('w')", "Smooth", "Smooth more; after the strongest, not at all."),
        Key("m", "pane('m')", "Machines", "One line per machine, or all together."),
        Key("z", "pane('z')", "Zoom", "The last half, quarter, tenth, fiftieth, and the whole again."),
        Key("left_square_bracket", "pane('[')", "Back", "Move the zoomed part to the left.", shown=False),
        Key("right_square_bracket", "pane(']')", "Forth", "Move the zoomed part to the right.", shown=False),
        Key("u", "pane('u')", "Former", "Draw the next older run of this profile beneath."),
    )
    ABOUT = "Pick a series with the arrows; '/' filters them. The line is smoothed, the band is least to greatest."
    SCOPED_CSS = False
    DEFAULT_CSS = """
    ChartsPane #series { width: 32; height: 100%; margin-right: 1; }
    ChartsPane Horizontal { height: 1fr; }
    .-narrow ChartsPane #series { width: 29; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._log = self._per_machine = False
        self._strength = 2
        self._zoom = 0
        self._shift = 0.0
        """Shift of the zoomed part to the left, in units of its width."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield RowTable(SERIES_COLUMNS, empty="Series appear here with the first step.", id="series")
            yield Chart(id="chart")

    def draw(self, picture: Picture) -> None:
        rows, is_wide = [], self.app.size.width >= WIDE
        for name in series_names(picture.state.curves):
            value = newest_text(picture, name, with_step=is_wide)  # else the column would not fit
            rows.append(TableRow(name, (literal(name), Content.styled(value, "$text-muted"))))
        self.query_one(RowTable).show(rows)
        name = self.query_one(RowTable).cursor
        self.query_one(Chart).show(self._data(name, picture) if name else ChartData(empty=""))

    def on_row_table_moved(self) -> None:
        self.draw_again()

    def press(self, key: str) -> None:
        if key == "l":
            self._log = not self._log
        elif key == "m":
            self._per_machine = not self._per_machine
        elif key == "w":
            self._strength = (self._strength + 1) % len(STRENGTHS)
        elif key == "z":
            self._zoom, self._shift = (self._zoom + 1) % len(ZOOMS), 0.0
        elif key in "[]":
            max_shift = 1 / ZOOMS[self._zoom] - 1
            self._shift = min(max_shift, max(0.0, self._shift + (0.5 if key == "[" else -0.5)))
        self.draw_again()

    def _data(self, name: str, picture: Picture) -> ChartData:
        left = right = None
        if self._zoom:
            last_step = max((member.step for member in picture.state.members.values()), default=0)
            width = max(1.0, last_step * ZOOMS[self._zoom])
            right = last_step - self._shift * width
            left = max(0.0, right - width)
        curves, legend = self._curves(name, picture)
        lines = ghost(picture, name, curves[-1].points) if curves and not self._per_machine else []
        curves[-1:-1] = lines
        former = picture.former.curves.get(name) if picture.former else None
        if former is not None and picture.former is not None:
            curves.insert(0, curve_of(former, "$text-muted", STRENGTHS[self._strength], 1))
            legend.append((sample(picture.former.name, curves[0]), "$text-muted"))
        view_words = [f"smoothed {setting_text(STRENGTHS[self._strength])}"] if STRENGTHS[self._strength] else []
        view_words += ["log"] if self._log else []
        view_words += [f"zoom {setting_text(1 / ZOOMS[self._zoom])}x"] if self._zoom else []
        legend += [(word, "$text-muted") for word in view_words]
        old_at = old_step(picture.state, name)
        return ChartData(
            title=name if old_at is None else f"{name}, newest at step {old_at}",
            curves=tuple(curves),
            marks=marks(picture.state),
            legend=tuple(legend),
            promised=tuple(lines),
            unit=unit_of(name, picture.state),
            log=self._log,
            left=left,
            right=right,
            strips=strips(picture),
        )

    def _curves(self, name: str, picture: Picture) -> tuple[list[Curve], list[tuple[str, str]]]:
        if self._per_machine:
            curves, legend = member_curves(name, picture, STRENGTHS[self._strength])
            if len(curves) > 1:
                return curves, legend
        series = series_of_run(picture.state, name)
        return [curve_of(series, "bold $text-primary", STRENGTHS[self._strength], band=BAND_STYLE)], []
