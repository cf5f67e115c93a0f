"""Lines folded between words; a word that is too long, as a path or a command is, after one of its separators."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len, chop_cells
from textual.content import Content
from textual.geometry import Size
from textual.widgets import Static

_FOLDERS = re.compile(r"[^/\\]*[/\\]+|[^/\\]+")
_PARTS = re.compile(r"[^\-_.=:,;]*[\-_.=:,;]+|[^\-_.=:,;]+")
"""Parts of a word, each with the separators after it: folders of a path, and what a name consists of."""


def fold_spans(text: str, width: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the lines of at most ``width`` cells into which one line is folded, without the spaces
    between them."""
    begin = end = 0
    for word in re.finditer(r"\S+", text):
        if cell_len(text[begin : word.end()]) <= width:
            end = word.end()
            continue
        if end > begin and cell_len(word[0]) <= width:
            yield begin, end
            begin, end = word.span()
            continue
        for start, stop in _parts(text, *word.span(), width):
            if cell_len(text[begin:stop]) > width:
                if end > begin:
                    yield begin, end
                    begin = start
                *pieces, _ = chop_cells(text[begin:stop], width)
                for piece in pieces:
                    yield begin, begin + len(piece)
                    begin += len(piece)
            end = stop
    yield begin, max(begin, end)


def _parts(text: str, begin: int, end: int, width: int) -> Iterator[tuple[int, int]]:
    for folder in _FOLDERS.finditer(text, begin, end):
        is_short = cell_len(folder[0]) <= width
        yield from [folder.span()] if is_short else (piece.span() for piece in _PARTS.finditer(text, *folder.span()))


def folded(text: str, width: int) -> list[str]:
    """Return the lines of at most ``width`` cells into which one line is folded."""
    return [text[begin:end] for begin, end in fold_spans(text, max(2, width))]


def wrapped(line: Content, width: int) -> list[Content]:
    """Return the lines of at most ``width`` cells into which one line is folded, with their styles."""
    if line.cell_length <= width:
        return [line]
    return [line[begin:end] for begin, end in fold_spans(line.plain, max(2, width))]


class Prose(Static):
    """A text of which no line is broken within a word that has separators; see :func:`wrapped`."""

    def __init__(self, text: Content | str = "", *, id: str | None = None) -> None:
        super().__init__(text, markup=False, id=id)

    def _lines(self, width: int) -> list[Content]:
        text = self.content if isinstance(self.content, Content) else Content(str(self.content))
        lines = text.split("\n", allow_blank=True)
        if self.styles.text_wrap == "nowrap":
            return list(lines)
        return [folded_line for line in lines for folded_line in wrapped(line, width)]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines(width)) if width else 0

    def render(self) -> Content:
        return Content("\n").join(self._lines(self.content_size.width or 80))
