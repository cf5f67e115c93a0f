"""Text on screens: what comes from outside is shown as it is, never obeyed; a state is a symbol, a word and a colour,
each readable without the others. And where the cells of a table stand: pure functions of its columns and rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter

from textual.content import Content

from app.console import visible


def literal(text: object, style: str = "") -> Content:
    """Return text from outside in one line: escape codes written out, markup not parsed."""
    return Content.styled(visible(text), style) if style else Content(visible(text))


def muted(text: object) -> Content:
    """Return text that matters less."""
    return literal(text, "$text-muted")


def join(*parts: Content | str, between: str = "  ") -> Content:
    """Put parts side by side; empty ones are left out."""
    kept = [part if isinstance(part, Content) else Content(part) for part in parts if part]
    return Content(between).join(kept)


DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the braille characters by row and column of a cell."""


def together(cells: Iterable[tuple[str, str]]) -> Content:
    """Return signs with their styles as one text, in which neighbours of one style are joined."""
    runs = groupby(cells, key=itemgetter(1))
    return Content.assemble(*[("".join(sign for sign, _ in same), style) for style, same in runs])


class StatusMark(Enum):
    """A state that anything shown may be in: its symbol, of one cell, and a style of the theme."""

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
    """Return a bar of so many cells, filled by ``share`` (0 to 1)."""
    full = round(min(1.0, max(0.0, share)) * cells)
    return "━" * full + "─" * (cells - full)


GAP = 2
_HEADER_LINES = 2
MARGIN = 2
"""Cells at the left for the cursor."""
_FIGURE = 12
"""Cells of a figure that is never cut, as in ``-1.234e+05 x``."""


@dataclass(frozen=True)
class TableColumn:
    """A column; what it shows is at the same place in every row."""

    key: str
    label: str
    right: bool = False
    most: int = 40
    """Cells it takes at most."""
    least: int = 6
    """Cells below which it is rather left out."""
    folds: bool = False
    """Whether what does not fit goes on in the next line, instead of being cut."""
    rank: int = 0
    """The highest rank is left out first where there is no room; 0 always stays."""

    @property
    def floor(self) -> int:
        """Cells below which it does not shrink: its label stands in two lines, no word of it broken."""
        words = self.label.split()
        cuts = [max(len(" ".join(words[:cut])), len(" ".join(words[cut:]))) for cut in range(1, len(words) + 1)]
        return max(self.least, min(cuts, default=0))


@dataclass(frozen=True)
class TableRow:
    """A row; ``key`` tells it from others while the rows change."""

    key: str
    cells: tuple[Content, ...]
    detail: tuple[Content, ...] = ()
    """Lines under it, folded to the width of the table."""
    selectable: bool = True

    @property
    def plain(self) -> str:
        """All its text, for filters."""
        return " ".join(part.plain for part in (*self.cells, *self.detail))


@dataclass(frozen=True)
class TableLine:
    """One line of the table as it is drawn."""

    row: str
    """Key of its row."""
    content: Content
    first: bool


def widths(columns: Sequence[TableColumn], rows: Sequence[TableRow], room: int) -> dict[str, int]:
    """Return the cells of each column that is shown, for a table of ``room`` cells."""
    wanted = {column.key: _natural(place, column, rows) for place, column in enumerate(columns)}
    shown = list(columns)
    floors = {c.key: max(c.floor, _whole(c, _longest(place, rows))) for place, c in enumerate(columns)}
    while _total(shown, wanted) > room:
        if _shrink(shown, wanted, floors, room):
            break
        optional = [column for column in shown[1:] if column.rank > 0]
        if not optional:
            break
        least = max(optional, key=lambda column: column.rank)
        shown.remove(least)
        wanted = {column.key: _natural(columns.index(column), column, rows) for column in shown}
    return {column.key: wanted[column.key] for column in shown}


def whole_width(columns: Sequence[TableColumn], rows: Sequence[TableRow]) -> int:
    """Return the cells of a table in which nothing is cut that is not longer than its column may be."""
    return MARGIN + _total(columns, {one.key: _natural(place, one, rows) for place, one in enumerate(columns)})


def _natural(place: int, column: TableColumn, rows: Sequence[TableRow]) -> int:
    cells = _longest(place, rows)
    return max(min(column.most, max(len(column.label), cells)), _whole(column, cells))


def _longest(place: int, rows: Sequence[TableRow]) -> int:
    return max((row.cells[place].cell_length for row in rows if place < len(row.cells)), default=0)


def _whole(column: TableColumn, cells: int) -> int:
    """Cells below which a column of ``cells`` does not shrink: a figure without its exponent would be another one."""
    return min(cells, _FIGURE) if column.right else 0


def _total(columns: Sequence[TableColumn], wanted: Mapping[str, int]) -> int:
    return sum(wanted[column.key] for column in columns) + GAP * (len(columns) - 1)


def _shrink(shown: Sequence[TableColumn], wanted: dict[str, int], floors: Mapping[str, int], room: int) -> bool:
    """Take cells from the widest columns, the first one excepted, until they fit; whether that was possible."""
    excess = _total(shown, wanted) - room
    spare = sum(max(0, wanted[column.key] - floors[column.key]) for column in shown[1:])
    if spare < excess and any(column.rank for column in shown[1:]):
        return False
    while excess > 0:
        widest = max(
            (column for column in shown[1:] if wanted[column.key] > floors[column.key]),
            key=lambda column: wanted[column.key],
            default=None,
        )
        if widest is None:
            wanted[shown[0].key] = max(floors[shown[0].key], wanted[shown[0].key] - excess)
            break
        wanted[widest.key] -= 1
        excess -= 1
    return True


def header(columns: Sequence[TableColumn], cells: Mapping[str, int]) -> list[Content]:
    """Return the lines of labels: a label wider than its column takes two."""
    shown = [column for column in columns if column.key in cells]
    labels = [literal(column.label).wrap(cells[column.key])[:_HEADER_LINES] for column in shown]
    height = max((len(label) for label in labels), default=0)
    lines = []
    for line in range(height):
        parts = [label[line - height] if line >= height - len(label) else Content("") for label in labels]
        fitted = [_fitted(part.rstrip(), column, cells[column.key]) for part, column in zip(parts, shown)]
        lines.append(Content(" " * GAP).join(fitted))
    return lines


def draw(columns: Sequence[TableColumn], row: TableRow, cells: Mapping[str, int], room: int) -> list[TableLine]:
    """Return the lines of one row: its first cell is folded and never cut, others may end with an ellipsis."""
    shown = [(place, column) for place, column in enumerate(columns) if column.key in cells and place < len(row.cells)]
    parts = [_parts(row.cells[place], column, cells[column.key], place == 0) for place, column in shown]
    lines = []
    for number in range(max((len(part) for part in parts), default=1)):
        pieces = [part[number] if number < len(part) else Content("") for part in parts]
        fitted = [_fitted(piece, column, cells[column.key]) for piece, (_, column) in zip(pieces, shown)]
        lines.append(TableLine(row.key, Content(" " * GAP).join(fitted).rstrip(), number == 0))
    for detail in row.detail:
        lines += [TableLine(row.key, Content("  ") + part, False) for part in _wrapped(detail, max(8, room - 2))]
    return lines


def _parts(cell: Content, column: TableColumn, width: int, first: bool) -> list[Content]:
    if first and not column.folds:
        return cell.fold(width)  # every sign of a name, where it does not fit: spaces too
    return [line.rstrip() for line in _wrapped(cell, width)] if column.folds else [cell]


def _fitted(cell: Content, column: TableColumn, width: int) -> Content:
    if cell.cell_length > width:
        return cell.truncate(width, ellipsis=True)
    padding = width - cell.cell_length
    return cell.pad_left(padding) if column.right else cell.pad_right(padding)


def _wrapped(line: Content, width: int) -> list[Content]:
    return list(line.wrap(width)) if line else [line]
