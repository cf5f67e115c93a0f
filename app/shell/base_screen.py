"""Base class of screens: title above, key bar below, help and headless command as data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Offset
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from app.shell.dialogs import CommandDialog, HelpDialog
from app.shell.jump import JumpScreen, JumpTarget
from app.shell.keys import EVERYWHERE, OF_SCREENS, Key, KeyBar, TooSmall, bindings, fit
from app.shell.row_table import RowTable
from app.shell.terminal_app import app_of


class TitleBar(Static):
    """The first line of a screen."""

    DEFAULT_CSS = """
    TitleBar { dock: top; height: 1; padding: 0 1; background: $surface; text-wrap: nowrap; text-overflow: ellipsis; }
    """


class BaseScreen(Screen[Any]):
    """A screen of the guided set-up or of the dashboard.

    A subclass declares its keys, its help and its body::

        class Machines(BaseScreen):
            HEADING = "Machines"
            HELP = "Pick the machines that are to train."
            KEYS = (Key("enter", "go_on", "Continue", main=True), Key("a", "add", "Add"))

            def body(self) -> ComposeResult:
                yield RowTable(...)
    """

    HEADING: ClassVar[str] = ""
    HELP: ClassVar[str] = ""
    """Purpose of the screen in a few sentences; ``?`` shows it above the keys."""
    KEYS: ClassVar[tuple[Key, ...]] = ()
    DEFAULT_CSS = """
    BaseScreen { layers: base above; background: $background; }
    BaseScreen.-behind { text-style: dim; }
    BaseScreen > #body { padding: 1 2 0 2; }
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(OF_SCREENS)

    _framed = False

    def __init_subclass__(cls, **settings: Any) -> None:
        keys = cls.__dict__.get("KEYS", ())
        cls.BINDINGS = [*cls.__dict__.get("BINDINGS", []), *bindings(keys)]
        super().__init_subclass__(**settings)

    def compose(self) -> ComposeResult:
        yield TitleBar(self.title_line(), markup=False)
        with Vertical(id="body"):
            yield from self.body()
        yield KeyBar(self.offered_keys(), self.right_keys())
        yield TooSmall()

    def on_mount(self) -> None:
        self._framed = True
        fit(self, self.app.size)

    def on_screen_resume(self) -> None:
        fit(self, self.app.size)  # the terminal may have changed while this screen was not shown

    @property
    def ready(self) -> bool:
        """Whether the widgets of the frame exist: not before they are mounted, and not while the screen is being
        removed, when the application or another thread may still ask it to draw."""
        return self._framed and self.is_running

    # --------------------------------------------------------------------------------- to be overridden by subclasses

    def awaited_by(self, key: str) -> str:
        """Return what a key waits for, because it decides what the key does: it will be there soon. Empty: nothing."""
        return ""

    def body(self) -> ComposeResult:
        """Yield the widgets between title and key bar."""
        yield from ()

    def title_line(self) -> Content:
        """Return the title bar's text."""
        return Content.assemble(("Muster", "bold $primary"), ("  ", ""), (self.HEADING, "bold"))

    def offered_keys(self) -> tuple[Key, ...]:
        """Return the keys that are available at the moment."""
        return self.KEYS

    def right_keys(self) -> tuple[Key, ...]:
        """Return the keys at the right of the key bar, never cut."""
        return EVERYWHERE

    def help_text(self) -> str:
        """Return the text that ``?`` shows above the keys."""
        return self.HELP

    def headless(self) -> str:
        """Return the command that does the same without a screen."""
        return app_of(self).headless_command()

    def about_headless(self) -> str:
        """Return the explanation that ``e`` shows under the headless command."""
        return ""

    def copied(self) -> str:
        """Return the text that ``y`` copies: the selection, else the headless command."""
        return self.headless()

    def leave_question(self) -> str:
        """Return the question asked before leaving; empty: none."""
        return ""

    # -------------------------------------------------------------------------------------------------- actions

    def refresh_frame(self) -> None:
        """Redraw title and keys."""
        if self.ready:
            self.query_one(TitleBar).update(self.title_line())
            self.query_one(KeyBar).offer(self.offered_keys(), self.right_keys())

    def action_back(self) -> None:
        """Return to the previous screen; if a filter is active, end that instead."""
        if self.end_filters():
            return
        if self.app.screen is not self:
            return  # left already: this is a second key press
        if len(self.app.screen_stack) > 2:
            self.close()
        else:
            app_of(self).action_leave()

    def close(self) -> None:
        """Return to the previous screen."""
        self.app.pop_screen()

    def action_help(self) -> None:
        self.app.push_screen(HelpDialog(self.HEADING, self.help_text(), self.offered_keys()))

    def action_headless(self) -> None:
        self.app.push_screen(CommandDialog(self.headless(), self.about_headless()))

    def action_copy(self) -> None:
        app_of(self).copy(self.copied())

    def action_filter(self) -> None:
        """Open the filter of the focused table, else of the first visible one."""
        tables = [table for table in self.query(RowTable) if table.is_on_screen]
        if tables:
            focused = self.focused
            (focused if isinstance(focused, RowTable) else tables[0]).open_filter()

    def action_jump(self) -> None:
        """Label every row and field with a letter, and jump to the one whose letter is pressed."""
        targets = list(self._jump_targets())
        if targets:
            self.app.push_screen(JumpScreen(targets))
        else:
            self.notify("no row or field to go to here", timeout=1.5)

    def _jump_targets(self) -> Iterator[JumpTarget]:
        for widget in self.focus_chain:
            if isinstance(widget, RowTable):
                for key, line in widget.lines_of_rows():
                    yield JumpTarget(Offset(widget.content_region.x, line), partial(_focus, widget, key))
            elif widget.region:
                yield JumpTarget(widget.region.offset, partial(_focus, widget))

    def end_filters(self) -> bool:
        """End the filters of all tables; return whether there was one."""
        ended = [table.end_filter() for table in self.query(RowTable)]
        return any(ended)

    def action_retry(self) -> None:
        """Try again; does nothing unless overridden."""


def _focus(widget: Widget, row: str = "") -> None:
    """Focus a widget and, in a table, put the cursor on a row."""
    widget.focus()
    if isinstance(widget, RowTable):
        widget.select(row)
