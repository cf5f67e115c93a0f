"""Tables a person made: CSV from any spreadsheet, or JSON lines. Every error names file, line and column."""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from profiles.errors import BadInput

csv.field_size_limit(2**24)  # a transcript of an hour is longer than the standard library's limit


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    cells: dict[str, str]
    """Text by column, NFC, without white space at the ends."""
    table: Path
    line: int

    @property
    def where(self) -> str:
        return f"{self.table}, line {self.line}"

    def number(self, column: str) -> float | None:
        """Return the number in ``column``; ``None`` if the cell or the column is empty.

        Raises:
            BadInput: the cell holds something else, or a number below 0.
        """
        text = self.cells.get(column, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise BadInput(f"{self.where}, column {column}: {text!r} is not a number of seconds", "write it like 3.25")
        return value


@dataclass(frozen=True)
class Table:
    """A table that was read whole."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def column(self, names: Sequence[str], purpose: str, option: str = "") -> str:
        """Return the first of ``names`` the table has.

        Args:
            option: the option that gave the names, if one did.

        Raises:
            BadInput: it has none; the message lists what is there, and the nearest.
        """
        for name in names:
            if name in self.columns:
                return name
        wanted = " or ".join(repr(name) for name in names)
        pairs = [(match, name) for name in names for match in difflib.get_close_matches(name, self.columns, 1, 0.6)]
        hint = f"add {wanted} to its first line"
        if pairs:
            near, name = pairs[0]
            hint = f"did you mean {near!r}? " + (f"Set {option} = {near}" if option else f"Rename it to {name!r} there")
        there = ", ".join(self.columns)
        raise BadInput(f"{self.path}: no column {wanted} for the {purpose}; it has: {there}", hint)


JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of files with one JSON object a line."""


def read_table(path: Path, quoted: bool = True, data: bytes | None = None) -> Table:
    """Read a file of delimited lines (comma, semicolon or tab; UTF-8 with or without BOM) or of JSON lines.

    Args:
        quoted: whether fields may stand in quotes; where not, a quotation mark is one of the text.
        data: what to take for its content, where that is not all of it.

    Raises:
        BadInput: missing, empty, not UTF-8, or a line that cannot be split into the columns of the first.
    """
    text = _decoded(path, _content(path) if data is None else data)
    rows = tuple(_json_rows(path, text) if path.suffix.lower() in JSON_LINES else _csv_rows(path, text, quoted))
    if not rows:
        raise BadInput(f"{path}: the table is empty", "it needs a line with the column names and a line for each clip")
    return Table(path, tuple(dict.fromkeys(name for row in rows for name in row.cells)), rows)


def as_stored(folder: Path, cell: str) -> Path:
    """Return the file that a cell names, below ``folder`` if it is relative, as the disk spells it.

    Cells are composed (NFC). Files that come from a Mac may have decomposed names, where an umlaut is two characters.
    """
    parts = Path(cell).expanduser()
    if cell.isascii() or os.path.exists(folder / parts):
        return folder / parts
    found = folder
    for part in parts.parts:
        apart = found / unicodedata.normalize("NFD", part)
        found = apart if os.path.exists(apart) and not os.path.exists(found / part) else found / part
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8", "save the table as 'CSV UTF-8'") from error


def _csv_rows(path: Path, text: str, quoted: bool) -> Iterator[Row]:
    lines = io.StringIO(text, newline="")
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=_delimiter(text), quoting=quoting, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for fields in reader:
            cells = [_clean(field) for field in fields]
            if header is None and any(cells):
                header = _check_header(path, cells)
            elif header is not None and any(cells):
                yield _csv_row(path, start, header, cells)
            start = reader.line_num + 1
    except csv.Error as error:
        hint = 'a field that holds quotes is written "like ""this"""'
        raise BadInput(f"{path}, line {start}: {error}", hint) from error


def _csv_row(path: Path, line: int, header: list[str], cells: list[str]) -> Row:
    if len(cells) != len(header):
        message = f"{path}, line {line}: {len(cells)} fields, but the first line names {len(header)} columns"
        raise BadInput(message, "put quotes around a text that holds the delimiter")
    return Row(dict(zip(header, cells)), path, line)


def _check_header(path: Path, names: list[str]) -> list[str]:
    doubled = sorted({name for name in names if name and names.count(name) > 1})
    if doubled:
        raise BadInput(f"{path}: column {doubled[0]!r} is there twice", "rename or remove one of them")
    return names


def _delimiter(text: str) -> str:
    """The delimiter that splits the first line into the most fields."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return max(",;\t", key=first.count)


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits; brackets without end
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "nothing that a table holds"
            raise BadInput(f"{path}, line {number}: not JSON ({reason})", "one JSON object a line") from error
        if not isinstance(record, dict):
            raise BadInput(f"{path}, line {number}: not a JSON object", "one JSON object a line")
        cells = {_clean(key): _clean("" if value is None else str(value)) for key, value in record.items()}
        yield Row(cells, path, number)


def _clean(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")  # JSON can write half a character, which no file can
    return unicodedata.normalize("NFC", text).strip()
