"""The first tab: how the run goes, at a glance."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content

from app.console import duration_text
from app.dashboard.braille import Curve
from app.dashboard.charts import Chart, ChartData, marks, value_text
from app.dashboard.events import happening_line
from app.dashboard.pane import Pane, Words, shares_bar, sparks, state_of
from app.dashboard.reader import Picture
from app.figures import course, evaluated_series
from app.history import in_order
from app.member_state import TROUBLE, MemberState
from app.run_series import names, of_run, smoothed
from app.run_state import RunState
from app.shell.text import bar, literal

SMOOTHING = 0.8
_BESIDE = 62
"""Cells of a strip beside the course of its speed."""
_SHORTEST_BAR, _LONGEST_BAR = 6, 18


class Overview(Pane):
    """Progress, loss, machines, latest events."""

    ABOUT = (
        "Loss of all machines (line: smoothed, dots: least to greatest), below it synchronisations (┴), evaluations "
        "(◆), machines lost (✗) and back (+). A strip a machine: state, step, samples/s, its course, and how its time "
        "divides into computing and waiting."
    )
    SCOPED_CSS = False
    DEFAULT_CSS = """
    Overview #progress { height: 1; }
    Overview #charts { height: 1fr; margin-top: 1; }
    Overview #others { width: 40%; display: none; }
    .-wide Overview #others { display: block; margin-left: 2; }
    Overview #strips { height: auto; margin-top: 1; text-wrap: nowrap; }
    Overview #latest { height: auto; margin-top: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def compose(self) -> ComposeResult:
        yield Words(id="progress")
        with Horizontal(id="charts"):
            yield Chart(id="loss")
            with Vertical(id="others"):
                yield Chart(id="error-rate")
                yield Chart(id="rate")
        yield Words(id="strips")
        yield Words(id="latest")

    def draw(self, picture: Picture) -> None:
        state = picture.state
        width, height = self.size
        self.query_one("#progress", Words).show(progress_line(state, picture.now, width))
        self.query_one("#loss", Chart).show(loss_chart(picture))
        if self.screen.has_class("-wide"):
            self.query_one("#error-rate", Chart).show(_error_chart(state))
            self.query_one("#rate", Chart).show(_rate_chart(state))
        tall = height >= 26
        self.query_one("#strips", Words).show(_strips(picture, width, 8 if tall else 4))
        self.query_one("#latest", Words).show(_latest(picture, 5 if tall else 2))


def loss_chart(picture: Picture, smoothing: float = SMOOTHING) -> ChartData:
    """Return the chart of the loss of all members, with what happened along it."""
    state = picture.state
    series = of_run(state.curves, "loss")
    points = series.points()
    newest = f"{points[-1].mean:.4g}" if points else ""
    invalid = (("not a number at times", "$text-error"),) if series.invalid else ()
    # Machines that are ready and do not train yet look as if they hung.
    measured_first = picture.plan is not None and picture.plan.profile.evaluation.eval_before
    gap = 8.0 * series.width
    band = Curve(points, "", "$primary 45%", gap)
    line = Curve(smoothed(points, smoothing), "bold $text-primary", gap=gap)
    return ChartData(
        title=f"loss {newest}".strip(),
        curves=(band, line) if points else (),
        marks=marks(state),
        legend=invalid,
        empty="the model is evaluated first; then the loss appears here"
        if measured_first and any(member.status == "ready" for member in state.members.values())
        else "the loss appears here with the first step",
    )


def progress_line(state: RunState, now: float, width: int) -> Content:
    if state.total_steps is None:
        busy = [member.preparing for member in state.members.values() if member.phase]
        return literal(busy[0] if busy else state.status, "$text-muted")
    share = state.step / max(1, state.total_steps)
    elapsed = now if state.ended is None else state.ended
    rate = f"{state.samples_per_second:.1f} samples/s" if state.samples_per_second else ""
    took = duration_text(elapsed - state.started) if state.started else ""
    step, done = f"step {state.step}/{state.total_steps}", f"{share:.0%}"
    spare, rest = 0, ""
    for reached in _reached(state):
        rest = "  ".join(word for word in (rate, took, reached) if word)
        spare = width - len("  ".join((step, "", done, rest)))
        if spare >= _SHORTEST_BAR:
            break
    drawn = bar(share, max(_SHORTEST_BAR, min(_LONGEST_BAR, spare)))
    line = Content.assemble((step, "bold"), "  ", (drawn, "$text-primary"), f"  {done}  ", literal(rest, "$text-muted"))
    return line.truncate(max(1, width), ellipsis=True)


def _reached(state: RunState) -> tuple[str, ...]:
    """Return what the newest evaluation says, in whole and in short."""
    if not state.evaluations:
        return ("",)
    split, results = min(state.evaluations.items(), key=lambda item: (-item[1].last.step, item[0] != "validation"))
    before = "" if results.last.step else " before"
    return (course(results, split) + before, course(results) + before)


def _error_chart(state: RunState) -> ChartData:
    every, metrics = names(state.curves), evaluated_series(state)
    rates = [name for name in every if metrics.get(name) in ("wer", "cer")]
    shown = rates[:2] or [name for name in every if metrics.get(name) == "loss"][:2]
    styles = ("$text-accent", "$text-secondary")
    curves, legend = [], []
    for name, style in zip(shown, styles):
        points = of_run(state.curves, name).points()
        curves.append(Curve(points, style))
        value = value_text(points[-1].mean, "%" if rates else "") if points else ""
        legend.append((f"{name} {value}".strip(), style))
    empty = "evaluations appear here"
    return ChartData(
        curves=tuple(curves), legend=tuple(legend), unit="%" if rates else "", zero=bool(rates), empty=empty
    )


def _rate_chart(state: RunState) -> ChartData:
    series = of_run(state.curves, "samples/s")
    points = smoothed(series.points(), 0.6)
    title = f"samples/s {state.samples_per_second:.4g}" if state.samples_per_second else "samples/s"
    return ChartData(title, (Curve(points, "$text-success", gap=8.0 * series.width),) if points else (), zero=True)


def _strips(picture: Picture, width: int, most: int) -> Content:
    members = list(picture.state.members.values())
    if not members:
        return literal("no machine has reported yet", "$text-muted")
    if len(members) > most:
        members.sort(key=lambda member: (member.active, member.rank))
    courses = sparks(picture, "samples/s", max(8, min(60, width - _BESIDE)))
    shown = [_strip(member, picture, width, courses[member.rank]) for member in members[:most]]
    if len(members) > most:
        shown.append(literal(f"... and {len(members) - most} more on tab 2", "$text-muted"))
    return Content("\n").join(shown)


def _strip(member: MemberState, picture: Picture, width: int, course: str) -> Content:
    name = literal(picture.name(member.rank), "bold").truncate(14, ellipsis=True).pad_right(0)
    name = name.pad_right(max(0, 14 - name.cell_length))
    state = state_of(member, picture)
    state = state.pad_right(max(0, 12 - state.cell_length)).truncate(12)
    if not member.active and member.message:
        style = "$text-error" if member.status in TROUBLE else "$text-muted"
        return Content.assemble(name, " ", state, " ", literal(member.message, style)).truncate(width)
    if not member.window:
        about = literal(member.preparing or member.device, "$text-muted")
        return Content.assemble(name, " ", state, " ", about).truncate(width)
    rate = f"{member.samples_per_second:7.1f}/s" if math.isfinite(member.samples_per_second) else " " * 9
    wait = member.shares[1]
    return Content.assemble(
        name, " ", state, f"{rate} ", (course, "$text-success 80%"), "  ",
        shares_bar(member, 12), (f" {wait:4.0%} wait" if wait == wait else "", "$text-muted"),
    ).truncate(max(1, width))  # fmt: skip


def _latest(picture: Picture, most: int) -> Content:
    happened: Sequence[Content] = [happening_line(one, picture) for one in in_order(picture.state.chronicles)[-most:]]
    return Content("\n").join(happened) if happened else literal(time.strftime("%H:%M:%S  nothing yet"), "$text-muted")
