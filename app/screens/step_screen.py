"""Base of the set-up's screens: breadcrumb, question, a table, and details of the selected row next to it or below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from app.screens.network_map import map_where_there_is_room
from app.shell.base_app import MusterApp
from app.shell.base_screen import BaseScreen
from app.shell.folding import Prose
from app.shell.keys import TALL, WIDE, WIDEST, Key
from app.shell.row_table import RowTable
from app.shell.text import MARGIN, StatusMark, TableColumn, TableRow, join, literal, muted, whole_width, widths
from app.wizard.engine import Wizard
from app.wizard.state import actions
from app.wizard.state.dependencies import blockers, busy_here
from app.wizard.state.records import Assessment, ItemStatus
from app.wizard.state.state import ORDER, Action, StatePart, Step, WizardState, visited
from profiles.quantities import duration_text, left_text

GO_ON = Key("enter", "go_on", "Continue", "Continue to the next step.", main=True)
SKIP = Key("s", "skip", "Skip measuring", "End measuring with the figures so far, and guess what is not measured yet.")
NEXT = Key("n", "next", "Next", "Continue to the next step, whatever is selected.", shown=False)


MARKS = {
    status: StatusMark.PROBLEM if status is ItemStatus.FAILED else StatusMark[status.name] for status in ItemStatus
}
"""Mark of each status."""


_MOST_SIDE = 60
"""Maximum width of the details next to a table."""
_SHORT_WORK = 5.0
"""Seconds of work that is shown without its time."""
_FRAME = 8
"""Cells for margins and the gap between table and details."""


class SteeredApp(MusterApp):
    """The application as its screens see it; :class:`app.screens.app.WizardApp` implements it."""

    wizard: Wizard

    def follow(self) -> None:
        """Show the current state on the screen of its step."""
        raise NotImplementedError  # the application has it

    def open_dashboard(self, run: Path) -> None:
        """Show a run live over the set-up; esc returns."""
        raise NotImplementedError  # the application has it


class _Details(Prose):
    """Details next to the table or under it. The screen folds lines to its width, so a resize redraws them."""

    def on_resize(self) -> None:
        cast(StepScreen, self.screen).draw()


class StepScreen(BaseScreen):
    """Screen of one step; a subclass provides the table and the details of its rows."""

    STEP: ClassVar[Step]
    COLUMNS: ClassVar[tuple[TableColumn, ...]] = ()
    HEADED: ClassVar[bool] = True
    """Whether column labels are shown."""
    DETAIL_BELOW: ClassVar[bool] = False
    """On narrow terminals, show details under the table rather than under the selected row."""
    SIDE: ClassVar[int] = 42
    """Minimum width of the details next to the table."""

    DEFAULT_CSS = """
    StepScreen #question { height: auto; }
    StepScreen #head { height: auto; margin-top: 1; }
    StepScreen #main { height: 1fr; margin-top: 1; layout: vertical; }
    StepScreen #rows { width: 1fr; height: 1fr; }
    StepScreen #side { display: none; height: auto; max-height: 100%; }
    StepScreen.-widest #main, StepScreen.-below.-wide #main { layout: horizontal; }
    StepScreen.-widest #side, StepScreen.-below.-wide #side {
        display: block; width: 42; margin-left: 2; padding: 0 0 0 2; border-left: solid $border;
    }
    StepScreen #preview { display: none; height: 1fr; margin-top: 1; padding-left: 2; }
    StepScreen.-preview #main { height: auto; max-height: 60%; }
    StepScreen.-preview #rows { height: auto; }
    StepScreen.-preview #preview { display: block; }
    StepScreen #said { height: auto; max-height: 5; margin: 1 0; }
    StepScreen #side.-nothing { border: none; }
    StepScreen.-below.-narrow #rows { height: auto; max-height: 50%; }
    StepScreen.-below.-narrow #side { display: block; width: 100%; height: 1fr; margin: 1 0 0 0; padding: 0 0 0 2; }
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.HEADING = cls.STEP.heading

    # --------------------------------------------------------------------------------------- what a subclass says

    def columns(self, state: WizardState) -> Sequence[TableColumn]:
        """Return the columns of the table."""
        return self.COLUMNS

    def rows(self, state: WizardState) -> Sequence[TableRow]:
        """Return the rows of the table, without the details of the selected one."""
        raise NotImplementedError  # every step's screen has its own

    def detail(self, state: WizardState, key: str) -> Sequence[Content]:
        """Return the details of the selected row."""
        return ()

    def head(self, state: WizardState) -> Content:
        """Return the text above the table; empty: none."""
        return Content("")

    def preview(self, state: WizardState) -> Sequence[Content]:
        """Return what stands under the table where the terminal is tall enough."""
        return ()

    def empty(self, state: WizardState) -> Content:
        """Return the text shown while there are no rows."""
        return Content("")

    def question(self, state: WizardState) -> str:
        """Return the question that this step answers."""
        return self.STEP.question

    def summary(self, state: WizardState) -> str:
        """Return a few words shown next to the question."""
        return ""

    def hint(self, state: WizardState) -> Content:
        """Return the line above the keys, shown when there is no notice and no activity."""
        return Content("")

    # ------------------------------------------------------------------------------------------------- the frame

    _notice = ""
    _was_blocker = False
    _busy_since: Mapping[str, float] = {}
    """Work in progress, and when this screen first showed it, by the application's clock."""

    @property
    def steered(self) -> SteeredApp:
        return cast(SteeredApp, self.app)

    @property
    def state(self) -> WizardState:
        return self.steered.wizard.state

    @property
    def table(self) -> RowTable:
        return self.query_one("#rows", RowTable)

    def body(self) -> ComposeResult:
        yield Prose(id="question")
        yield Prose(id="head")
        with Container(id="main"):
            yield RowTable(self.columns(self.state), headed=self.HEADED, id="rows")
            with VerticalScroll(id="side", can_focus=self.DETAIL_BELOW):
                yield _Details(id="about")
        yield Prose(id="preview")
        yield Prose(id="said")

    def on_mount(self) -> None:
        self.set_class(self.DETAIL_BELOW, "-below")
        self.table.focus()

    def on_screen_resume(self) -> None:
        self.draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def title_line(self) -> Content:
        """Return the breadcrumb."""
        crumb_contents = [_crumb(step, self.STEP) for step in self._visited()]
        crumbs = Content.styled(" › ", "$text-muted").join(crumb_contents)
        return crumbs if self.app.size.width < WIDE else Content.assemble(("Muster   ", "bold $primary"), crumbs)

    def _visited(self) -> tuple[Step, ...]:
        """Return the steps of this set-up, including this one."""
        shown = visited(self.state.needless - ({self.STEP} if self.STEP is Step.CHECKS else set()))
        return shown if self.STEP in shown else ORDER

    def draw(self) -> None:
        """Draw the current state."""
        if not self.ready or not self.is_current:
            return
        state = self.state
        self.refresh_frame()
        summary = literal(self.summary(state), "$text-muted")
        self.query_one("#question", Static).update(
            join(Content.styled(self.question(state), "bold"), summary, between="   ")
        )
        head, content = self.query_one("#head", Static), self.head(state)
        head.display = bool(content)
        head.update(content)
        self.query_one("#said", Static).update(self._status_lines(state))
        preview = self.preview(state) if self.app.size.height >= TALL else ()
        self.set_class(bool(preview), "-preview")
        self.query_one("#preview", Static).update(Content("\n").join(preview))
        self._draw_table(state)

    def _draw_table(self, state: WizardState) -> None:
        """Draw the rows, and the details of the selected one: next to the table if they fit, else under the row."""
        table, rows = self.table, self.rows(state)
        lines = tuple(self.detail(state, table.cursor))
        self.query_one("#about", Static).update(Content("\n").join(lines))
        columns, width = self.columns(state), self.app.size.width
        self.query_one("#side").set_class(not lines, "-nothing")
        self._widen_side(min(_MOST_SIDE, max(self.SIDE, width - _FRAME - whole_width(columns, rows))))
        if not self.DETAIL_BELOW and width < WIDEST:
            rows = [replace(row, detail=lines) if row.key == table.cursor and lines else row for row in rows]
        table.say_when_empty(self.empty(state))
        table.show(rows, columns=columns)

    def shows_whole(self, column: str, text: str) -> bool:
        """Whether the cells of a column are wide enough for a text."""
        width = self.table.scrollable_content_region.width - MARGIN
        return widths(self.columns(self.state), self.rows(self.state), width).get(column, 0) >= len(text)

    def map_lines(self, state: WizardState) -> list[Content]:
        """Return an empty line and the map of the links, where a large terminal has room for it."""
        link_map = map_where_there_is_room(state, *self.app.size, self.steered.ascii_only)
        return [Content(""), link_map] if link_map else []

    def _widen_side(self, cells: int) -> None:
        """On a wide terminal, give the details the width that the table leaves."""
        self.query_one("#side").styles.width = cells if self.app.size.width >= WIDEST else None

    def _status_lines(self, state: WizardState) -> Content:
        lines = []
        if state.notice and self._still_true(state):
            lines.append(literal(state.notice, "$text-warning"))
        now = self.steered.clock()
        self._busy_since = {work: self._busy_since.get(work, now) for work in busy_here(state)}
        if self._busy_since:
            spin = self.steered.spinner()
            busy = " · ".join(_with_clock(work, now - since) for work, since in self._busy_since.items())
            lines.append(Content.assemble((f"{spin} ", "$text-primary"), muted(busy)))
        return Content("\n").join(lines) if lines else self.hint(state)

    def _still_true(self, state: WizardState) -> bool:
        """Whether a notice still applies: the reason that blocked the next step may be resolved by now."""
        if state.notice != self._notice:
            self._notice, self._was_blocker = state.notice, state.notice in blockers(state)
        return not self._was_blocker or state.notice in blockers(state)

    # -------------------------------------------------------------------------------------------------- actions

    def do(self, action: Action) -> None:
        """Send a user action to the set-up, and draw the new state."""
        self.steered.wizard.do(action)
        self.steered.follow()

    def on_row_table_moved(self, event: RowTable.Moved) -> None:
        event.stop()
        self.draw()

    def on_row_table_chosen(self, event: RowTable.Chosen) -> None:
        event.stop()
        self.table.select(event.row)  # rows may have come, and the cursor with them, since enter was pressed
        self.action_go_on()

    def action_go_on(self) -> None:
        """Handle enter: go to the next step, unless overridden."""
        self.action_next()

    def action_next(self) -> None:
        self.do(actions.go_on())

    def action_back(self) -> None:
        if not self.end_filters():
            self.do(actions.go_back())

    def on_row_table_filtered(self) -> None:
        self.draw()

    def action_retry(self) -> None:
        self.do(actions.retry(self.table.cursor))

    def action_skip(self) -> None:
        if self.state.strategy.status is ItemStatus.WORKING:
            self.steered.wizard.skip_measuring()
            self.notify("Measuring ends as soon as one machine has taken its first steps.")
        else:
            self.notify("nothing is being measured", timeout=2)

    def toggle_skip(self, key: str) -> None:
        """Skip a machine, or include it again; the cursor stays on it although rows under it change."""
        self.table.select(key)
        self.do(actions.unskip(key) if key in self.state.answers.skipped else actions.skip(key))

    def copied(self) -> str:
        """The selected row, as text."""
        row = self.table.row
        return " ".join(row.plain.split()) if row is not None else self.headless()


def _with_clock(work: str, seconds: float) -> str:
    """Return work in progress, with its time once it has taken a while."""
    return work if seconds < _SHORT_WORK else f"{work} {duration_text(seconds)}"


def _crumb(step: Step, current: Step) -> Content:
    if step is current:
        return Content.styled(step.heading, "bold $text-primary underline")
    return Content.styled(step.heading, "$foreground" if ORDER.index(step) < ORDER.index(current) else "$text-muted")


def shown_status(app: MusterApp, status: ItemStatus, word: str | None = None) -> Content:
    """Return symbol and word of a status; work in progress is animated."""
    look = MARKS[status]
    symbol = app.spinner() if status is ItemStatus.WORKING else look.symbol
    text = status.value if word is None else word
    return literal(f"{symbol} {text}".rstrip(), look.style)


def shown_state(app: MusterApp, row: Assessment) -> Content:
    """Return a state in its own words."""
    return shown_status(app, row.status, row.label)


def cause_lines(row: Assessment) -> list[Content]:
    """Return the cause and fix of a problem."""
    style = "$text-warning" if row.status is ItemStatus.WARNING else "$text-error"
    lines = [literal(row.cause, style)] if row.cause else []
    return [*lines, *([Content.assemble(("fix: ", "$text-muted"), literal(row.fix))] if row.fix else [])]


def failure(assessment: Assessment) -> Content:
    """Return the cause and fix of a failed part; empty if it has not failed."""
    return (
        Content("\n").join([literal(assessment.cause, "$text-error"), literal(assessment.fix)])
        if assessment.cause
        else Content("")
    )


def progress(state_part: StatePart[Any], otherwise: str) -> Content:
    """Return the progress of a part that has no rows yet; empty if it has failed."""
    lines = () if state_part.status is ItemStatus.FAILED else state_part.progress or (otherwise,)
    return Content("\n").join([muted(line) for line in _together(lines)])


def _together(lines: Sequence[str]) -> Sequence[str]:
    """Return lines of progress, those of machines that do the same as one: ``a and b: reading the data``."""
    by_work: dict[str, list[str]] = {}
    for line in lines:
        by_work.setdefault(getattr(line, "work", line), []).append(line)
    return [_of_machines(work, same) if len(same) > 1 else same[0] for work, same in by_work.items()]


def _of_machines(work: str, lines: Sequence[str]) -> str:
    """Return the line of several machines that do the same, with the longest time that is left."""
    *names, last = [getattr(line, "machine", line) for line in lines]
    times = [left for line in lines if (left := getattr(line, "left", None)) is not None]
    return f"{', '.join(names)} and {last}: {work}{left_text(max(times, default=None))}"
