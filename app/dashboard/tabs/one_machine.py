"""Details of the machine under the cursor: figures that the table has no room for, charts, newest log lines."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content

from app.dashboard.braille import Curve
from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import LEAST_CHART, Chart, ChartData, unit_of
from app.dashboard.tabs.pane import Words, state_of
from app.run_view.ribbon import series_of_member
from app.run_view.run_series import smoothed
from app.shell.text import literal, muted
from profiles.quantities import bytes_text

MIN_WIDTH = 118
"""Width of the tab, in cells, from which on the details are shown."""
_CHARTS = ("samples/s", "wait share", "temperature")
_TALL, _LINES, _MORE_LINES = 32, 4, 8
"""Height from which on more log lines are shown, and the number of log lines below and above it."""
_LABEL = 12
_SMOOTHING = 0.6


class OneMachine(Vertical):
    """Figures, curves and the newest lines of the log of one machine."""

    SCOPED_CSS = False
    DEFAULT_CSS = """
    OneMachine { width: 44%; max-width: 76; height: 1fr; margin-left: 2; padding-left: 2; border-left: solid $border; }
    OneMachine #facts { height: auto; padding-bottom: 1; }
    OneMachine Chart { height: 1fr; max-height: 12; margin-bottom: 1; }
    OneMachine #log { height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def compose(self) -> ComposeResult:
        yield Words(id="facts")
        for index in range(len(_CHARTS)):
            yield Chart(id=f"chart{index}")
        yield Words(id="log")

    def show(self, rank: int, picture: Picture, facts: Sequence[tuple[str, Content]]) -> None:
        """Show a member.

        Args:
            facts: labels and values that do not fit into the table.
        """
        width, height = self.size
        lines = _facts(rank, picture, facts, width)
        self.query_one("#facts", Words).show(Content("\n").join(lines))
        max_lines = _MORE_LINES if height >= _TALL else _LINES
        machine_lines = [line for line in picture.lines if line.machine == picture.name(rank)][-max_lines:]
        styles = {"error": "$text-error", "warning": "$text-warning", "info": "$text-muted"}
        log_lines = [
            literal(line.text, styles[line.level]).truncate(max(1, width), ellipsis=True) for line in machine_lines
        ]
        log_lines = log_lines or [muted("it has logged nothing yet")]
        self.query_one("#log", Words).show(Content("\n").join(log_lines))
        charts = [data for name in _CHARTS if (data := _chart_data(rank, picture, name)) is not None]
        max_charts = max(1, (height - len(lines) - 1 - len(log_lines)) // (LEAST_CHART + 1))
        for index, chart in enumerate(self.query(Chart)):
            chart.display = index < min(len(charts), max_charts)
            if chart.display:
                chart.show(charts[index])


def _facts(rank: int, picture: Picture, facts: Sequence[tuple[str, Content]], width: int) -> list[Content]:
    """Return name, status and device in a line, and the figures in two columns."""
    member = picture.state.members[rank]
    head = [literal(picture.name(rank), "bold"), state_of(member, picture), muted(member.device)]
    sums = member.total
    moved = [("sent", sums.bytes_sent), ("received", sums.bytes_received)]
    labelled = [*facts, *((label, literal(bytes_text(count))) for label, count in moved if count)]
    cells = [
        Content.assemble((f"{label:<{_LABEL}}", "$text-muted"), value)
        for label, value in labelled
        if value.plain != "-"
    ]
    half = max(_LABEL + 8, width // 2)
    lines = [
        Content("").join([left.truncate(half - 1).pad_right(max(1, half - left.cell_length)), *right])
        for left, *right in (cells[index : index + 2] for index in range(0, len(cells), 2))
    ]
    return [Content("  ").join(piece for piece in head if piece), *lines]


def _chart_data(rank: int, picture: Picture, name: str) -> ChartData | None:
    """Return the chart of one series of a machine; ``None`` where it has no values."""
    series = series_of_member(picture.state, rank, name)
    points = series.points()
    if not points:
        return None
    unit = unit_of(name, picture.state)
    curve = Curve(smoothed(points, _SMOOTHING), "$text-success", gap=8.0 * series.width)
    return ChartData(name, (curve,), unit=unit, zero=name != "temperature")
