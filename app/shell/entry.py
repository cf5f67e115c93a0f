"""Dialogs that ask for a text or a choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, Static

from app.console import visible
from app.shell.dialogs import Box
from app.shell.keys import Key
from app.shell.row_layout import Column, Row
from app.shell.row_table import RowTable
from app.shell.text import literal


class TextDialog(Box[str | None]):
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
    TextDialog #about { height: auto; max-height: 8; color: $text-muted; }
    TextDialog #field { margin-top: 1; height: 1; border: none; padding: 0 1; background: $panel; }
    TextDialog #choices { margin-top: 1; max-height: 8; background: $surface; }
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
        super().__init__(heading)
        self._about, self._value = about, visible(value)
        self._accept, self._secret, self._choices, self._needed = accept, secret, choices, needed

    def body(self) -> ComposeResult:
        yield Static(Content("\n").join(self._about), id="about", markup=False)
        yield Input(self._value, password=self._secret, id="field")
        if self._choices:
            columns = (Column("value", "value", most=30), Column("about", "about", most=60))
            yield RowTable(columns, headed=False, id="choices")

    def keys(self) -> tuple[Key, ...]:
        listed = [Key("down", "choices", "To the list")] if self._choices and self.FREE else []
        return (Key("enter", "accept", self._accept, main=True), self.CLOSE, *listed)

    def on_mount(self) -> None:
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
