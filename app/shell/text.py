"""Text on screens: external text is shown literally, never interpreted; a state is a symbol, a word and a colour, each
readable without the others. Also the layout of tables, as pure functions of columns and rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter

from textual.content import Content

from app.console import visible
from app.shell.folding import wrapped


def literal(text: object, style: str = "") -> Content:
    """Return external text as one line: escape codes made visible, markup not parsed."""
    return Content.styled(visible(text), style) if style else Content(visible(text))


def muted(text: object) -> Content:
    """Return secondary text."""
    return literal(text, "$text-muted")


def join(*texts: Content | str, between: str = "  ") -> Content:
    """Join contents side by side, leaving out empty ones."""
    contents = [text if isinstance(text, Content) else Content(text) for text in texts if text]
    return Content(between).join(contents)


DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the braille characters by row and column of a cell."""


def together(cells: Iterable[tuple[str, str]]) -> Content:
    """Return styled characters as one text, merging neighbours of the same style."""
    runs = groupby(cells, key=itemgetter(1))
    return Content.assemble(*[("".join(character for character, _ in run), style) for style, run in runs])


class StatusMark(Enum):
    """A displayed state: its symbol, of one cell, and a style of the theme."""

    OK = "✓", "$text-success"
    WARNING = "▲", "$text-warning"
    PROBLEM = "✗", "$text-error"
    ONLINE = "●", "$text-success"
    OFFLINE = "○", "$text-muted"
    LOST = PROBLEM
    WORKING = "◐", "$text-primary"
    WAITING = "·", "$text-muted"
    ASKING = "?", "$text-warning"
    SKIPPED = "–", "$text-muted"
    CHOSEN = "●", "$text-primary"
    NOT_CHOSEN = OFFLINE
    RUNNING = "▶", "$text-success"
    PAUSED = "‖", "$text-warning"
    DONE = OK
    STOPPED = "■", "$text-muted"

    def __init__(self, symbol: str, style: str) -> None:
        self.symbol = symbol
        self.style = style

    def show(self, word: str) -> Content:
        """Return symbol and word in the state's colour; ``""`` for the symbol alone."""
        return literal(f"{self.symbol} {word}".rstrip(), self.style)


def bar(share: float, cells: int) -> str:
    """Return a bar of so many cells, filled up to ``share`` (0 to 1)."""
    full = round(min(1.0, max(0.0, share)) * cells)
    return "━" * full + "─" * (cells - full)


def moving_bar(seconds: float, cells: int) -> str:
    """Return a bar for work whose share is unknown: a part of it moves once along in four seconds."""
    part = max(1, cells // 4)
    begin = int(seconds * 4) % 16 * (cells - part) // 15
    return "─" * begin + "━" * part + "─" * (cells - part - begin)


def ending(text: Content, width: int) -> Content:
    """Return the end of a text that is too long for ``width`` cells: of a path, that is what tells which one it is."""
    if text.cell_length <= width:
        return text
    begin = 1
    while text[begin:].cell_length > max(0, width - 1):
        begin += 1
    return Content.assemble("…", text[begin:])


GAP = 2
_HEADER_LINES = 2
MARGIN = 2
"""Cells at the left, for the cursor."""
_FIGURE = 12
"""Width in cells up to which a number is never cut, as in ``-1.234e+05 x``."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table; its cell has the same index in every row."""

    key: str
    label: str
    right: bool = False
    max_width: int = 40
    """Maximum width in cells."""
    min_width: int = 6
    """Minimum width in cells; with less room, an optional column is left out."""
    folds: bool = False
    """Whether a long cell is folded into several lines instead of being cut."""
    rank: int = 0
    """Columns of the highest rank are left out first if space is short; 0: never."""

    @property
    def floor(self) -> int:
        """Width below which it does not shrink: its label fits into two lines without breaking a word."""
        words = self.label.split()
        cuts = [max(len(" ".join(words[:cut])), len(" ".join(words[cut:]))) for cut in range(1, len(words) + 1)]
        return max(self.min_width, min(cuts, default=0))


@dataclass(frozen=True)
class TableRow:
    """A row; ``key`` identifies it while the rows change."""

    key: str
    cells: tuple[Content, ...]
    detail: tuple[Content, ...] = ()
    """Lines under it, folded to the width of the table."""
    selectable: bool = True

    @property
    def plain(self) -> str:
        """All its text, for filters."""
        return " ".join(content.plain for content in (*self.cells, *self.detail))


@dataclass(frozen=True)
class TableLine:
    """One drawn line of a table."""

    row: str
    """Key of its row."""
    content: Content
    is_first: bool


def widths(columns: Sequence[TableColumn], rows: Sequence[TableRow], width: int) -> dict[str, int]:
    """Return the width of each column that is shown, for a table of ``width`` cells."""
    cells = {column.key: _natural(index, column, rows) for index, column in enumerate(columns)}
    shown = list(columns)
    floors = {c.key: max(c.floor, _uncut_width(c, _longest(index, rows))) for index, c in enumerate(columns)}
    while _total(shown, cells) > width:
        if _shrink(shown, cells, floors, width):
            break
        optional = [column for column in shown[1:] if column.rank > 0]
        if not optional:
            break
        dropped = max(optional, key=lambda column: column.rank)
        shown.remove(dropped)
        cells = {column.key: _natural(columns.index(column), column, rows) for column in shown}
    return {column.key: cells[column.key] for column in shown}


def whole_width(columns: Sequence[TableColumn], rows: Sequence[TableRow]) -> int:
    """Return the width of a table in which no cell is cut unless it exceeds its column's maximum."""
    cells = {column.key: _natural(index, column, rows) for index, column in enumerate(columns)}
    return MARGIN + _total(columns, cells)


def _natural(index: int, column: TableColumn, rows: Sequence[TableRow]) -> int:
    cells = _longest(index, rows)
    return max(min(column.max_width, max(len(column.label), cells)), _uncut_width(column, cells))


def _longest(index: int, rows: Sequence[TableRow]) -> int:
    return max((row.cells[index].cell_length for row in rows if index < len(row.cells)), default=0)


def _uncut_width(column: TableColumn, cells: int) -> int:
    """Width below which a column of ``cells`` does not shrink: a number without its exponent would be another one."""
    return min(cells, _FIGURE) if column.right else 0


def _total(columns: Sequence[TableColumn], cells: Mapping[str, int]) -> int:
    return sum(cells[column.key] for column in columns) + GAP * (len(columns) - 1)


def _shrink(shown: Sequence[TableColumn], cells: dict[str, int], floors: Mapping[str, int], width: int) -> bool:
    """Shrink the widest columns, except the first, until they fit; return whether that was possible."""
    excess = _total(shown, cells) - width
    spare = sum(max(0, cells[column.key] - floors[column.key]) for column in shown[1:])
    if spare < excess and any(column.rank for column in shown[1:]):
        return False
    while excess > 0:
        widest = max(
            (column for column in shown[1:] if cells[column.key] > floors[column.key]),
            key=lambda column: cells[column.key],
            default=None,
        )
        if widest is None:
            cells[shown[0].key] = max(floors[shown[0].key], cells[shown[0].key] - excess)
            break
        cells[widest.key] -= 1
        excess -= 1
    return True


def header(columns: Sequence[TableColumn], cells: Mapping[str, int]) -> list[Content]:
    """Return the header lines: a label wider than its column takes two."""
    shown = [column for column in columns if column.key in cells]
    labels = [literal(column.label).wrap(cells[column.key])[:_HEADER_LINES] for column in shown]
    height = max((len(label) for label in labels), default=0)
    lines = []
    for line in range(height):
        cells_of_line = [label[line - height] if line >= height - len(label) else Content("") for label in labels]
        fitted = [_fitted(cell.rstrip(), column, cells[column.key]) for cell, column in zip(cells_of_line, shown)]
        lines.append(Content(" " * GAP).join(fitted))
    return lines


def draw(columns: Sequence[TableColumn], row: TableRow, cells: Mapping[str, int], width: int) -> list[TableLine]:
    """Return the lines of one row: its first cell is folded, never cut; others may end with an ellipsis."""
    shown = [(i, column) for i, column in enumerate(columns) if column.key in cells and i < len(row.cells)]
    lines_by_cell = [_cell_lines(row.cells[i], column, cells[column.key], i == 0) for i, column in shown]
    lines = []
    for number in range(max(map(len, lines_by_cell), default=1)):
        pieces = [cell[number] if number < len(cell) else Content("") for cell in lines_by_cell]
        fitted = [_fitted(piece, column, cells[column.key]) for piece, (_, column) in zip(pieces, shown)]
        lines.append(TableLine(row.key, Content(" " * GAP).join(fitted).rstrip(), number == 0))
    for detail in row.detail:
        lines += [TableLine(row.key, Content("  ") + line, False) for line in wrapped(detail, max(8, width - 2))]
    return lines


def _cell_lines(cell: Content, column: TableColumn, width: int, is_first: bool) -> list[Content]:
    if is_first and not column.folds:
        return cell.fold(width)  # keep every character of a name, spaces included
    return [line.rstrip() for line in wrapped(cell, width)] if column.folds else [cell]


_PATH = re.compile(r"(~|\.{0,2})/[^:]*")
"""A cell that is a path; one with a colon is a message about a path."""


def _fitted(cell: Content, column: TableColumn, width: int) -> Content:
    if cell.cell_length > width:
        return ending(cell, width) if _PATH.fullmatch(cell.plain) else cell.truncate(width, ellipsis=True)
    padding = width - cell.cell_length
    return cell.pad_left(padding) if column.right else cell.pad_right(padding)
