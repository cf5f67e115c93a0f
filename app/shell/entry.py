"""Dialogs that ask for a text or a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from app.console import visible
from app.shell.frame import TooSmall, fit
from app.shell.key_bar import key_line
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.row_table import RowTable
from app.shell.text import literal

_KEY_LINE = 60


class TextDialog(ModalScreen[str | None]):
    """Asks for a line of text; ``None`` if it was closed.

    Args:
        heading: what is asked for.
        about: lines under it.
        value: what stands there first.
        accept: label of enter.
        secret: shown as dots, and forgotten by the field as soon as it is given.
        choices: values to choose from, with a word about each.
        needed: what is to be typed, said when nothing is; the choice that is marked is taken then, where there is one.
    """

    DEFAULT_CSS = """
    TextDialog { align: center middle; layers: base above; background: $background 60%; }
    TextDialog > #box {
        width: 72; max-width: 94%; height: auto; max-height: 90%; padding: 1 2; background: $surface;
        border: round $border;
    }
    TextDialog #heading { text-style: bold; height: auto; }
    TextDialog #about { height: auto; max-height: 8; color: $text-muted; }
    TextDialog #field { margin-top: 1; height: 1; border: none; padding: 0 1; background: $panel; }
    TextDialog #choices { margin-top: 1; max-height: 8; background: $surface; }
    TextDialog #keys { height: 1; margin-top: 1; }
    """
    FREE: ClassVar[bool] = True
    """Whether anything may be typed."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", show=False),
        Binding("down", "choices", show=False),
    ]

    def __init__(
        self,
        heading: str,
        about: Sequence[Content] = (),
        *,
        value: str = "",
        accept: str = "Take it",
        secret: bool = False,
        choices: Sequence[tuple[str, str]] = (),
        needed: str = "",
    ) -> None:
        super().__init__()
        self._heading, self._about, self._value = heading, about, visible(value)
        self._accept, self._secret, self._choices, self._needed = accept, secret, choices, needed

    def compose(self) -> ComposeResult:
        with Vertical(id="box"):
            yield Static(literal(self._heading), id="heading", markup=False)
            yield Static(Content("\n").join(self._about), id="about", markup=False)
            yield Input(self._value, password=self._secret, id="field")
            if self._choices:
                columns = (Column("value", "value", most=30), Column("about", "about", most=60))
                yield RowTable(columns, headed=False, id="choices")
            yield Static(self._keys(), id="keys", markup=False)
        yield TooSmall()

    def _keys(self) -> Content:
        keys = [Key("enter", "accept", self._accept, main=True), Key("escape", "close", "Close")]
        if self._choices and self.FREE:
            keys.append(Key("down", "choices", "To the list"))
        return key_line(keys, _KEY_LINE, ())

    def on_mount(self) -> None:
        fit(self, self.app.size)
        field = self.query_one("#field", Input)
        field.cursor_blink = False
        self.begin()
        for table in self.query(RowTable):
            table.show([Row(value, (literal(value), literal(about, "$text-muted"))) for value, about in self._choices])
            if self._value in [value for value, _ in self._choices]:
                table.select(self._value)

    def begin(self) -> None:
        """Go to where the answer is given."""
        self.query_one("#field", Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._give(event.value)

    def on_row_table_chosen(self, event: RowTable.Chosen) -> None:
        event.stop()
        self._give(event.row)

    def _give(self, value: str) -> None:
        if self._needed and not value.strip():
            value = next((table.cursor for table in self.query(RowTable)), "")
        if self._needed and not value:
            self.query_one("#about", Static).update(literal(self._needed, "$text-warning"))
            return
        field = self.query_one("#field", Input)
        if self._secret:
            with field.prevent(Input.Changed):
                field.value = ""
        self.dismiss(value)

    def action_accept(self) -> None:
        self._give(self.query_one("#field", Input).value)

    def action_choices(self) -> None:
        for table in self.query(RowTable):
            table.focus()

    def action_close(self) -> None:
        self.dismiss(None)


class ChoiceDialog(TextDialog):
    """Asks for one of a few values."""

    FREE = False
    DEFAULT_CSS = """
    ChoiceDialog #field { display: none; }
    ChoiceDialog #choices { max-height: 14; }
    """

    def begin(self) -> None:
        self.query_one(RowTable).focus()

    def action_accept(self) -> None:
        self._give(self.query_one(RowTable).cursor)
