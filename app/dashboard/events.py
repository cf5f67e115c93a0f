"""The sixth tab: what has happened, the newest first; and happenings as lines, for other tabs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from textual.app import ComposeResult
from textual.content import Content

from app.console import bytes_text
from app.dashboard.charts import value_text
from app.dashboard.pane import Pane
from app.dashboard.reader import Picture
from app.history import Happening, in_order
from app.shell.row_layout import Column, Row
from app.shell.row_table import RowTable
from app.shell.text import Mark, literal
from profiles.counts import counted

COLUMNS = (
    Column("time", "time", most=8, least=8),
    Column("kind", "what", most=14, least=12),
    Column("words", "", most=400, least=20),
)
MOST_ROWS = 400
MARKS = {
    "run": Mark.RUNNING,
    "machine": Mark.WAITING,
    "lost": Mark.LOST,
    "back": Mark.ONLINE,
    "error": Mark.PROBLEM,
    "warning": Mark.WARNING,
    "evaluation": Mark.DONE,
    "snapshot": Mark.DONE,
    "request": Mark.CHOSEN,
}


class Events(Pane):
    """Launches, synchronisations, evaluations, snapshots, requests, machines lost and back."""

    ABOUT = "Events, newest first; '/' filters. All of them are in events.jsonl."
    DEFAULT_CSS = "Events RowTable { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._seen: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield RowTable(COLUMNS, empty="Nothing has happened yet.", id="happened")

    def draw(self, picture: Picture) -> None:
        state = picture.state
        last = tuple(member.work.syncs for member in state.members.values())
        seen = (state.chronicles, last)
        if seen == self._seen:
            return
        self._seen = seen
        rows = [_row(one, picture) for one in in_order(state.chronicles)[-MOST_ROWS:]]
        together = sorted([*rows, *_syncs(picture)], key=lambda pair: pair[0], reverse=True)
        self.query_one(RowTable).show(row for _, row in together[:MOST_ROWS])


def _row(one: Happening, picture: Picture) -> tuple[float, Row]:
    bad = one.kind in ("lost", "error")
    cells = (
        literal(clock_text(one.time), "$text-muted"),
        MARKS[one.kind].show(one.kind),
        literal(what(one, picture), "$text-error" if bad else ""),
    )
    hint = (literal(one.hint, "$text-accent"),) if one.hint else ()
    return one.time, Row(f"{one.time}/{one.member}/{one.kind}/{one.text}", cells, hint)


def _syncs(picture: Picture) -> Iterator[tuple[float, Row]]:
    """One line a round, from the member that said it first."""
    for (step, number), said in picture.rounds.items():
        sync = min((sync for _, sync in said), key=lambda sync: sync.time)
        words = f"round {number} at step {step}: {counted(len(sync.members), 'machine')}"
        cells = (
            literal(clock_text(sync.time), "$text-muted"),
            Mark.WORKING.show("sync"),
            literal(f"{words}, {value_text(sync.seconds, 's')}, {bytes_text(sync.bytes_sent)} sent"),
        )
        yield sync.time, Row(f"sync/{step}/{number}", cells)


def clock_text(moment: float) -> str:
    """``14:03:21``, local; dashes for what is no time."""
    if not math.isfinite(moment) or not 0 <= moment < 1e11:
        return "--:--:--"
    return time.strftime("%H:%M:%S", time.localtime(moment))


def happening_line(one: Happening, picture: Picture) -> Content:
    """Return time, symbol and words in one line."""
    words = what(one, picture)
    bad = one.kind in ("lost", "error")
    return Content.assemble(
        (clock_text(one.time), "$text-muted"),
        "  ",
        MARKS[one.kind].show(""),
        " ",
        literal(words, "$text-error" if bad else ""),
    )


def what(one: Happening, picture: Picture) -> str:
    """Return the words, with machine and step where they are not said."""
    name = picture.name(one.member) if one.member >= 0 else ""
    who = f"{name}: " if name and name not in one.text and one.kind not in ("evaluation",) else ""
    at = f" (step {one.step})" if one.step >= 0 and one.kind in ("evaluation", "warning", "error") else ""
    return f"{who}{one.text}{at}"
