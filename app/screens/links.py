"""Links: how fast the network is between every two machines, and which path was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.content import Content

from app.console import command_line
from app.screens.step_screen import GO_ON, MARKS, NEXT, StepScreen, cause_lines, failure, progress, shown_state
from app.shell.base_app import MusterApp
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.text import literal, muted
from app.wizard.assessment import of_pair, path_of, warnings_of
from app.wizard.records import Status
from app.wizard.state import Step, WizardState
from profiles.counts import counted

if TYPE_CHECKING:  # loads SSH, which the first screen does without
    from distributed.measuring.link_figures import PairFigures

_CELL = 15
_NAME = 16


class LinksScreen(StepScreen):
    """How fast is the network?"""

    STEP = Step.LINKS
    COLUMNS = (
        Column("pair", "from, to", most=44, least=18),
        Column("there", "Mbit/s", right=True, most=8, least=6),
        Column("back", "back", right=True, most=8, least=5),
        Column("rtt", "ms", right=True, most=7, least=4),
        Column("state", "state", most=16, least=8),
        Column("path", "path", most=44, least=10, rank=1),
    )
    HELP = (
        "Every two machines send data to each other, one pair after the other, so that no measurement disturbs "
        "another. The figures decide which way to train is fastest here. A cable helps more than any other change."
    )
    KEYS: ClassVar[tuple[Key, ...]] = (
        GO_ON,
        NEXT,
        Key("r", "retry", "Measure again", "Measure all links again."),
    )

    def rows(self, state: WizardState) -> Sequence[Row]:
        return [_row(self.steered, pair) for pair in state.links.found]

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        pair = next((pair for pair in state.links.found if _key(pair) == key), None)
        if pair is None:
            return ()
        warnings = [literal(text, "$text-warning") for text in warnings_of(pair)]
        path = path_of(pair)
        return [*([muted(path)] if path else []), *warnings, *cause_lines(of_pair(pair))]

    def head(self, state: WizardState) -> Content:
        links = state.links
        if links.cause:
            return failure(links)
        room = self.app.size.width - 4
        names = [row.name for row in state.members]
        wide = len(names) >= 2 and _NAME + _CELL * len(names) <= room
        return matrix(names, links.found, _NAME, _CELL) if wide and links.found else Content("")

    def empty(self, state: WizardState) -> Content:
        return progress(state.links, "Measuring." if state.busy else "No link to measure.")

    def summary(self, state: WizardState) -> str:
        return counted(len(state.links.found), "link") if state.links.found else ""

    def hint(self, state: WizardState) -> Content:
        return muted("Measured with a few MB each; the figures are reused for a while.")

    def headless(self) -> str:
        return command_line("measure", self.state.answers.profile)


def _key(pair: PairFigures) -> str:
    return f"{pair.source}|{pair.target}"


def _row(app: MusterApp, pair: PairFigures) -> Row:
    figures = pair.figures
    return Row(
        _key(pair),
        (
            literal(f"{pair.source} > {pair.target}"),
            literal(f"{figures.mbit:.4g}" if figures else ""),
            literal(f"{figures.mbit_back:.4g}" if figures and figures.mbit_back else ""),
            literal(f"{figures.rtt_ms:.2g}" if figures else ""),
            shown_state(app, of_pair(pair)),
            muted(path_of(pair)),
        ),
    )


def matrix(names: Sequence[str], pairs: Sequence[PairFigures], first: int, cell: int) -> Content:
    """Return Mbit/s and ms from every machine (line) to every other (column)."""
    known = {(pair.source, pair.target): pair for pair in pairs}
    known |= {(pair.target, pair.source): pair for pair in pairs if pair.figures and pair.figures.mbit_back}
    lines = [muted("Mbit/s, ms").pad_right(first - 10) + Content("").join([_fit(muted(name), cell) for name in names])]
    for source in names:
        cells = [_fit(_figure(known.get((source, target)), source, target), cell) for target in names]
        lines.append(
            literal(source).truncate(first - 1, ellipsis=True).pad_right(max(1, first - len(source)))
            + Content("").join(cells)
        )
    return Content("\n").join(lines)


def _fit(text: Content, cells: int) -> Content:
    text = text.truncate(cells - 1, ellipsis=True)
    return text.pad_left(cells - text.cell_length)


def _figure(pair: PairFigures | None, source: str, target: str) -> Content:
    if source == target or pair is None:
        return muted("" if source == target else "?")
    found, figures = of_pair(pair), pair.figures
    style = "" if found.status is Status.OK else MARKS[found.status].style
    mbit = 0.0 if figures is None else figures.mbit if source == pair.source else figures.mbit_back
    return Content.assemble((f"{mbit:.4g}", style), (f" {figures.rtt_ms if figures else 0:.2g}", "$text-muted"))
