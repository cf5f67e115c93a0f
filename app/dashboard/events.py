"""The sixth tab: what has happened, the newest first."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult

from app.console import bytes_text
from app.dashboard.chart import value_text
from app.dashboard.event_words import MARKS, clock_text, what
from app.dashboard.pane import Pane
from app.dashboard.picture import Picture
from app.history import Happening, in_order
from app.shell.frame import muster
from app.shell.row_layout import Column, Row
from app.shell.row_table import RowTable
from app.shell.symbols import Mark
from app.shell.text import literal
from profiles.counts import counted

COLUMNS = (
    Column("time", "time", most=8, least=8),
    Column("kind", "what", most=14, least=12),
    Column("words", "", most=400, least=20),
)
MOST_ROWS = 400


class Events(Pane):
    """Launches, synchronisations, evaluations, snapshots, requests, machines lost and back."""

    ABOUT = "Events, newest first; '/' filters. All of them are in events.jsonl."
    DEFAULT_CSS = "Events RowTable { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._seen: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield RowTable(COLUMNS, empty="Nothing has happened yet.", id="happened")

    def show(self, picture: Picture) -> None:
        state = picture.state
        last = tuple(member.work.syncs for member in state.members.values())
        seen = (state.chronicles, last)
        if seen == self._seen:
            return
        self._seen = seen
        plain = muster(self).ascii_only
        rows = [_row(one, picture, plain) for one in in_order(state.chronicles)[-MOST_ROWS:]]
        together = sorted([*rows, *_syncs(picture, plain)], key=lambda pair: pair[0], reverse=True)
        self.query_one(RowTable).show(row for _, row in together[:MOST_ROWS])

    def copied(self) -> str:
        row = self.query_one(RowTable).row
        return row.plain if row else ""


def _row(one: Happening, picture: Picture, plain: bool) -> tuple[float, Row]:
    bad = one.kind in ("lost", "error")
    cells = (
        literal(clock_text(one.time), "$text-muted"),
        MARKS[one.kind].show(one.kind, ascii_only=plain),
        literal(what(one, picture), "$text-error" if bad else ""),
    )
    hint = (literal(one.hint, "$text-accent"),) if one.hint else ()
    return one.time, Row(f"{one.time}/{one.member}/{one.kind}/{one.text}", cells, hint)


def _syncs(picture: Picture, plain: bool) -> Iterable[tuple[float, Row]]:
    """One line a round, from the member that said it first."""
    found: dict[tuple[int, int], tuple[float, Row]] = {}
    for member in picture.state.members.values():
        for sync in member.recent_syncs:
            words = f"round {sync.round} at step {sync.step}: {counted(len(sync.members), 'machine')}"
            cells = (
                literal(clock_text(sync.time), "$text-muted"),
                Mark.WORKING.show("sync", ascii_only=plain),
                literal(f"{words}, {value_text(sync.seconds, 's')}, {bytes_text(sync.bytes_sent)} sent"),
            )
            row = (sync.time, Row(f"sync/{sync.step}/{sync.round}", cells))
            key = (sync.step, sync.round)
            if key not in found or found[key][0] > sync.time:
                found[key] = row
    return found.values()
