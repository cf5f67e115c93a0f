"""The line that ``/`` opens under a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Input

if TYPE_CHECKING:
    from app.shell.row_table import RowTable


class FilterLine(Input):
    """Filters its table with every letter; enter keeps the filter, esc ends it."""

    DEFAULT_CSS = """
    FilterLine { height: 1; border: none; padding: 0; margin: 1 0 0 2; background: $surface; }
    FilterLine:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", show=False),
        Binding("enter,down", "keep", show=False),
    ]

    def __init__(self, table: RowTable) -> None:
        super().__init__(table.filter_text, placeholder="filter: type a part of a row", select_on_focus=False)
        self.cursor_blink = False
        self._table = table

    @classmethod
    def open(cls, table: RowTable) -> None:
        """Open the line of a table, or go to it."""
        parent = table.parent
        for line in table.screen.query(cls):
            line.focus()
            return
        if parent is not None:
            table.screen.mount(cls(table), after=table)
            table.screen.query_one(cls).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._table.filter_text = event.value

    def action_keep(self) -> None:
        if not self.value:
            self.remove()
        self._table.focus()

    def action_stop(self) -> None:
        self._table.filter_text = ""
        self._table.focus()
        self.remove()
