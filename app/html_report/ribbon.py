"""The machines of a run below its loss, on one axis: computing, waiting, away, back, and snapshots.

A machine is a band: computing from below, waiting above it and hatched, so that both are readable without colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.console import short_names, visible
from app.html_report.evidence import Evidence
from app.html_report.sections import label
from app.run_view.ribbon import Ribbon, most_notable, ribbons
from app.run_view.run_series import coarser

MOST_MACHINES = 24
_MOST_PIECES = 6000
"""Pieces of all bands together: each takes eight numbers in the page."""
_THICK = 0.72
"""Thickness of a band; the distance of two bands is 1."""
_LONGEST = 24
"""Letters of a name."""
_ROW, _LEAST = 30, 90
"""Pixels of a machine, and of all together."""
NOTE = "Below, on the same axis, the machines: computing is filled, waiting is hatched above it."


@dataclass(frozen=True)
class Bands:
    """Traces on the second vertical axis, that axis, and its height in pixels."""

    traces: Sequence[Mapping[str, Any]]
    axis: Mapping[str, Any]
    height: int
    left_out: int
    """Number of machines that are not drawn."""


def bands(evidence: Evidence, colours: Mapping[str, str]) -> Bands | None:
    """Return the bands of a run; ``None`` where no member took a step.

    Args:
        colours: of ``compute``, ``wait``, ``lost``, ``back`` and ``snapshot``.
    """
    candidates = [ribbon for ribbon in ribbons(evidence.state) if ribbon.waits.current is not None or ribbon.away]
    shown = most_notable(candidates, MOST_MACHINES)
    if not shown:
        return None
    max_pieces = max(32, _MOST_PIECES // len(shown))
    computed, waited = _Shapes(), _Shapes()
    for row, ribbon in enumerate(shown):
        _add(ribbon, float(len(shown) - row), max_pieces, computed, waited)
    last_step = float(max(member.step for member in evidence.state.members.values()))
    area = {"type": "scatter", "yaxis": "y2", "mode": "none", "fill": "toself", "hoverinfo": "skip"}
    hatch = {"shape": "/", "size": 4, "solidity": 0.4, "fgcolor": colours["wait"], "bgcolor": "rgba(0,0,0,0)"}
    traces: list[dict[str, Any]] = [
        {**area, "x": computed.x, "y": computed.y, "name": "computing", "fillcolor": colours["compute"]},
        {**area, "x": waited.x, "y": waited.y, "name": "waiting", "fillcolor": colours["wait"], "fillpattern": hatch},
    ]
    traces += _signs(evidence, shown, last_step, colours)
    names = short_names([visible(evidence.name(ribbon.rank)) for ribbon in shown], _LONGEST)
    centres = [len(shown) - row - _THICK / 2 for row in range(len(shown))]
    axis = {
        "range": [0, len(shown) + 0.15],
        "tickvals": centres,
        "ticktext": [label(name) for name in names],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }
    height = max(_LEAST, _ROW * len(shown))
    return Bands([trace for trace in traces if trace["x"]], axis, height, len(candidates) - len(shown))


class _Shapes:
    """Rectangles of one colour as one plotly outline, separated by gaps."""

    def __init__(self) -> None:
        self.x: list[float | None] = []
        self.y: list[float | None] = []

    def rectangle(self, left: float, right: float, bottom: float, top: float) -> None:
        if top - bottom > 0.004:
            self.x += [left, right, right, left, None]
            self.y += [round(value, 3) for value in (bottom, bottom, top, top)]
            self.y.append(None)


def _add(ribbon: Ribbon, top: float, max_pieces: int, computed: _Shapes, waited: _Shapes) -> None:
    """Add at most ``max_pieces`` pieces of a band with upper edge ``top``; equal neighbours are joined."""
    waits = ribbon.waits
    while len(waits.buckets) > max_pieces:
        waits = coarser(waits, waits.width * 2)
    bottom = top - _THICK
    pieces: list[tuple[float, float, float]] = []
    for bucket in waits.buckets:
        left, level = bucket.number * waits.width - 0.5, round((1 - bucket.mean) * 50) / 50
        right, level = left + waits.width, min(1.0, max(0.0, level))
        if pieces and pieces[-1][1] == left and pieces[-1][2] == level:
            pieces[-1] = (pieces[-1][0], right, level)
        else:
            pieces.append((left, right, level))
    for left, right, level in pieces:
        middle = bottom + level * _THICK
        computed.rectangle(left, right, bottom, middle)
        waited.rectangle(left, right, middle, top)


def _signs(
    evidence: Evidence, shown: Sequence[Ribbon], last_step: float, colours: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return lines where machines were away, and signs where they left, came back and wrote snapshots."""
    line: list[dict[str, Any]] = [{"x": [], "y": [], "text": []} for _ in range(4)]
    away, went, came, wrote = line
    for row, ribbon in enumerate(shown):
        name = label(evidence.name(ribbon.rank))
        middle = len(shown) - row - _THICK / 2
        for absence in ribbon.away:
            why = f"{name} {label(absence.text[:80])}"
            away["x"] += [absence.start, min(absence.until, last_step), None]
            away["y"] += [middle, middle, None]
            _put(went, absence.start, middle, why)
        for step in ribbon.arrivals:
            _put(came, step, middle, f"{name} back")
        for step in ribbon.snapshots:
            _put(wrote, step, middle, f"{name}: snapshot")
    common = {"type": "scatter", "yaxis": "y2", "hovertemplate": "%{text}<extra></extra>"}
    marks = {"mode": "markers"}
    dotted = {"mode": "lines", "hoverinfo": "skip", "line": {"color": colours["lost"], "width": 1, "dash": "dot"}}
    return [
        {**common, **away, **dotted, "name": "away", "showlegend": False, "hovertemplate": None},
        {**common, **wrote, **marks, "name": "snapshot", "marker": _marker("diamond-open", colours["snapshot"], 7)},
        {**common, **went, **marks, "name": "lost or left", "marker": _marker("x-thin-open", colours["lost"], 9)},
        {**common, **came, **marks, "name": "back", "marker": _marker("cross-thin-open", colours["back"], 11)},
    ]


def _marker(symbol: str, colour: str, size: int) -> dict[str, Any]:
    return {"symbol": symbol, "color": colour, "size": size, "line": {"width": 2.5 if "thin" in symbol else 1.5}}


def _put(signs: dict[str, Any], step: float, row: float, words: str) -> None:
    signs["x"].append(step)
    signs["y"].append(row)
    signs["text"].append(words)
