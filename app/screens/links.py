"""Links: how fast the network is between every two machines, and which way was taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

from textual.content import Content

from app.console import command_line
from app.screens.steering import cause_lines, mark, shown_state
from app.screens.step_screen import GO_ON, NEXT, StepScreen
from app.shell.base_app import MusterApp
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.text import literal, muted
from app.wizard.state import LinkRow, Status, WizardState
from app.wizard.steps import Step

_COLUMNS = (
    Column("pair", "from, to", most=44, least=18),
    Column("there", "Mbit/s", right=True, most=8, least=6),
    Column("back", "back", right=True, most=8, least=5),
    Column("rtt", "ms", right=True, most=7, least=4),
    Column("state", "state", most=16, least=8),
    Column("path", "way", most=44, least=10, rank=1),
)
_CELL = 15
_NAME = 16


class LinksScreen(StepScreen):
    """How fast is the network?"""

    STEP = Step.LINKS
    HEADING = "Links"
    HELP = (
        "Every two machines send to each other, in turns, so that no measurement disturbs another. The figures decide "
        "which way of training is fastest here. A cable is worth more than anything else that can be changed."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("r", "retry", "Measure again", "Measure all links again."),
    )

    def columns(self, state: WizardState) -> Sequence[Column]:
        return _COLUMNS

    def rows(self, state: WizardState) -> Sequence[Row]:
        return [_row(cast(MusterApp, self.app), row) for row in state.links.rows]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        row = next((row for row in state.links.rows if row.key == key), None)
        if row is None:
            return ()
        warnings = [literal(text, "$text-warning") for text in row.warnings]
        return [*([muted(row.path)] if row.path else []), *warnings, *cause_lines(row)]

    def head(self, state: WizardState) -> Content:
        links = state.links
        if links.cause:
            return Content("\n").join([literal(links.cause, "$text-error"), literal(links.fix)])
        room = self.app.size.width - 4
        wide = len(links.names) >= 2 and _NAME + _CELL * len(links.names) <= room
        return matrix(links.names, links.rows, _NAME, _CELL) if wide and links.rows else Content("")

    def empty(self, state: WizardState) -> Content:
        if state.links.status is Status.FAILED:
            return Content("")
        lines = state.links.progress or ("Measuring." if state.busy else "No link to measure.",)
        return Content("\n").join([muted(line) for line in lines])

    def summary(self, state: WizardState) -> str:
        links = len(state.links.rows)
        return f"{links} link{'s' * (links != 1)}" if links else ""

    def hint(self, state: WizardState) -> Content:
        return muted("Measured with some MB each; figures are kept for a while.")

    def headless(self) -> str:
        return command_line("measure", self.state.answers.profile)


def _row(app: MusterApp, row: LinkRow) -> Row:
    known = row.status not in (Status.WAITING, Status.WORKING, Status.FAILED)
    return Row(
        row.key,
        (
            literal(f"{row.source} > {row.target}"),
            literal(f"{row.mbit:.4g}" if known else ""),
            literal(f"{row.mbit_back:.4g}" if known and row.mbit_back else ""),
            literal(f"{row.rtt_ms:.2g}" if known else ""),
            shown_state(app, row),
            muted(row.path),
        ),
    )


def matrix(names: Sequence[str], rows: Sequence[LinkRow], first: int, cell: int) -> Content:
    """Return Mbit/s and ms from every machine (line) to every other (column)."""
    there = {(row.source, row.target): (row.mbit, row) for row in rows}
    back = {(row.target, row.source): (row.mbit_back, row) for row in rows if row.mbit_back}
    known = {**back, **there}
    lines = [muted("Mbit/s, ms").pad_right(first - 10) + Content("").join([_fit(muted(name), cell) for name in names])]
    for source in names:
        cells = [_fit(_figure(known.get((source, target)), source == target), cell) for target in names]
        lines.append(
            literal(source).truncate(first - 1, ellipsis=True).pad_right(max(1, first - len(source)))
            + Content("").join(cells)
        )
    return Content("\n").join(lines)


def _fit(text: Content, cells: int) -> Content:
    text = text.truncate(cells - 1, ellipsis=True)
    return text.pad_left(cells - text.cell_length)


def _figure(known: tuple[float, LinkRow] | None, same: bool) -> Content:
    if same or known is None:
        return muted("" if same else "?")
    mbit, row = known
    style = "" if row.status is Status.OK else mark(row.status).style
    return Content.assemble((f"{mbit:.4g}", style), (f" {row.rtt_ms:.2g}", "$text-muted"))
