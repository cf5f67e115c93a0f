"""Tables a person made: CSV from any spreadsheet, or JSON lines; and tables written for one.

Every error names file, line and column.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from profiles.errors import BadInput
from training.run_files import explained, write_whole

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
            option: the option that names the column, if there is one.

        Raises:
            BadInput: it has none; the message lists what is there, and the nearest.
        """
        for name in names:
            if name in self.columns:
                return name
        wanted = " or ".join(repr(name) for name in names)
        pairs = [(match, name) for name in names for match in difflib.get_close_matches(name, self.columns, 1, 0.6)]
        hint = (f"name it with {option}, or " if option else "") + f"add {wanted} to its first line"
        if pairs:
            near, name = pairs[0]
            hint = f"did you mean {near!r}? " + (f"Set {option} = {near}" if option else f"Rename it to {name!r} there")
        there = ", ".join(self.columns)
        raise BadInput(f"{self.path}: no column {wanted} for the {purpose}; it has: {there}", hint)


JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of files with one JSON object a line."""


def read_table(path: Path, quoted: bool = True, data: bytes | None = None, as_written: bool = False) -> Table:
    """Read a file of delimited lines (comma, semicolon or tab; UTF-8, or UTF-16 with BOM) or of JSON lines.

    Args:
        quoted: whether fields may stand in quotes; where not, a quotation mark is one of the text.
        data: what to take for its content, where that is not all of it.
        as_written: keep the white space and the characters of delimited cells, which may be code.

    Raises:
        BadInput: missing, empty, not UTF-8, or a line that cannot be split into the columns of the first.
    """
    text = read_text(path, "save the table as 'CSV UTF-8'", data)
    of_json = path.suffix.lower() in JSON_LINES
    rows = tuple(_json_rows(path, text) if of_json else _csv_rows(path, text, quoted, as_written))
    if not rows:
        raise BadInput(f"{path}: the table is empty", "it needs a line with the column names and a line for each clip")
    return Table(path, tuple(dict.fromkeys(name for row in rows for name in row.cells)), rows)


def check_size(path: Path, most: int, hint: str) -> None:
    """Refuse a file that is not there, or too large to be read whole.

    Raises:
        BadInput: it is so; of its size ``hint`` says what to do.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    if size > most:
        raise BadInput(f"{path}: larger than {most >> 20} MiB", hint)


def as_stored(folder: Path, cell: str) -> Path:
    """Return the file that a cell names, below ``folder`` if it is relative, as the disk spells it.

    Cells are composed (NFC). Files that come from a Mac may have decomposed names, where an umlaut is two characters.
    """
    if "\\" in cell and not os.path.exists(folder / cell):  # written on Windows
        cell = cell.replace("\\", "/")
    parts = Path(cell).expanduser()
    if cell.isascii() or os.path.exists(folder / parts):
        return folder / parts
    found = folder
    for part in parts.parts:
        apart = found / unicodedata.normalize("NFD", part)
        found = apart if os.path.exists(apart) and not os.path.exists(found / part) else found / part
    return found


def read_text(path: Path, hint: str, data: bytes | None = None) -> str:
    """Return the text in a file, UTF-8 with or without BOM or UTF-16 with it.

    Args:
        hint: what to do where it is none.
        data: what to take for its content, where that is not all of it.

    Raises:
        BadInput: it cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes() if data is None else data
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8", hint) from error


def json_lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of JSON lines, each with its line.

    Raises:
        BadInput: a line holds something else.
    """
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
        yield number, record


def csv_lines(rows: Iterable[Iterable[object]], end: str = "\n") -> bytes:
    """Return rows as lines of CSV in UTF-8."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


def write_table(
    path: Path, rows: Iterable[Iterable[object]], mode: int = 0o644, end: str = "\n", option: str = "--output"
) -> None:
    """Write a table whose first row names its columns, whole or not at all; its folder is made. ``option`` chose it.

    Raises:
        BadInput: it cannot be written.
    """
    with explained(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, csv_lines(rows, end), mode)


def _csv_rows(path: Path, text: str, quoted: bool, as_written: bool = False) -> Iterator[Row]:
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=first.count)  # what splits the first line into the most fields
    lines = io.StringIO(text, newline="")
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for fields in reader:
            cells = [_clean(field) for field in fields]
            if header is None and any(cells):
                header = cells
                if doubled := sorted({name for name in cells if name and cells.count(name) > 1}):
                    raise BadInput(f"{path}: column {doubled[0]!r} is there twice", "rename or remove one of them")
            elif header is not None and any(cells):
                if len(cells) != len(header):
                    count = f"{len(cells)} fields, but the first line names {len(header)} columns"
                    hint = "put quotes around a text that holds the delimiter"
                    raise BadInput(f"{path}, line {start}: {count}", hint)
                yield Row(dict(zip(header, fields if as_written else cells)), path, start)
            start = reader.line_num + 1
    except csv.Error as error:
        hint = 'a field that holds quotes is written "like ""this"""'
        raise BadInput(f"{path}, line {start}: {error}", hint) from error


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    for number, record in json_lines(path, text):
        cells = {_clean(key): _clean("" if value is None else str(value)) for key, value in record.items()}
        yield Row(cells, path, number)


def _clean(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")  # JSON can write half a character, which no file can
    return unicodedata.normalize("NFC", text).strip()
