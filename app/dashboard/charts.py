"""The third tab: every series, near or far, rough or smooth, with a former run under it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content

from app.dashboard.braille import Curve
from app.dashboard.chart import Chart, ChartData, value_text
from app.dashboard.overview import marks
from app.dashboard.pane import Pane
from app.dashboard.reader import Picture
from app.figures import RATES, evaluated_series
from app.run_series import Series, names, newest, of_member, of_run, smoothed
from app.run_state import RunState
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.row_table import RowTable
from app.shell.text import literal

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
    "temperature": "°C",
    "power": "W",
}


def unit_of(name: str, state: RunState) -> str:
    """Return the unit of a series."""
    return "%" if evaluated_series(state).get(name) in RATES else UNITS.get(name, "")


class Charts(Pane):
    """A list of all series, and the one under the cursor."""

    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("l", "pane('l')", "Log", "A logarithmic scale, or a linear one."),
        Key("w", "pane('w')", "Smooth", "Smooth more; after the strongest, not at all."),
        Key("m", "pane('m')", "Machines", "One line per machine, or all together."),
        Key("z", "pane('z')", "Zoom", "The last half, quarter, tenth, fiftieth, and the whole again."),
        Key("left_square_bracket", "pane('[')", "Back", "Move the zoomed part to the left.", shown=False),
        Key("right_square_bracket", "pane(']')", "Forth", "Move the zoomed part to the right.", shown=False),
        Key("u", "pane('u')", "Former", "Draw the next older run of this profile beneath."),
    )
    ABOUT = (
        "Pick a series with the arrows; '/' filters them. The line is smoothed, the dots reach from least to greatest."
    )
    SCOPED_CSS = False
    DEFAULT_CSS = """
    Charts #series { width: 32; height: 100%; margin-right: 1; }
    Charts Horizontal { height: 1fr; }
    .-narrow Charts #series { width: 25; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._log = self._apart = False
        self._strength = 2
        self._zoom = 0
        self._shift = 0.0
        """How far the zoomed part is moved to the left, in parts of its own width."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            columns = (Column("name", "series", most=20, least=8), Column("value", "now", right=True, least=5, rank=1))
            yield RowTable(columns, empty="Series appear here with the first step.", id="series")
            yield Chart(id="chart")

    def draw(self, picture: Picture) -> None:
        every = names(picture.state.curves)
        self.query_one(RowTable).show([_row(name, picture) for name in every])
        name = self.query_one(RowTable).cursor
        self.query_one(Chart).show(self._data(name, picture) if name else ChartData(empty=""))

    def on_row_table_moved(self) -> None:
        self.draw_again()

    def press(self, key: str) -> None:
        if key == "l":
            self._log = not self._log
        elif key == "m":
            self._apart = not self._apart
        elif key == "w":
            self._strength = (self._strength + 1) % len(STRENGTHS)
        elif key == "z":
            self._zoom, self._shift = (self._zoom + 1) % len(ZOOMS), 0.0
        elif key in "[]":
            most = 1 / ZOOMS[self._zoom] - 1
            self._shift = min(most, max(0.0, self._shift + (0.5 if key == "[" else -0.5)))
        self.draw_again()

    def _data(self, name: str, picture: Picture) -> ChartData:
        left, right = self._part(picture)
        curves, legend = self._curves(name, picture)
        former = picture.former.curves.get(name) if picture.former else None
        if former is not None and picture.former is not None:
            curves.insert(0, self._curve(former, "$text-muted"))
            legend.append((f"- {picture.former.name}", "$text-muted"))
        how = [f"smoothed {STRENGTHS[self._strength]:g}"] if STRENGTHS[self._strength] else []
        how += ["log"] if self._log else []
        how += [f"zoom {1 / ZOOMS[self._zoom]:g}x"] if self._zoom else []
        legend += [(word, "$text-muted") for word in how]
        return ChartData(
            title=name,
            curves=tuple(curves),
            marks=marks(picture.state),
            legend=tuple(legend),
            unit=unit_of(name, picture.state),
            log=self._log,
            left=left,
            right=right,
        )

    def _part(self, picture: Picture) -> tuple[float | None, float | None]:
        if not self._zoom:
            return None, None
        last = max((member.step for member in picture.state.members.values()), default=0)
        width = max(1.0, last * ZOOMS[self._zoom])
        right = last - self._shift * width
        return max(0.0, right - width), right

    def _curves(self, name: str, picture: Picture) -> tuple[list[Curve], list[tuple[str, str]]]:
        ranks = [rank for rank in sorted(picture.state.curves) if name in picture.state.curves[rank]]
        if self._apart and len(ranks) > 1:
            styles = [COLOURS[place % len(COLOURS)] for place in range(len(ranks))]
            curves = [self._curve(of_member(picture.state.curves, rank, name), style)
                      for rank, style in zip(ranks, styles)]  # fmt: skip
            return curves, [(f"{picture.name(rank)}", style) for rank, style in zip(ranks, styles)]
        series = of_run(picture.state.curves, name)
        return [Curve(series.points(), "", "$primary 45%"), self._curve(series, "bold $text-primary")], []

    def _curve(self, series: Series, style: str) -> Curve:
        points = series.points()
        dense = len(points) > 1 and points[-1].step - points[0].step < 4 * series.width * len(points)
        shown = smoothed(points, STRENGTHS[self._strength]) if dense else points
        return Curve(shown, style, gap=8.0 * series.width if dense else float("inf"))


def _row(name: str, picture: Picture) -> Row:
    last = newest(picture.state.curves, name)
    value = "-" if last is None else value_text(last, unit_of(name, picture.state))
    return Row(name, (literal(name), Content.styled(value, "$text-muted")))
