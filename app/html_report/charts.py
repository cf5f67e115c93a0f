"""The charts of a report, as plotly figures: names and texts are escaped, numbers are unrounded.

Charts without data are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.console import short_names, visible
from app.html_report.evidence import Evidence
from app.html_report.ribbon import NOTE, bands
from app.html_report.sections import label
from app.run_view.metrics import RATES, metric_label
from app.run_view.plan_vs_actual import at_predicted_pace, pace_of
from app.run_view.ribbon import rate_of_run
from app.run_view.run_series import (
    OF_EXCHANGES,
    SIMULATED,
    Point,
    Series,
    coarser,
    evaluation_series,
    of_member,
    of_run,
    over_hours,
    smoothed,
)
from app.run_view.run_state import RunState
from app.run_view.tables.machine_changes import machine_changes
from profiles.quantities import bytes_text, figure_text

BLUE, ORANGE, GREEN, RED, GREY = "#1f6feb", "#d9730d", "#1a7f4b", "#c4314b", "#8b949e"
_BAND = "rgba(31, 111, 235, 0.18)"
_OF_MACHINES = {"compute": "rgba(26, 127, 75, 0.75)", "wait": ORANGE, "lost": RED, "back": GREEN, "snapshot": "#7d4cdb"}
_GHOST = {"color": GREY, "dash": "dot", "width": 1.5}
"""Line of what was predicted."""
_GHOST_NOTE = (
    "Dotted grey: the same losses, smoothed, at the pace that the plan promised; where that line ends before the run "
    "does, the run should have been done."
)
_SMOOTHING = 0.8
_LOSS_HEIGHT = 420
"""Pixels, without the machines below it."""
COLOURS = (BLUE, ORANGE, GREEN, "#7d4cdb", "#0e8a9a", "#b5338a")
SIGNS = ("circle", "diamond", "square", "triangle-up", "x", "star")
"""Markers of lines, which thus do not differ by colour alone."""
_SCALE_BUTTONS = {
    "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
    "buttons": [{"label": kind, "method": "relayout", "args": [{"yaxis.type": kind}]} for kind in ("linear", "log")],
}  # fmt: skip
_SHOWN_MARKS = 12
_LONGEST_NAME = 40
"""Letters of a machine's name beside bars and on curves; hovering shows the whole name."""
THROUGHPUT_POINTS = 80
"""Few, so that a point averages several steps: those with and without a synchronisation differ too much."""
_THROUGHPUT_NOTE = "Samples a second of training time, all machines together; evaluations and snapshots are not in it."


@dataclass(frozen=True)
class ReportChart:
    """One chart of the page."""

    id: str
    title: str
    note: str
    """Explanation under the chart."""
    figure: Mapping[str, Any]


def charts_of(evidence: Evidence) -> list[ReportChart]:
    """Return the charts that have data."""
    state = evidence.state
    learning_rate = of_run(state.curves, "learning rate")
    width = 1 << (state.step // THROUGHPUT_POINTS).bit_length()
    charts = (
        _loss(evidence),
        _loss_in_time(evidence.state),
        _metrics(state, rates=True),
        _metrics(state, rates=False),
        _line("learning-rate", learning_rate, ORANGE, "learning rate", "learning rate", exponentformat="e"),
        _throughput(evidence, coarser(rate_of_run(state), width)),
        _time_split(evidence),
        _bytes(evidence),
        _synchronisations(evidence),
        *(_exchanged(state, name, description) for name, description in OF_EXCHANGES.items()),
        _prediction(evidence),
    )
    return [chart for chart in charts if chart is not None]


def drawn(name: str, title: str, note: str, traces: Sequence[Mapping[str, Any]], **layout: Any) -> ReportChart:
    """Return a chart of plotly traces and layout, in the style of the page."""
    full_layout: dict[str, Any] = {
        "margin": {"l": 64, "r": 16, "t": 36, "b": 84 if len(traces) > 1 else 48},
        "height": 340 if len(traces) > 1 else 304,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        **layout,
    }
    return ReportChart(name, title, note, {"data": list(traces), "layout": full_layout})


def axes(across: str, up: str, **y_axis: Any) -> dict[str, Any]:
    """Return the layout of axes with these titles; ``y_axis``: further settings of the vertical one."""
    return {"xaxis": {"title": {"text": across}, "rangemode": "tozero"}, "yaxis": {"title": {"text": up}, **y_axis}}


def curve(
    points: Sequence[Point], name: str, style: Mapping[str, Any], mode: str = "lines", factor: float = 1.0
) -> dict[str, Any]:
    """Return the trace of a curve."""
    x, y = [point.step for point in points], [point.mean * factor for point in points]
    return {"x": x, "y": y, "mode": mode, "name": name, "line": style}


def _loss(evidence: Evidence) -> ReportChart | None:
    shown = of_run(evidence.state.curves, "loss").points()
    if not shown:
        return None
    steps = [point.step for point in shown]
    edge = {"x": steps, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    band = {"fill": "tonexty", "fillcolor": _BAND, "showlegend": True, "name": "smallest to largest"}
    traces: list[dict[str, Any]] = [
        {**edge, "y": [point.high for point in shown]},
        {**edge, "y": [point.low for point in shown], **band},
        curve(shown, "training", {"color": BLUE}),
    ]
    for number, split in enumerate(evidence.state.evaluations, 1):
        traces += _measured(evidence.state, split, "loss", label(split), number, dash="dot")
    note = "The band holds every step of every machine. Click a name in the legend to hide its line."
    if (ghost := _at_predicted_pace(evidence, shown)) is not None:
        traces.append(ghost)
        note += f" {_GHOST_NOTE}"
    layout = {"updatemenus": [_SCALE_BUTTONS], **_marks(evidence), **axes("step", "loss")}
    return _with_machines(evidence, note, traces, layout)


def _with_machines(evidence: Evidence, note: str, traces: list[dict[str, Any]], layout: dict[str, Any]) -> ReportChart:
    """Return the chart of the loss with the machines below it, on one axis of steps."""
    below = bands(evidence, _OF_MACHINES)
    if below is None:
        return drawn("loss", "Loss", note, traces, **layout)
    height = _LOSS_HEIGHT + below.height
    share = below.height / (height - 130)  # 130 pixels: title, step axis, legend
    layout["xaxis"] |= {"anchor": "y2"}
    layout["yaxis"] |= {"domain": [share + 0.06, 1]}
    layout |= {"yaxis2": {**below.axis, "domain": [0, share]}, "height": height}
    omitted_note = f" {below.left_out} more machines are in the table below." if below.left_out else ""
    return drawn(
        "loss", "Loss, and what the machines did", f"{note} {NOTE}{omitted_note}", [*traces, *below.traces], **layout
    )


def _at_predicted_pace(evidence: Evidence, shown: Sequence[Point]) -> dict[str, Any] | None:
    prediction, pace = evidence.prediction, pace_of(evidence.state)
    points = at_predicted_pace(smoothed(list(shown), _SMOOTHING), pace, prediction) if prediction and pace else []
    return curve(points, "at the promised pace", _GHOST) if points else None


def _throughput(evidence: Evidence, rate: Series) -> ReportChart | None:
    """Return the samples/s of all machines, with what was predicted of them."""
    chart = _line("throughput", rate, GREEN, "samples/s", "all machines", _THROUGHPUT_NOTE)
    prediction, points = evidence.prediction, rate.points()
    if chart is None or prediction is None:
        return chart
    ghost = {"x": [points[0].step, points[-1].step], "y": [prediction.rate] * 2, "mode": "lines", "name": "promised"}
    return drawn(chart.id, chart.title, chart.note, [*chart.figure["data"], {**ghost, "line": _GHOST}],
                 **axes("step", "samples/s", rangemode="tozero"))  # fmt: skip


def _loss_in_time(state: RunState) -> ReportChart | None:
    """Return the loss over the time of simulated machines."""
    if state.simulated_hours is None:
        return None
    names = {"training": "loss", **{label(split): evaluation_series(split, "loss") for split in state.evaluations}}
    traces = []
    for number, (words, name) in enumerate(names.items()):
        points = over_hours(state.curves, name)
        style = {"color": COLOURS[number % len(COLOURS)], "dash": "dot" if number else "solid"}
        x, y = [hours for hours, _ in points], [loss for _, loss in points]
        traces.append({"x": x, "y": y, "mode": "lines", "name": words, "line": style})
    note = "Time of the machines in the file, by the cost model; evaluations and snapshots are not in it."
    layout = {"updatemenus": [_SCALE_BUTTONS], **axes(SIMULATED, "loss")}
    return drawn("loss-time", "Loss over simulated time", note, traces, **layout)


def _names(evidence: Evidence) -> dict[int, tuple[str, str]]:
    """Return each machine's shortened and full name, by rank."""
    full_names = {rank: visible(evidence.name(rank)) for rank in {**evidence.state.members, **evidence.work}}
    shortened = short_names(list(full_names.values()), _LONGEST_NAME)
    return {
        rank: (label(short), label(name)) for short, (rank, name) in zip(shortened, full_names.items(), strict=True)
    }


def _marks(evidence: Evidence) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    names = _names(evidence)
    for row, (step, change) in enumerate(machine_changes(evidence.state)[:_SHOWN_MARKS]):
        colour = GREEN if change.is_arrival else RED
        geometry = {"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "type": "line"}
        lines.append({**geometry, "line": {"color": colour, "width": 1, "dash": "dash"}})
        text = {"x": step, "y": 1 - 0.07 * (row % 5), "yref": "paper", "showarrow": False, "xanchor": "left"}
        words, hover = (f"{name} {change.word}" for name in names[change.member])
        texts.append({**text, "text": words, "hovertext": hover, "font": {"color": colour, "size": 11}})
    return {"shapes": lines, "annotations": texts}


def _metrics(state: RunState, *, rates: bool) -> ReportChart | None:
    """Return the chart of the metrics that are shares, in per cent, or of all others but the loss."""
    shown = sorted(
        (split, name)
        for split, results in state.evaluations.items()
        for name in {**results.first.figures, **results.last.figures}
        if name != "loss" and (name in RATES) == rates
    )
    lines: list[dict[str, Any]] = []
    for split, name in shown:
        words = f"{label(metric_label(name))} {label(split)}"
        lines += _measured(state, split, name, words, len(lines), 100 if rates else 1)
    if not shown:
        return None
    if not rates:
        return drawn("metrics", "Other metrics", "", lines, **axes("step", ""))
    title = ", ".join(label(name) for name in sorted({metric_label(name) for _, name in shown}))
    note = "Measured on data that is not used for training."
    return drawn("rates", title, note, lines, **axes("step", "per cent", rangemode="tozero"))


def _measured(
    state: RunState, split: str, name: str, words: str, number: int, factor: float = 1.0, **style: str
) -> list[dict[str, Any]]:
    """Return one metric of a split over the steps, as the ``number``-th line of its chart; empty where it was never
    measured."""
    points = of_run(state.curves, evaluation_series(split, name)).points()
    line = {"color": COLOURS[number % len(COLOURS)], **style}
    marker = {"symbol": SIGNS[number % len(SIGNS)], "size": 7}
    return [curve(points, words, line, "lines+markers", factor) | {"marker": marker}] if points else []


def _line(
    name: str, series: Series, colour: str, unit: str, of: str, note: str = "", **axis: Any
) -> ReportChart | None:
    points = series.points()
    trace, layout = curve(points, of, {"color": colour}), axes("step", unit, rangemode="tozero", **axis)
    return drawn(name, name.replace("-", " ").capitalize(), note, [trace], **layout) if points else None


def _by_member(evidence: Evidence, bars: Sequence[tuple[str, Sequence[float], str]], unit: str) -> dict[str, Any]:
    """Return traces and layout of bars, one row a member; ``bars``: names, values and colours."""
    names = _names(evidence)
    rows, full_names = (
        [f"{names[rank][0]} ({rank})" for rank in evidence.work],
        [names[rank][1] for rank in evidence.work],
    )
    hover = {"customdata": full_names, "hovertemplate": f"%{{customdata}}: %{{x:,.4r}} {unit}"}
    bar = {"type": "bar", "orientation": "h", "y": rows, **hover}
    return {
        "traces": [{**bar, "name": name, "x": values, "marker": {"color": colour}} for name, values, colour in bars],
        "height": 180 + 44 * max(2, len(rows)),
        "xaxis": {"title": {"text": unit}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "hovermode": "closest",
    }


def _time_split(evidence: Evidence) -> ReportChart | None:
    work = evidence.work.values()
    if not work:
        return None
    compute, wait = (
        ("compute", [totals.compute for totals in work], GREEN),
        ("exposed wait", [totals.wait for totals in work], ORANGE),
    )
    chart = _by_member(
        evidence, [compute, wait, ("transfer under way", [totals.transfer for totals in work], GREY)], "seconds"
    )
    marker = {"symbol": "line-ns-open", "size": 22, "color": GREY, "line": {"width": 3}}
    chart["traces"][-1] |= {"type": "scatter", "orientation": None, "mode": "markers", "marker": marker}
    note = (
        "Compute and exposed wait add up to the time of all steps. The mark tells how long exchanges were under way: "
        "what of it exceeds the wait was hidden behind compute."
    )
    return drawn("time", "Where the time went", note, barmode="stack", **chart)


def _bytes(evidence: Evidence) -> ReportChart | None:
    sent = [work.bytes_sent / 1e6 for work in evidence.work.values()]
    received = [work.bytes_received / 1e6 for work in evidence.work.values()]
    if not any((*sent, *received)):
        return None
    chart = _by_member(evidence, [("sent", sent, BLUE), ("received", received, GREY)], "MB")
    note = "As counted by the exchange; of a resumed run, everything that was really sent."
    return drawn("bytes", "Bytes", note, barmode="group", **chart)


def _synchronisations(evidence: Evidence) -> ReportChart | None:
    traces: list[dict[str, Any]] = []
    curves, names = evidence.state.curves, _names(evidence)
    for rank in evidence.state.members:
        syncs, waits = of_member(curves, rank, "sync time").points(), of_member(curves, rank, "sync wait").points()
        if not any(sync.high > 0 for sync in syncs):
            continue
        waited = {point.step: point.mean for point in waits}
        traces.append(
            {
                "x": [sync.step for sync in syncs],
                "y": [sync.mean * 1000 for sync in syncs],
                "customdata": [waited.get(sync.step, 0.0) * 1000 for sync in syncs],
                "hovertemplate": "%{y:.1f} ms, %{customdata:.1f} ms of which were waiting<extra>%{meta}</extra>",
                "mode": "markers",
                "name": names[rank][0],
                "meta": names[rank][1],
                "marker": {"size": max(4, 10 - 2 * len(traces)), "color": COLOURS[rank % len(COLOURS)]},
            }
        )
    note = "From the start of an exchange to its result, on each machine."
    layout = axes("step", "ms", rangemode="tozero")
    return drawn("syncs", "Synchronisations", note, traces, **layout) if traces else None


def steady_figures(state: RunState) -> list[tuple[str, str, str]]:
    """Return the figures of synchronisations that never changed: name, value as text, description.

    A chart of one would be a flat line.
    """
    shown = {name: _texts(state, name) for name in OF_EXCHANGES}
    return [(name, texts[0], OF_EXCHANGES[name]) for name, texts in shown.items() if texts and len(set(texts)) == 1]


def _texts(state: RunState, name: str) -> list[str]:
    """Return the values of an exchange series as they are printed."""
    written = bytes_text if "bytes" in name else figure_text
    return [written(point.mean) for point in of_run(state.curves, name).points()]


def _exchanged(state: RunState, name: str, description: str) -> ReportChart | None:
    """Return the chart of one exchange series over all machines, with its last value in the note; ``None`` if it never
    changed."""
    texts = _texts(state, name)
    if len(set(texts)) < 2:
        return None
    trace = curve(of_run(state.curves, name).points(), name, {"color": BLUE}, "lines+markers")
    note = f"{description} Last: {texts[-1]}."
    return drawn(name.replace(" ", "-"), name.capitalize(), note, [trace], **axes("step", name))


def _prediction(evidence: Evidence) -> ReportChart | None:
    comparison = evidence.comparison
    if comparison is None:
        return None
    waits = {"predicted": comparison.predicted_wait, "measured": comparison.measured_wait}
    steps = {"predicted": comparison.predicted_step, "measured": comparison.measured_step}
    kinds = list(steps)
    compute = [max(0.0, steps[kind] - waits[kind]) * 1000 for kind in kinds]
    bar = {"type": "bar", "orientation": "h", "y": kinds}
    traces = [
        {**bar, "x": compute, "name": "compute", "marker": {"color": GREEN}},
        {**bar, "x": [waits[kind] * 1000 for kind in kinds], "name": "exposed wait", "marker": {"color": ORANGE}},
    ]
    layout = {"barmode": "stack", "height": 260, "hovermode": "closest", "xaxis": {"title": {"text": "ms a step"}},
              "yaxis": {"autorange": "reversed"}}  # fmt: skip
    return drawn("prediction", "A step, predicted and measured", "", traces, **layout)
