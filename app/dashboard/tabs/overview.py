"""The first tab: the run at a glance; and the sixth: its timeline, newest first."""

from __future__ import annotations

import time
from collections.abc import Iterator

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content

from app.console import visible
from app.dashboard.braille import Curve
from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import (
    BAND_STYLE,
    LEAST_CHART,
    Chart,
    ChartData,
    ghost,
    marks,
    newest_text,
    sample,
)
from app.dashboard.tabs.network import link_map
from app.dashboard.tabs.pane import Pane, Words
from app.dashboard.tabs.ribbons import strips
from app.dashboard.tabs.samples import sample_lines
from app.report import failure_hint
from app.run_view.figures import rate_text
from app.run_view.headline import headline
from app.run_view.ribbon import rate_of_run
from app.run_view.run_series import of_run, series_names, smoothed
from app.run_view.run_state import RunState
from app.run_view.tables.evaluations import (
    evaluated_series,
    evaluation_lines,
    evaluation_text,
    learnt_by_heart,
    old_step,
)
from app.run_view.tables.exchanges import exchanges
from app.run_view.timeline import TimelineEntry, entry_text
from app.shell.folding import folded, wrapped
from app.shell.row_table import RowTable
from app.shell.text import StatusMark, TableColumn, TableRow, bar, literal, together
from profiles.errors import counted
from profiles.installation import relative_path
from profiles.quantities import bytes_text, clock_text, duration_text, loss_text, share_text, time_text

COLUMNS = (
    TableColumn("time", "time", max_width=8, min_width=8),
    TableColumn("kind", "what", max_width=14, min_width=12),
    TableColumn("words", "", max_width=400, min_width=20, folds=True),
)
MOST_ROWS = 400
MARKS = {
    "run": StatusMark.RUNNING,
    "machine": StatusMark.WAITING,
    "lost": StatusMark.LOST,
    "back": StatusMark.ONLINE,
    "error": StatusMark.PROBLEM,
    "warning": StatusMark.WARNING,
    "evaluation": StatusMark.DONE,
    "snapshot": StatusMark.DONE,
    "request": StatusMark.CHOSEN,
    "path": StatusMark.WORKING,
}
ANSWERS = {"done": StatusMark.DONE, "refused": StatusMark.PROBLEM}
"""By the outcome of a request."""


class EventsPane(Pane):
    """Launches, synchronisations, evaluations, snapshots, requests, machines lost and back, ways that changed."""

    ABOUT = "Events, newest first; '/' filters. All of them are in events.jsonl."
    DEFAULT_CSS = "EventsPane RowTable { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._seen: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield RowTable(COLUMNS, empty="Nothing has happened yet.", id="happened")

    def draw(self, picture: Picture) -> None:
        state = picture.state
        sync_counts = tuple(member.work.syncs for member in state.members.values())
        seen = (state.timeline, sync_counts)
        if seen == self._seen:
            return
        self._seen = seen
        rows = [_row(entry, picture) for entry in state.entries[-MOST_ROWS:]]
        all_rows = sorted([*rows, *sync_rows(picture)], key=lambda pair: pair[0], reverse=True)
        self.query_one(RowTable).show(row for _, row in all_rows[:MOST_ROWS])


def _row(entry: TimelineEntry, picture: Picture) -> tuple[float, TableRow]:
    cells = (literal(clock_text(entry.time), "$text-muted"), _mark(entry).show(entry.kind), _words(entry, picture))
    hint = (literal(entry.hint, "$text-accent"),) if entry.hint else ()
    return entry.time, TableRow(f"{entry.time}/{entry.member}/{entry.kind}/{entry.text}", cells, hint)


def sync_rows(picture: Picture) -> Iterator[tuple[float, TableRow]]:
    """Yield a row an exchange at the time of its first report, with the figures of tab 4."""
    for row in exchanges(picture.state):
        words = f"round {row.number} at step {row.step}: {counted(row.members, 'machine')}"
        cells = (
            literal(clock_text(row.began), "$text-muted"),
            StatusMark.WORKING.show("sync"),
            literal(f"{words}, {time_text(row.seconds)}, {bytes_text(row.sent)} sent"),
        )
        yield row.began, TableRow(f"sync/{row.step}/{row.number}", cells)


def entry_line(entry: TimelineEntry, picture: Picture) -> Content:
    """Return time, symbol and text of an entry in one line."""
    symbol = _mark(entry).show("")
    return Content.assemble((clock_text(entry.time), "$text-muted"), "  ", symbol, " ", _words(entry, picture))


def _mark(entry: TimelineEntry) -> StatusMark:
    return ANSWERS.get(entry.outcome, MARKS[entry.kind])


def _words(entry: TimelineEntry, picture: Picture) -> Content:
    is_trouble = _mark(entry) is StatusMark.PROBLEM
    return literal(entry_text(entry, picture.name), "$text-error" if is_trouble else "")


SMOOTHING = 0.8
_SHORTEST_BAR, _LONGEST_BAR = 6, 18
_TALL = 36
"""Height from which on the map of the machines is shown."""
_AROUND = 3
"""Lines outside the charts and the texts under them."""
_LOWEST_CHART = 5
"""Lines that are left of the chart above a long result."""
_ROOMY = 26
"""Most lines of a result from which on it shows three samples."""


class OverviewPane(Pane):
    """Progress, loss, machines, latest events."""

    ABOUT = (
        "Loss of all machines (line: smoothed, band: least to greatest), below it synchronisations (┴), evaluations "
        "(◆), machines lost (✗) and back (+). Then a line for each machine, on the same axis: the higher, the more it "
        "computed and the less it waited; lost (✗) and why, back (+), snapshot (◇); at the right its samples/s and its "
        "waiting. Dotted: what the plan promised, and the loss as it would be at the pace that was promised."
    )
    SCOPED_CSS = False
    DEFAULT_CSS = """
    OverviewPane #progress { height: 1; }
    OverviewPane #charts { height: 1fr; margin-top: 1; }
    OverviewPane #others { width: 40%; display: none; }
    .-wide OverviewPane #others { display: block; margin-left: 2; }
    OverviewPane #links { height: auto; margin-top: 1; }
    OverviewPane #latest { height: auto; margin-top: 1; text-wrap: nowrap; }
    """

    def compose(self) -> ComposeResult:
        yield Words(id="progress")
        with Horizontal(id="charts"):
            yield Chart(id="loss")
            with Vertical(id="others"):
                yield Chart(id="error-rate")
                yield Chart(id="rate")
                yield Words(id="links")
        yield Words(id="latest")

    def draw(self, picture: Picture) -> None:
        state = picture.state
        width, height = self.size
        ghost_at = picture.prediction.share(state, picture.now) if picture.prediction else None
        self.query_one("#progress", Words).show(progress_line(state, picture.now, width, ghost_at))
        self.query_one("#loss", Chart).show(loss_chart(picture))
        tall = height >= 26
        latest = _result(picture, height - _AROUND - _LOWEST_CHART, width) or _latest(picture, 5 if tall else 2, width)
        self.query_one("#latest", Words).show(latest)
        if self.screen.has_class("-wide"):
            error, rate = self.query_one("#error-rate", Chart), self.query_one("#rate", Chart)
            fits_both = height - latest.plain.count("\n") - 1 - _AROUND >= 2 * LEAST_CHART
            error.display = fits_both or bool(state.evaluations)
            rate.display = fits_both or not error.display
            links = self.query_one("#links", Words)
            drawing = link_map(picture, links.size.width or width * 2 // 5, height)
            links.display = height >= _TALL and bool(drawing)
            links.show(drawing)
            error.show(_error_chart(picture))
            rate.show(_rate_chart(picture))


def loss_chart(picture: Picture) -> ChartData:
    """Return the chart of the loss of all members, with marks of events."""
    state = picture.state
    series = of_run(state.curves, "loss")
    points = series.points()
    invalid = (("NaN or infinite at times", "$text-error"),) if series.invalid else ()
    # Ready machines that wait for the first evaluation would look as if they hung.
    measured_first = picture.plan is not None and picture.plan.profile.evaluation.eval_before
    gap = 8.0 * series.width
    line = Curve(smoothed(points, SMOOTHING), "bold $text-primary", BAND_STYLE, gap)
    lines = ghost(picture, "loss", line.points)
    empty = "the loss appears here with the first step"
    if picture.launched:
        empty = "a script reports no steps and no loss; tab 5 shows what it prints"
    elif measured_first and any(member.status == "ready" for member in state.members.values()):
        empty = "the model is evaluated first; then the loss appears here"
    return ChartData(
        title="loss" if state.loss is None else f"loss {loss_text(state.loss)}",
        curves=(*lines, line) if points else (),
        marks=marks(state),
        legend=invalid,
        promised=tuple(lines),
        empty=empty,
        strips=strips(picture),
        shows_figures=True,
    )


def progress_line(state: RunState, now: float, width: int, predicted_share: float | None = None) -> Content:
    """Return the progress of the run, with the predicted progress in the bar (┃); empty before training."""
    if state.total_steps is None:
        return Content("")
    share = state.step / max(1, state.total_steps)
    took = f"trained {duration_text(state.seconds(now))}" if state.started else ""
    step, done = f"step {state.steps_text}", share_text(share)
    spare, figures = 0, ""
    full, bare, brief = _reached(state)
    rate = rate_text(state)
    for words in ((rate, took, full), (rate, took, bare), (took, bare), (took, brief), (brief,)):
        figures = "  ".join(filter(None, words))
        spare = width - len("  ".join((step, "", done, figures)))
        if spare >= _SHORTEST_BAR:
            break
    drawn = bar(share, max(_SHORTEST_BAR, min(_LONGEST_BAR, spare)))
    signs = [(sign, "$text-primary") for sign in drawn]
    if predicted_share is not None and state.ended is None:
        signs[min(len(signs) - 1, int(predicted_share * len(signs)))] = ("┃", "$text-muted")
    line = Content.assemble((step, "bold"), "  ", together(signs), f"  {done}  ", literal(figures, "$text-muted"))
    return line.truncate(max(1, width), ellipsis=True)


def _reached(state: RunState) -> tuple[str, str, str]:
    """Return the text of the newest evaluation, ever shorter."""
    if not state.evaluations:
        return "", "", ""
    split, results = min(state.evaluations.items(), key=lambda item: (-item[1].last.step, item[0] != "validation"))
    texts = evaluation_text(results, split), evaluation_text(results)
    before = "" if results.last.step else " before"
    full, bare = (text + before for text in texts)
    return full, bare, bare.replace(" of the texts", "")


def _error_chart(picture: Picture) -> ChartData:
    state = picture.state
    all_names, metrics = series_names(state.curves), evaluated_series(state)
    rates = [name for name in all_names if metrics.get(name) in ("wer", "cer")]
    shown = rates[:2] or [name for name in all_names if metrics.get(name) == "loss"][:2]
    shown.sort(key=lambda name: old_step(state, name) is not None)  # the older one is cut first
    styles = ("$text-accent", "$text-secondary")
    curves, legend = [], []
    for index, (name, style) in enumerate(zip(shown, styles)):
        points = of_run(state.curves, name).points()
        curves.append(Curve(points, style, pattern=index))
        old_at = old_step(state, name)
        value = newest_text(picture, name) if old_at is None else f"at {old_at}"
        legend.append((sample(f"{name} {value}".strip(), curves[-1]), style))
    empty = "" if picture.launched else "evaluations appear here"
    return ChartData(
        curves=tuple(curves), legend=tuple(legend), unit="%" if rates else "", zero=bool(rates), empty=empty
    )


def _rate_chart(picture: Picture) -> ChartData:
    state = picture.state
    series = rate_of_run(state)
    points = smoothed(series.points(), 0.6)
    lines = ghost(picture, "samples/s", points)
    curves = (*lines, Curve(points, "$text-success", gap=8.0 * series.width)) if points else ()
    return ChartData("samples/s", curves, promised=tuple(lines), zero=True)


def _result(picture: Picture, max_lines: int, width: int) -> Content:
    """Return the results of a completed run (time, evaluations, samples, model, next key) or the error of a failed one;
    empty for others. Sentences are whole; samples and evaluations are left out where there is no room."""
    ended = picture.ended
    if ended is not None and ended.outcome.status == "failed":
        messages = (literal(ended.outcome.message, "$text-error"), literal(f"hint: {failure_hint(ended)}"))
        return Content("\n").join([line for message in messages for line in wrapped(message, max(20, width))])
    if ended is None or ended.outcome.status != "completed":
        return Content("")
    lines = [literal(line, "$text-success") for line in evaluation_lines(ended.state)]
    figures = [piece for line in lines for piece in wrapped(line, max(20, width))]
    model = _path_lines("model", relative_path(ended.model), width) if ended.model else []
    if (comparison := picture.plan_vs_actual) is not None and str(comparison) not in headline(picture).details:
        figures[:0] = wrapped(literal(str(comparison)), max(20, width))
    following = Content.assemble(("next    ", "$text-muted"), literal("n: try the model, open the report, go on"))
    shown = sample_lines(picture.showcase, width, 3 if max_lines >= _ROOMY else 1) if picture.showcase else []
    if len(figures) + len(shown) + len(model) + 1 > max_lines:
        shown = []
    return Content("\n").join([*figures, *shown, *model, following])


def _path_lines(title: str, path: str, width: int) -> list[Content]:
    pieces = folded(path, max(20, width - 8))
    return [
        Content.assemble((f"{title if not n else '':8}", "$text-muted"), literal(piece))
        for n, piece in enumerate(pieces)
    ]


def _latest(picture: Picture, entries: int, width: int) -> Content:
    by_heart = [StatusMark.WARNING.show(visible(line)) for line in learnt_by_heart(picture.state)]
    newest = by_heart + [entry_line(entry, picture) for entry in picture.state.entries[-entries + len(by_heart) :]]
    happened = [line for entry in newest for line in wrapped(entry, max(20, width))]
    return Content("\n").join(happened) if happened else literal(time.strftime("%H:%M:%S  nothing yet"), "$text-muted")
