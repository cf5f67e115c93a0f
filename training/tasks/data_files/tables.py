"""Read tables made by people (CSV from any spreadsheet, or JSON lines), and write CSV tables.

Every error names file, line and column.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from profiles.errors import BadInput
from profiles.installation import program
from profiles.quantities import bytes_text
from training.records.run_files import explain_errors, write_atomically
from training.tasks.data_files.faults import Faults
from training.tasks.data_files.file_kinds import check_is_text
from training.tasks.data_files.label_studio import is_task, records_of
from training.tasks.data_files.plain_text import plain_text

csv.field_size_limit(2**24)  # a transcript of an hour is longer than the standard library's limit


_MISSING = frozenset({"nan", "NaN", "<NA>", "NaT", "#N/A", "None", "NULL", "\\N"})
"""Markers of an empty cell (pandas, numpy, spreadsheets, databases). In other spellings some are words, such as German
``null``."""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    cells: dict[str, str]
    """Text by column, NFC-normalised and stripped. Every column has a name."""
    table: Path
    line: int
    not_text: Mapping[str, str] = field(default_factory=dict)
    """Types of columns whose values are not text."""
    unit: str = "line"
    """Unit that ``line`` counts."""

    @property
    def location(self) -> str:
        return f"{self.table}, {self.unit} {self.line}"

    def text(self, column: str) -> str:
        """Return the text in ``column`` (:func:`plain_text`); empty if the cell is missing, empty or a missing marker.

        Raises:
            BadInput: the cell holds a value that is not text, or swallows lines of other recordings.
        """
        text = self.cells.get(column, "")
        if "\n" in text and _NAMES_SOUND.search(text.partition("\n")[2]):
            message = f"{self.location}: a quotation mark opens there, and closes lines later, after other recordings"
            raise BadInput(message, 'a field that holds quotes is written "like ""this"""')
        if column in self.not_text:
            message = f"{self.location}, column {column}: {text[:40]!r} is a {self.not_text[column]}, not a text"
            raise BadInput(message, f'a text stands in quotes: "{text[:40]}"')
        return "" if text in _MISSING else plain_text(text)

    def number(self, column: str) -> float | None:
        """Return the seconds in ``column``, written like ``62.5``, ``62,5`` or ``0:01:02.5``.

        ``None`` if the cell is missing, empty or a missing marker.

        Raises:
            BadInput: the cell holds anything else, or a negative number.
        """
        text = self.cells.get(column, "")
        if not text or text in _MISSING:
            return None
        value = _seconds(text)
        if not 0 <= value < float("inf"):
            message = f"{self.location}, column {column}: {text!r} is not a number of seconds"
            raise BadInput(message, "write it like 3.25")
        return value


@dataclass(frozen=True)
class Table:
    """A table that was read completely."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    spellings: Mapping[str, str] = field(default_factory=dict)
    """The file's own names of columns that :meth:`with_spelling` has renamed."""

    def spelling_of(self, column: str) -> str:
        return self.spellings.get(column, column)

    def column(self, names: Sequence[str], purpose: str, option: str = "") -> str:
        """Return the first of ``names`` that the table has, also by its spelling in the file.

        Args:
            option: the option that names the column, if there is one.

        Raises:
            BadInput: it has none; the message lists the columns, and the closest match.
        """
        by_spelling = {self.spelling_of(column): column for column in self.columns}
        for name in names:
            if name in self.columns or name in by_spelling:
                return name if name in self.columns else by_spelling[name]
        expected = " or ".join(repr(name) for name in names[:3])
        pairs = [(match, name) for name in names for match in difflib.get_close_matches(name, by_spelling, 1, 0.6)]
        hint = f"{f'name it with {option}, or ' if option else ''}call it {names[0]!r} in its first line{_NO_NAMES}"
        if purpose == "recordings" and not option:  # "prepare" reads more kinds of tables, and has an option
            hint += f", or type: {program('data', 'prepare', shlex.quote(str(self.path)), '--out NEW')}"
        if pairs:
            near, name = pairs[0]
            hint = f"did you mean {near!r}? " + (_setting(option, near) if option else f"Rename it to {name!r} there")
        raise BadInput(f"{self.path}: no column {expected} for the {purpose}; it has: {', '.join(by_spelling)}", hint)

    def with_spelling(self, names: Sequence[str]) -> Table:
        """Return the table with columns renamed to ``names`` where only the spelling differs.

        For example ``File name`` becomes ``file_name``, unless that exists too.
        """
        free = {_spelling(column): column for column in reversed(self.columns) if column not in names}
        renamed = {column: name for name in reversed(names) if (column := free.get(_spelling(name))) is not None}
        renamed = {column: name for column, name in renamed.items() if name not in self.columns}
        if not renamed:
            return self
        columns = tuple(renamed.get(column, column) for column in self.columns)
        rows = (replace(row, cells={renamed.get(name, name): cell for name, cell in row.cells.items()},
                        not_text={renamed.get(name, name): kind for name, kind in row.not_text.items()})
                for row in self.rows)  # fmt: skip
        return Table(self.path, columns, tuple(rows), {name: column for column, name in renamed.items()})


def _seconds(text: str) -> float:
    """Parse a number of seconds, ``minutes:seconds`` or ``hours:minutes:seconds``; -1 for anything else."""
    try:
        *larger, seconds = text.replace(",", ".").split(":")
        if any(not field.isascii() or not field.isdigit() for field in larger) or len(larger) > 2 or float(seconds) < 0:
            return -1.0
        return sum(int(field) * 60.0**power for power, field in enumerate(reversed(larger), start=1)) + float(seconds)
    except ValueError:
        return -1.0


def _spelling(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _setting(option: str, value: str) -> str:
    """Return a hint on how to set an option, quoted for the shell, or a setting of a profile."""
    return f"Give {option} {shlex.quote(value)}" if option.startswith("-") else f"Set {option} = {value}"


JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Extensions of files with one JSON object per line, or a single list of objects."""
_DELIMITERS = ",;\t|"
_SAYS_DELIMITER = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
"""First line of a table that declares its delimiter for a spreadsheet."""
_NO_NAMES = "; or, if that line is a recording's, write the names above it"
_NAMES_SOUND = re.compile(r"\.(wav|mp3|flac|ogg|opus|m4a|webm)\b", re.IGNORECASE)


def read_table(
    path: Path,
    quoted: bool = True,
    data: bytes | None = None,
    faults: Faults | None = None,
    as_written: bool = False,
    may_be_empty: bool = False,
) -> Table:
    """Read a file of delimited lines (comma, semicolon, tab or bar; UTF-8 or UTF-16), of JSON lines, or a JSON list.

    Args:
        quoted: whether fields may be quoted; if not, quotation marks are part of the text.
        data: content to use instead of the file's, such as part of it.
        faults: collects errors of lines that do not match the header; those lines are then skipped.
        as_written: keep white space and characters of delimited cells, which may be code, verbatim.
        may_be_empty: allow a table without rows, and so without columns.

    Raises:
        BadInput: missing, empty, not UTF-8, or with lines that do not match the header.
    """
    text, collected = read_text(path, "save the table as 'CSV UTF-8'", data), faults or Faults(path)
    is_json = path.suffix.lower() in JSON_LINES
    rows = tuple(_json_rows(path, text) if is_json else _csv_rows(path, text, quoted, collected, as_written))
    if faults is None or not rows:
        collected.raise_any()
    if not rows and not may_be_empty:
        raise BadInput(f"{path}: the table is empty", "it needs a line with the column names and a line for each clip")
    return Table(path, tuple(dict.fromkeys(name for row in rows for name in row.cells)), rows)


def check_size(path: Path, limit: int, hint: str) -> None:
    """Reject a file that is missing, or too large to read.

    Raises:
        BadInput: it is missing or too large; ``hint`` says what to do about the size.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    if size > limit:
        raise BadInput(f"{path}: larger than {bytes_text(limit)}", hint)


def read_text(path: Path, hint: str, data: bytes | None = None) -> str:
    """Return the text in a file, UTF-8 or UTF-16, with or without BOM.

    Args:
        hint: what to do if it is not UTF-8.
        data: content to use instead of the file's, such as part of it.

    Raises:
        BadInput: it cannot be read, is not UTF-8, or is of another kind (:func:`check_is_text`).
    """
    try:
        data = path.read_bytes() if data is None else data
        check_is_text(path, data)
        return data.decode(_encoding(data))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}, line {line}: not UTF-8", hint) from error


def _encoding(data: bytes) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if len(data) % 2 or b"\0" not in data[:2]:
        return "utf-8-sig"
    return "utf-16-le" if data[1:2] == b"\0" else "utf-16-be"  # the text begins with an ASCII character


def json_lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of JSON lines, each with its line number.

    Raises:
        BadInput: a line is not a JSON object.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also huge numbers, and excessive nesting
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
    """Write a table atomically, with the column names as first row; its folder is created. ``option`` chose the path.

    Raises:
        BadInput: it cannot be written.
    """
    with explain_errors(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, csv_lines(rows, end), mode)


def _csv_rows(path: Path, text: str, quoted: bool, faults: Faults, as_written: bool) -> list[Row]:
    lines = text.splitlines(keepends=True)
    first_line = next((number for number, line in enumerate(lines) if line.strip()), 0)
    says = _SAYS_DELIMITER.fullmatch(lines[first_line].strip()) if lines else None
    skipped = first_line + 1 if says else 0
    text = "".join(lines[skipped:]) if says else text
    # undeclared: the delimiter that splits the first line into the most fields
    delimiter = (
        says[1]
        if says
        else max(_DELIMITERS, key=lambda candidate: _fields("".join(lines[first_line : first_line + 1]), candidate))
    )
    try:
        return _split_rows(path, text, delimiter, skipped, quoted, faults, as_written)
    except BadInput as error:
        if delimiter != "\t" or not quoted or not isinstance(error.__cause__, csv.Error):
            raise
    faults.clear()  # tab-separated files often use no quotes
    return _split_rows(path, text, delimiter, skipped, False, faults, as_written)


def _fields(line: str, delimiter: str) -> int:
    try:
        return max(map(len, csv.reader([line], delimiter=delimiter, strict=True)), default=0)
    except csv.Error:  # unbalanced quotes with this delimiter
        return 0


def _split_rows(
    path: Path, text: str, delimiter: str, skipped: int, quoted: bool, faults: Faults, as_written: bool
) -> list[Row]:
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    rows, start = list[Row](), 1 + skipped
    try:
        for fields in reader:
            cells = [_clean(field) for field in fields]
            if header is None and any(cells):
                header = _header(path, cells)
            elif header is not None and any(cells):
                with faults:
                    rows.append(_row(path, start, header, fields if as_written else cells))
            start = reader.line_num + 1 + skipped
    except csv.Error as error:
        hint = 'a field that holds quotes is written "like ""this"""'
        raise BadInput(f"{path}, line {start}: {error}", hint) from error
    return rows


def _header(path: Path, cells: list[str]) -> list[str]:
    while not cells[-1]:
        cells.pop()
    if any(map(_NAMES_SOUND.search, cells)):
        message = f"{path}: its first line names no columns: {', '.join(cells)[:80]!r} is of a recording"
        raise BadInput(message, "write the names above it, such as audio_path and text")
    if doubled := sorted({name for name in cells if name and cells.count(name) > 1}):
        raise BadInput(f"{path}: column {doubled[0]!r} is there twice", f"rename or remove one of them{_NO_NAMES}")
    return cells


def _row(path: Path, line: int, header: list[str], cells: list[str]) -> Row:
    while len(cells) > len(header) and not cells[-1]:  # spreadsheets end lines with empty fields
        cells.pop()
    if len(cells) != len(header):
        count = f"{len(cells)} fields, but the first line names {len(header)} columns"
        raise BadInput(f"{path}, line {line}: {count}", "put quotes around a text that holds the delimiter")
    return Row({name: cell for name, cell in zip(header, cells) if name}, path, line)


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    is_list = path.suffix.lower() == ".json" and text.lstrip()[:1] == "["
    for number, record in _json_list(path, text) if is_list else json_lines(path, text):
        for part in records_of(record) if is_task(record) else [record]:
            yield row_of(part, path, number, "entry" if is_list else "line")


def _json_list(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON list, each with its number."""
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nothing that a table holds"
        raise BadInput(f"{path}{line}: not JSON ({reason})", "one JSON object a line, or one list of them") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise BadInput(f"{path}, entry {number}: not a JSON object", "one JSON object a line, or one list of them")
        yield number, record


def row_of(record: Mapping[str, object], table: Path, line: int, unit: str = "row") -> Row:
    """Return a row of typed values, as from JSON or Parquet.

    Missing and composite values (bytes, lists) become empty; a recording is represented by its path.
    """
    cells = {_clean(str(name)): _path_in(value) for name, value in record.items() if str(name).strip()}
    kinds = {name: _kind(value) for name, value in cells.items()}
    texts = {name: _clean(str(value)) if kinds[name] != "missing" else "" for name, value in cells.items()}
    not_text = {name: kind for name, kind in kinds.items() if kind not in ("text", "missing")}
    return Row(texts, table, line, not_text, unit)


def _path_in(value: object) -> object:
    """Return the path in a recording as written by the datasets library (``{"path": ..., "bytes": ...}``)."""
    return value.get("path") if isinstance(value, dict) else value


def _kind(value: object) -> str:
    """Return the type of a value in words; dates and decimals of a database count as ``text``."""
    if value is None or isinstance(value, bytes | dict | list) or (isinstance(value, float) and math.isnan(value)):
        return "missing"
    return "truth value" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "text"


def _clean(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()  # JSON can contain lone surrogates, which cannot be encoded
    return unicodedata.normalize("NFC", text).strip().strip("\ufeff")  # BOM in the middle of concatenated files
