"""The live picture of a run: verdict, one row a worker, the last evaluations, warnings."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.console import bytes_text, duration_text, visible
from app.figures import headline
from app.member_state import MemberState
from app.metrics import four_digits
from app.run_state import RunState

SHOWN_WARNINGS = 3
BAR_CELLS = 12
_STATUS_STYLES = {"training": "green", "done": "green", "lost": "bold red", "failed": "bold red", "left": "yellow"}


class RunView:
    """One picture of a state."""

    def __init__(self, title: str, state: RunState, now: float | None = None) -> None:
        self._title = title
        self._state = state
        self._now = time.time() if now is None else now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        state = self._state
        yield Text(visible(self._title), style="bold", no_wrap=True, overflow="ellipsis")
        yield self._verdict()
        yield _members(state, narrow=options.max_width < 100)
        for split, results in state.evaluations.items():
            yield Text(visible(headline(results, split)), style="cyan", no_wrap=True, overflow="ellipsis")
        if state.weights_differ:
            yield Text("weights differ between members after a synchronisation", style="bold red")
        for notice in state.warnings[-SHOWN_WARNINGS:]:
            yield Text(visible(f"warning: {notice.text}"), style="yellow", no_wrap=True, overflow="ellipsis")
        for notice in state.errors[-SHOWN_WARNINGS:]:
            yield Text(visible(f"error: {notice.text}"), style="bold red", no_wrap=True, overflow="ellipsis")

    def _verdict(self) -> Table:
        state = self._state
        line = Table.grid(padding=(0, 2))
        elapsed = duration_text(self._now - state.started) if state.started else "-"
        if state.total_steps is None:
            line.add_row(Text(visible(state.status)), Text(elapsed))
            return line
        line.add_row(
            Text(f"step {state.step}/{state.total_steps}", style="bold"),
            ProgressBar(total=max(1, state.total_steps), completed=state.step, width=20),
            Text(f"{state.samples_per_second:.1f} samples/s" if state.samples_per_second else ""),
            Text(f"{elapsed} elapsed"),
            Text(f"{duration_text(state.seconds_left)} left" if state.status == "running" else visible(state.status)),
        )
        return line


def _members(state: RunState, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("state", no_wrap=True, overflow="ellipsis", max_width=24)
    for name in ("step", "loss", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compute " if narrow else "compute | wait | transfer", no_wrap=True)
    table.add_column("sent" if narrow else "sent / received", justify="right", no_wrap=True)
    for member in state.members.values():
        table.add_row(*_row(member, narrow))
    return table


def _row(member: MemberState, narrow: bool) -> list[RenderableType]:
    traffic = bytes_text(member.work.bytes_sent)
    return [
        Text(visible(member.label)),
        Text(visible(member.preparing or member.status), style=_STATUS_STYLES.get(member.status, "")),
        Text(str(member.step) if member.step else "-"),
        Text("-" if member.loss is None else four_digits(member.loss)),
        Text(f"{member.samples_per_second:.1f}" if member.active and member.window else "-"),
        time_bar(member, narrow),
        Text(traffic if narrow else f"{traffic} / {bytes_text(member.work.bytes_received)}"),
    ]


def time_bar(member: MemberState, narrow: bool) -> Text:
    """A bar of compute against exposed wait, with the shares (transfer may be hidden behind compute)."""
    if not member.window:
        return Text("-")
    compute, wait, transfer = member.shares
    if not all(share == share for share in (compute, wait, transfer)):  # NaN from a damaged event
        return Text("-")
    if narrow:
        return Text(f"{compute:.0%}", style="green")
    cells = round(compute * BAR_CELLS)
    return Text.assemble(
        ("█" * cells, "green"),
        ("░" * (BAR_CELLS - cells), "yellow"),
        f" {compute:.0%} | {wait:.0%} | {transfer:.0%}",
    )
