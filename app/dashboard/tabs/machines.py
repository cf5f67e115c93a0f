"""The second tab: which machine is slow, and why."""

from __future__ import annotations

import dataclasses
import shlex

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content

from app.console import command_about
from app.dashboard.reader import Picture
from app.dashboard.tabs.charts import Chart, ChartData, marks, member_curves
from app.dashboard.tabs.one_machine import MIN_WIDTH, OneMachine
from app.dashboard.tabs.pane import Pane, Words, shares_bar, state_of
from app.run_view.figures import waiting_text
from app.run_view.headline import age, lag, slowest
from app.run_view.member_state import AWAITS_EXCHANGE, MemberState
from app.run_view.tables.newcomers import newcomers, stage_of
from app.shell.row_table import RowTable
from app.shell.text import MARGIN, TableColumn, TableRow, literal, widths
from profiles.quantities import (
    age_text,
    memory_text,
    power_text,
    share_text,
    temperature_text,
    throughput_figure,
    time_text,
)

COLUMNS = (
    TableColumn("name", "machine", max_width=24, min_width=8),
    TableColumn("state", "state", max_width=12, min_width=10),
    TableColumn("since", "for", right=True, min_width=5, rank=7),
    TableColumn("step", "step", right=True, min_width=4),
    TableColumn("lag", "lag", right=True, min_width=3, rank=5),
    TableColumn("rate", "samples/s", right=True, min_width=6),
    TableColumn("share", "share", right=True, min_width=5, rank=6),
    TableColumn("time", "compute/wait", min_width=12),
    TableColumn("wait", "wait", right=True, min_width=5, rank=4),
    TableColumn("overlap", "overlap", right=True, min_width=5, rank=8),
    TableColumn("memory", "memory", right=True, min_width=6, rank=2),
    TableColumn("heat", "heat", right=True, min_width=4, rank=2),
    TableColumn("power", "power", right=True, min_width=5, rank=3),
    TableColumn("device", "on device", right=True, min_width=7, rank=9),
    TableColumn("processor", "processor", right=True, min_width=5, rank=10),
    TableColumn("age", "heard", right=True, min_width=5, rank=1),
)
_BAR = 12
_TALL = 30
"""Height from which on the chart of samples/s is shown under the table."""
_AWAY = ("lost", "failed", "left")
_NOTICEABLE = 0.01
"""Share of waiting from which on a machine holds the others up."""
_SILENT = 5.0
"""Seconds of silence from which on they are coloured."""


class MachinesPane(Pane):
    """The table of machines, their samples/s, and the details of one."""

    ABOUT = (
        "One row a machine. The bar is the wall time of a step: computing, then standing still for an exchange. "
        "Overlap: the share of the time in which it computed while exchanges were under way. Lag: steps behind the "
        "foremost. "
        "Heat: of what it computes on. Power: what its meters measure, not the whole machine. "
        "Heard: time since its last message. '-' drops the machine under the cursor. With 120 columns its other "
        "figures, its curve and its newest log lines are shown beside the table."
    )
    DEFAULT_CSS = """
    MachinesPane #who { height: auto; padding-bottom: 1; }
    MachinesPane Horizontal { height: 1fr; }
    MachinesPane Vertical { width: 1fr; height: 1fr; }
    MachinesPane RowTable { width: 1fr; height: 1fr; }
    MachinesPane #paces { height: 45%; display: none; }
    """

    def compose(self) -> ComposeResult:
        yield Words(id="who")
        with Horizontal():
            with Vertical():
                yield RowTable(COLUMNS, empty="No machine has reported yet.", id="rows")
                yield Chart(id="paces")
            yield OneMachine()

    def draw(self, picture: Picture) -> None:
        self.query_one("#who", Words).show(who_is_slow(picture))
        columns, rows = table_of(picture)
        table, detail_pane = self.query_one(RowTable), self.query_one(OneMachine)
        table.show(rows, columns=columns)
        paces = self.query_one("#paces", Chart)
        paces.display = self.size.height >= _TALL
        if paces.display:
            paces.show(_paces(picture))
        detail_pane.display = self.size.width >= MIN_WIDTH and self.selected is not None
        if detail_pane.display and self.selected is not None and table.row is not None:
            shown = widths(columns, rows, table.scrollable_content_region.width - MARGIN)
            cells = zip(columns, table.row.cells, strict=True)
            hidden_cells = [(column.label, cell) for column, cell in cells if column.key not in shown]
            detail_pane.show(self.selected, picture, hidden_cells)

    def on_row_table_moved(self) -> None:
        self.draw_again()

    @property
    def selected(self) -> int | None:
        """Rank of the machine under the cursor; ``None``: there is none, or it is being added and has no rank yet."""
        key = self.query_one(RowTable).cursor
        return int(key) if key and int(key) >= 0 else None


def _paces(picture: Picture) -> ChartData:
    """Return the chart of each machine's samples/s."""
    curves, legend = member_curves("samples/s", picture, 0.6)
    return ChartData("samples/s", tuple(curves), marks(picture.state), tuple(legend), zero=True)


def who_is_slow(picture: Picture) -> Content:
    """Return the sentence about the machine that the others wait for, with figures, or that there is none."""
    state = picture.state
    working = [member for member in state.members.values() if member.has_worked]
    if len(working) < 2:
        alone = "one machine trained" if state.ended is not None else "one machine trains"
        return literal(alone if working else "no machine trains right now", "$text-muted")
    over = state.ended is not None
    brake, waiting = slowest(state) if (state.waiting_share or 0.0) >= _NOTICEABLE else None, waiting_text(state)
    if brake is None:
        explained = f"{waiting} (for the network and for one another)"
        return literal(explained if over else f"no machine holds the others up; {explained}", "$text-muted")
    samples = {m.rank: m.total.samples / m.total.steps for m in working}
    batch_share = f"{samples[brake.member.rank]:.0f} of {sum(samples.values()):.0f} samples"
    own_time, others_time = time_text(brake.seconds), time_text(brake.others)
    return Content.assemble(
        literal(picture.name(brake.member.rank), "bold $text-warning"),
        f" {'held' if over else 'holds'} the others up: its {batch_share} {'took' if over else 'take'} "
        f"{own_time} a step, theirs {others_time}",
        (f"; {waiting}", "$text-muted"),
    )  # fmt: skip


def table_of(picture: Picture) -> tuple[list[TableColumn], list[TableRow]]:
    """Return the table of all machines, without the columns that are empty for all of them."""
    members = picture.state.members.values()
    has_values = {
        "heat": any(member.hottest is not None for member in members),
        "power": any(member.joules is not None for member in members),
        "since": picture.live,
        "age": picture.live,
    }
    indices = [index for index, column in enumerate(COLUMNS) if has_values.get(column.key, True)]
    rows = [_row(member, picture) for member in (*members, *(newcomers(picture.state) if picture.live else ()))]
    shown = [dataclasses.replace(row, cells=tuple(row.cells[index] for index in indices)) for row in rows]
    return [COLUMNS[index] for index in indices], shown


def _row(member: MemberState, picture: Picture) -> TableRow:
    total = sum(m.rate or 0.0 for m in picture.state.members.values())
    rate, (_, wait, transfer), busy = member.rate, member.shares, member.has_worked
    quiet = picture.heard.get(member.rank, age(member, picture.now))
    silent = bool(member.active and picture.live and quiet is not None and quiet > _SILENT)
    behind = lag(picture.state, member)
    since = None if member.since is None else max(0.0, picture.now - member.since)
    if quiet is not None and since is not None and member.status == "lost":
        quiet = max(quiet, since)  # what others say of it is no sign of it
    load = member.machine
    present_load = None if member.status in _AWAY else load
    warmth = present_load.celsius if present_load else None
    memory = load.memory_used if load else 0
    full = load is not None and load.memory_total and memory > 0.9 * load.memory_total
    cells = (
        literal(picture.name(member.rank) if member.rank >= 0 else member.name, "bold"),
        state_of(member, picture),
        literal(age_text(since if picture.live else None)),
        literal(member.step or "-"),
        literal(behind if member.step else "-", "$text-warning" if behind > 1 and not member.active else ""),
        literal("-" if rate is None else throughput_figure(rate)),
        literal(share_text(rate / total) if rate is not None and total else "-"),
        shares_bar(member, _BAR) if busy else Content(""),
        literal(share_text(wait) if busy else "-"),
        literal(share_text(max(0.0, transfer - wait)) if busy else "-"),
        literal("-") if not memory else literal(memory_text(memory), "$text-warning" if full else ""),
        literal("-")
        if warmth is None
        else literal(temperature_text(warmth), "$text-warning" if member.throttled else ""),
        literal("-" if present_load is None or present_load.watts is None else power_text(present_load.watts)),
        literal(memory_text(member.device_memory_peak) if member.device_memory_peak else "-"),
        literal("-" if load is None else share_text(load.cpu_percent / 100)),
        literal(age_text(quiet if picture.live else None), "$text-warning" if silent else "$text-muted"),
    )
    return TableRow(str(member.rank), cells, _details(member, picture))


def _details(member: MemberState, picture: Picture) -> tuple[Content, ...]:
    lines = []
    if member.status in _AWAY and member.message:
        lines.append(literal(member.message, "$text-error" if member.status != "left" else "$text-muted"))
    if member.has_ended and picture.live and picture.plan is not None and picture.plan.has_coordinator:
        command = f"{command_about(picture.path, 'runs', 'ask')} add {shlex.quote(picture.name(member.rank))}"
        lines.append(literal(f"it does not come back by itself; add it: {command}", "$text-accent"))
    if stage := stage_of(member, picture.state, picture.now) if picture.live else "":
        lines.append(literal(stage, "$text-muted"))
    if picture.live and picture.state.awaits_exchange(member):
        lines.append(literal(AWAITS_EXCHANGE, "$text-muted"))
    if member.times_lost and member.active:
        times = "once" if member.times_lost == 1 else f"{member.times_lost} times"
        lines.append(literal(f"was lost {times} and came back", "$text-muted"))
    if member.throttled and member.active:
        lines.append(literal("slowed down by heat", "$text-warning"))
    if member.gives_way:
        lines.append(literal(f"gives way: {member.gives_way}", "$text-warning"))
    elif member.machine is not None and member.machine.on_mains is False and member.active:
        battery = member.machine.battery_percent
        left = "" if battery is None else f", {share_text(battery / 100)}"
        lines.append(literal(f"runs on battery{left}", "$text-warning"))
    return tuple(lines)
