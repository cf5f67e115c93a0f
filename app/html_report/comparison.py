"""A comparison of strategies as one HTML file: curves, and the tables that the command prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.comparison import Curve, StrategyComparison, StrategyResult
from app.html_report.charts import COLOURS, ReportChart, axes, drawn
from app.html_report.page import figure, whole_page
from app.html_report.sections import label, table, text
from app.run_view.run_series import OF_EXCHANGES
from profiles.errors import counted
from profiles.quantities import bytes_text, figure_text, loss_text, rate_figure, rate_text, time_text
from training.records.run_files import explain_errors, write_atomically
from training.strategies.costs import FEWEST_ROUNDS

NAME = "comparison.html"
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_BAND = "rgba(110, 118, 129, 0.16)"


def write_comparison(result: StrategyComparison, profile: str, members: int, folder: Path) -> Path:
    """Write the page atomically into the folder of a comparison, and return its path.

    Raises:
        BadInput: it cannot be written.
    """
    path = folder / NAME
    with explain_errors(path):
        write_atomically(path, comparison_page(result, profile, members).encode(), 0o600)
    return path


def comparison_page(result: StrategyComparison, profile: str, members: int) -> str:
    """Return the whole page."""
    charts = comparison_charts(result)
    best = f"best: <b>{text(result.best)}</b>, {text(why_best(result))}"
    tables = "".join(
        f"<h3>{text(section.title)}</h3>{table(section.header, section.rows, range(1, len(section.header)))}"
        for section in result_tables(result, members)
    )
    notes = "".join(f"<p>{text(line)}</p>" for line in remarks(result))
    content = (
        f"<header><h1>Strategies for {text(profile)}</h1><p>{best}</p></header><main>"
        f'<section><h2>Curves</h2><div class="charts">{"".join(map(figure, charts))}</div></section>'
        f"<section><h2>Figures</h2>{tables}{last_exchanged(result)}{notes}</section></main>"
    )
    return whole_page(f"strategies for {profile}", content, charts)


def comparison_charts(result: StrategyComparison) -> list[ReportChart]:
    """Return the loss over samples, and over predicted hours at each rate of the links."""
    shown = [row for row in result.rows if row.losses]
    rates = [times.mbit for times in next((row.times for row in shown if row.times), ())]
    losses = [_over_samples(shown), *(_over_time(shown, index, mbit) for index, mbit in enumerate(rates))]
    exchange_charts = (_exchanged(shown, name, description) for name, description in OF_EXCHANGES.items())
    return [*losses, *(chart for chart in exchange_charts if chart is not None)]


def last_exchanged(result: StrategyComparison) -> str:
    """Return a table of the last points of all exchange series; empty where there are none."""
    curves = [(row.strategy, [row.exchanged(name) for name in OF_EXCHANGES]) for row in result.rows if row.losses]
    rows = [
        (name, *(figure_text(curve[-1][1]) if curve else "-" for curve in row_curves))
        for name, row_curves in curves
        if any(row_curves)
    ]
    header = ("strategy", *OF_EXCHANGES)
    title = "<h3>at the last synchronisation, mean of the seeds</h3>"
    return title + table(header, rows, range(1, len(header))) if rows else ""


def _exchanged(rows: list[StrategyResult], name: str, description: str) -> ReportChart | None:
    traces = [_line(curve, row, number) for number, row in enumerate(rows) if (curve := row.exchanged(name))]
    layout = axes("samples of all members", name)
    return drawn(name.replace(" ", "-"), name.capitalize(), description, traces, **layout) if traces else None


def _over_samples(rows: list[StrategyResult]) -> ReportChart:
    traces: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        group = {"legendgroup": row.strategy}
        if len(row.runs) > 1:
            traces += [{**trace, **group} for trace in _band([run.curve for run in row.runs])]
        traces.append({**_line(row.curve, row, number), **group})
    note = "Mean of the seeds; the band holds all of them. Click a name in the legend to hide its line."
    return drawn("samples", "Loss over samples", note, traces, **axes("samples of all members", "loss"))


def _over_time(rows: list[StrategyResult], rate_index: int, mbit: float) -> ReportChart:
    timed = [(number, row) for number, row in enumerate(rows) if row.times]
    longest = max(row.times[rate_index].to_end for _, row in timed)
    unit, seconds = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 120 else ("seconds", 1.0)
    traces = []
    for number, row in timed:
        scale = row.times[rate_index].to_end / row.runs[0].samples / seconds
        traces.append(_line(tuple((samples * scale, loss) for samples, loss in row.curve), row, number))
    link_text = f"links of {rate_text(mbit)}" if mbit else "on the simulated machines"
    return drawn(
        f"time-{rate_index}", f"Loss over time, {link_text}", "By the cost model.", traces, **axes(unit, "loss")
    )


def _line(curve: Curve, row: StrategyResult, number: int) -> dict[str, Any]:
    finite_points = [(x, y) for x, y in curve if math.isfinite(y)]
    style = {"color": COLOURS[number % len(COLOURS)], "dash": _DASHES[number % len(_DASHES)]}
    x, y = [x for x, _ in finite_points], [y for _, y in finite_points]
    return {"x": x, "y": y, "mode": "lines+markers", "name": label(row.strategy), "line": style}


def _band(curves: list[Curve]) -> list[Mapping[str, Any]]:
    """Return the minimum and maximum of curves over their common points, as two invisible lines."""
    places = [dict(curve) for curve in curves]
    common = [x for x, _ in curves[0] if all(math.isfinite(points.get(x, math.inf)) for points in places)]
    edge = {"x": common, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    low, high = ([choose(points[x] for points in places) for x in common] for choose in (min, max))
    return [{**edge, "y": high}, {**edge, "y": low, "fill": "tonexty", "fillcolor": _BAND}]


@dataclass(frozen=True)
class ResultTable:
    """A table; all columns but the first hold figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def result_tables(result: StrategyComparison, members: int) -> list[ResultTable]:
    """Return the tables: losses, bytes and memory, and the times where some are known."""
    timed = [row for row in result.rows if row.times]
    return [_losses(result, members), *(_times(result, end) for end in (True, False) if timed)]


def remarks(result: StrategyComparison) -> list[str]:
    """Return remarks on figures that are missing or not reliable."""
    lines = []
    for row in result.rows:
        if row.refused or row.unpredicted:
            problem = "refused" if not row.losses else "seeds are missing" if row.refused else "no times"
            lines.append(f"{row.strategy}: {problem}: {row.refused or row.unpredicted}")
        if row.losses and row.rounds < FEWEST_ROUNDS:
            often = f"{counted(row.rounds, 'exchange')} in the whole run, one every {row.interval} steps"
            lines.append(f"{row.strategy}: {often}: too few to tell; train longer, or set its interval lower")
    return lines


def why_best(result: StrategyComparison) -> str:
    """Return the text of why the best strategy is the best."""
    best = next(row for row in result.rows if row.strategy == result.best)
    if not best.times:
        return "the lowest loss"
    slowest = min(times.mbit for times in best.times)
    condition = f"at {rate_text(slowest)}" if slowest else "on the simulated machines"
    return f"of those with about the lowest loss, the soonest {condition}"


def _losses(result: StrategyComparison, members: int) -> ResultTable:
    of = "" if result.split == "training" else f" on {result.split}"
    seeds = max(len(row.losses) for row in result.rows)
    seeds_text = f", mean ± deviation of {seeds} seeds" if seeds > 1 else ""
    title = f"loss{of} after {result.samples:.0f} samples, {members} members{seeds_text}"
    rows = tuple((row.strategy, *(_cells(row) if row.losses else ("refused", "-", "-"))) for row in result.rows)
    return ResultTable(title, ("strategy", "loss", "each sent", "each keeps"), rows)


def _cells(row: StrategyResult) -> tuple[str, str, str]:
    loss = loss_text(row.loss) if math.isfinite(row.loss) else "not a number"
    if row.spread is not None:
        loss += f" ± {figure_text(row.spread)}"
    return loss, bytes_text(row.sent), "-" if row.memory is None else bytes_text(row.memory)


def _times(result: StrategyComparison, to_end: bool) -> ResultTable:
    rates = [times.mbit for times in next(row.times for row in result.rows if row.times)]
    origin = "predicted for links in Mbit/s" if rates[0] else "on the simulated machines"
    title = f"time to the end, {origin}; a step computes {time_text(result.compute)}"
    if not to_end:
        title = f"time to loss {loss_text(result.target or 0.0)}, {'predicted likewise' if rates[0] else origin}"
    shown = [row for row in result.rows if row.losses]
    seconds_by_row = [
        [times.to_end if to_end else times.to_loss for times in row.times] or [None] * len(rates) for row in shown
    ]
    rows = ((row.strategy, *map(_time, row_seconds)) for row, row_seconds in zip(shown, seconds_by_row, strict=True))
    return ResultTable(
        title, ("strategy", *(rate_figure(rate) if rate else "simulated" for rate in rates)), tuple(rows)
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else time_text(seconds)
