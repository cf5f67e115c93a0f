"""A table whose rows have keys, so that selection and scroll position survive every update, filter and resize."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widgets import Input

from app.shell.folding import wrapped
from app.shell.terminal_app import app_of
from app.shell.text import MARGIN, TableColumn, TableLine, TableRow, draw, header, literal, widths


class RowTable(ScrollView, can_focus=True):
    """Rows of text with a cursor; pass all rows again to :meth:`show` whenever something changed.

    Args:
        columns: of the cells; a column may be left out if there is not enough space.
        empty: text shown while there are no rows.
        headed: whether column labels are shown.
    """

    DEFAULT_CSS = """
    RowTable { height: auto; max-height: 100%; background: $background; overflow-x: hidden; }
    RowTable > .row-table--header { color: $text-muted; }
    RowTable > .row-table--row { color: $foreground; }
    RowTable > .row-table--cursor { background: $cursor-line; color: $foreground; }
    RowTable > .row-table--pointer { color: $primary; text-style: bold; background: $cursor-line; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "row-table--header",
        "row-table--row",
        "row-table--cursor",
        "row-table--pointer",
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
        Binding("home", "move(-100000)", show=False),
        Binding("end", "move(100000)", show=False),
        Binding("enter", "choose", show=False),
        Binding("space", "tick", show=False),
    ]

    filter_text: reactive[str] = reactive("")
    """Only rows that contain it are shown; case is ignored."""

    class _OfRow(Message):
        def __init__(self, table: RowTable, row: str) -> None:
            super().__init__()
            self.table, self.row = table, row

    class Moved(_OfRow):
        """The cursor moved to another row."""

    class Chosen(_OfRow):
        """Enter was pressed on a row, or it was clicked twice."""

    class Ticked(_OfRow):
        """Space was pressed on a row."""

    class Filtered(_OfRow):
        """``table.filter_text`` has changed."""

    def __init__(
        self, columns: Sequence[TableColumn], *, empty: Content | str = "", headed: bool = True, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._headed = headed
        self._empty = Content(empty) if isinstance(empty, str) else empty
        self._all_rows: tuple[TableRow, ...] = ()
        self._rows: tuple[TableRow, ...] = ()
        self._lines: list[TableLine] = []
        self._cursor = ""
        self._cell_width = 0
        self._header: list[Content] = []

    # ------------------------------------------------------------------------------------------------- contents

    def show(self, rows: Iterable[TableRow], *, columns: Sequence[TableColumn] | None = None) -> None:
        """Show these rows; the cursor stays on its row, or moves to the one now at its position."""
        rows = tuple(rows)
        columns = self._columns if columns is None else tuple(columns)
        if rows == self._all_rows and columns == self._columns:
            return
        self._columns = columns
        self._all_rows = rows
        self._arrange()

    def say_when_empty(self, text: Content) -> None:
        """Set the text shown while there are no rows."""
        if not text.is_same(self._empty):
            self._empty = text
            self._arrange()

    @property
    def cursor(self) -> str:
        """Key of the row under the cursor; empty: none."""
        return self._cursor

    @property
    def row(self) -> TableRow | None:
        """The row under the cursor."""
        return next((row for row in self._rows if row.key == self._cursor), None)

    def select(self, key: str) -> None:
        """Put the cursor on a row, if it is shown."""
        if key != self._cursor and any(row.key == key and row.selectable for row in self._rows):
            self._cursor = key
            self._to_cursor()
            self.refresh()
            self.post_message(self.Moved(self, key))

    def watch_filter_text(self) -> None:
        self._arrange()
        self.post_message(self.Filtered(self, self._cursor))

    def _arrange(self) -> None:
        previous_keys = [row.key for row in self._rows]
        needle = self.filter_text.casefold()
        self._rows = tuple(row for row in self._all_rows if not needle or needle in row.plain.casefold())
        self._keep_cursor(previous_keys)
        self._lay_out()

    def _keep_cursor(self, previous_keys: Sequence[str]) -> None:
        keys = [row.key for row in self._rows if row.selectable]
        if self._cursor in keys:
            return
        index = previous_keys.index(self._cursor) if self._cursor in previous_keys else 0
        self._cursor = keys[min(index, len(keys) - 1)] if keys else ""
        if self.is_mounted:
            self.post_message(self.Moved(self, self._cursor))

    def _lay_out(self) -> None:
        self._cell_width = width = max(0, self.scrollable_content_region.width - MARGIN)
        if not width:
            return
        cells = widths(self._columns, self._rows, width)
        self._header = header(self._columns, cells)
        previous_lines, self._lines = self._lines, []
        for row in self._rows:
            self._lines += draw(self._columns, row, cells, width)
        if not self._rows:
            self._lines = self._when_empty(width)
        size = Size(self.scrollable_content_region.width, len(self._lines) + self._headers)
        if size != self.virtual_size:
            self.virtual_size = size
            self.refresh(layout=True)
        if previous_lines != self._lines:
            self.refresh()
        self._to_cursor()

    def _when_empty(self, width: int) -> list[TableLine]:
        no_match = literal(f"nothing here contains '{self.filter_text}'; esc ends the filter")
        text = no_match if self._all_rows else self._empty
        lines = [folded for line in text.split("\n", allow_blank=True) for folded in wrapped(line, width)]
        return [TableLine("", line, True) for line in lines]

    @property
    def _headers(self) -> int:
        return len(self._header) if self._headed and self._rows else 0

    def on_resize(self) -> None:
        if max(0, self.scrollable_content_region.width - MARGIN) != self._cell_width:
            self._lay_out()
        self._to_cursor()

    def watch_show_vertical_scrollbar(self) -> None:
        """Lay out again: the scroll bar takes space from the cells without a resize event."""
        self.call_after_refresh(self.on_resize)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._lines) + self._headers)

    # -------------------------------------------------------------------------------------------------- drawing

    def render(self) -> str:
        return ""

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        base = self._style("row-table--row")
        if y < self._headers:
            return self._strip(Content(" " * MARGIN) + self._header[y], width, self._style("row-table--header"))
        index = y - self._headers + self.scroll_offset.y
        if not 0 <= index < len(self._lines):
            return Strip.blank(width, base.rich_style)
        line = self._lines[index]
        if line.row != self._cursor or not line.row:
            return self._strip(Content(" " * MARGIN) + line.content, width, base)
        return self._cursor_line(line, width)

    def _cursor_line(self, line: TableLine, width: int) -> Strip:
        pointer = self._style("row-table--pointer").rich_style
        style = self._style("row-table--cursor") if self.has_focus else self._style("row-table--row")
        if self.has_focus and app_of(self).no_color:
            style += Style(bold=True)
        mark = ("> " if app_of(self).ascii_only else "▌ ") if line.is_first else "  "
        if not self.has_focus:
            pointer = self._style("row-table--header").rich_style
            mark = mark.replace("▌", "›")
        return Strip.join([Strip([Segment(mark, pointer)]), self._strip(line.content, width - MARGIN, style)])

    def _strip(self, content: Content, width: int, style: Style) -> Strip:
        strips = Visual.to_strips(self, content, width, 1, style, pad=True, apply_selection=False)
        return strips[0] if strips else Strip.blank(width, style.rich_style)

    def _style(self, name: str) -> Style:
        return self.get_visual_style(name)

    def lines_of_rows(self) -> Iterator[tuple[str, int]]:
        """Yield key and screen line of every visible row that the cursor can move to."""
        top, height = round(self.scroll_y), max(0, self.scrollable_content_region.height - self._headers)
        selectable = {row.key for row in self._rows if row.selectable}
        for index, line in enumerate(self._lines[top : top + height]):
            if line.is_first and line.row in selectable:
                yield line.row, self.content_region.y + self._headers + index

    # ---------------------------------------------------------------------------------------------------- moving

    def action_move(self, rows: int) -> None:
        """Move the cursor by so many rows."""
        keys = [row.key for row in self._rows if row.selectable]
        if keys:
            index = keys.index(self._cursor) if self._cursor in keys else 0
            self.select(keys[min(len(keys) - 1, max(0, index + rows))])

    def action_choose(self) -> None:
        self.post_message(self.Chosen(self, self._cursor))

    def action_tick(self) -> None:
        if self._cursor:
            self.post_message(self.Ticked(self, self._cursor))

    def _to_cursor(self) -> None:
        """Scroll until the cursor's whole row is visible."""
        cursor_lines = [index for index, line in enumerate(self._lines) if line.row == self._cursor and line.row]
        if not cursor_lines:
            return
        height = max(1, self.scrollable_content_region.height - self._headers)
        top = min(round(self.scroll_y), max(0, len(self._lines) - height))
        if cursor_lines[0] < top:
            self.scroll_to(y=cursor_lines[0], animate=False, force=True)
        elif cursor_lines[-1] >= top + height:
            self.scroll_to(y=min(cursor_lines[0], cursor_lines[-1] - height + 1), animate=False, force=True)
        elif top != round(self.scroll_y):
            self.scroll_to(y=top, animate=False, force=True)

    def on_click(self, event: events.Click) -> None:
        index = event.y - self._headers + self.scroll_offset.y
        if 0 <= index < len(self._lines) and event.y >= self._headers:
            key = self._lines[index].row
            self.select(key)
            if event.chain == 2 and key:
                self.post_message(self.Chosen(self, key))

    def open_filter(self) -> None:
        """Open the filter's input line under the table."""
        if not self.screen.query(FilterLine):
            self.screen.mount(FilterLine(self), after=self)
        self.screen.query_one(FilterLine).focus()

    def end_filter(self) -> bool:
        """Remove the filter; return whether there was one."""
        had_filter, self.filter_text = bool(self.filter_text), ""
        self.screen.query(FilterLine).remove()
        return had_filter


class FilterLine(Input):
    """Input that filters its table as it is typed; enter keeps the filter, esc ends it."""

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
