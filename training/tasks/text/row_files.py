"""Read rows of texts and conversations from files verbatim, without stripping or normalising cells.

CSV (comma, semicolon or tab), JSON lines, a JSON array of objects, Parquet, and Arrow as ``datasets`` saves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from profiles.locations import is_pointer, pointer_error
from training.tasks.data_files.splits import SPLITS, by_split, without_hidden
from training.tasks.data_files.tables import json_lines, read_table, read_text

Cells = Mapping[str, Any]
"""A row's values by column."""

_DELIMITED = (".csv", ".tsv")
_JSON = (".jsonl", ".json", ".ndjson")
_COLUMNAR = (".parquet", ".arrow")
_ENDINGS = (*_DELIMITED, *_JSON, *_COLUMNAR)
_DESCRIPTIONS = ("dataset_info.json", "state.json")
"""Metadata files of ``datasets`` and LLaMA-Factory."""
_PART = re.compile(r"(?P<table>.+)-\d+-of-(?P<count>\d+)")
"""Name of a table's part, as on the Hugging Face hub: ``train-00000-of-00002``."""


def is_table(file: Path) -> bool:
    """Whether a file holds rows."""
    return file.suffix.lower() in _ENDINGS


def row_files(path: str) -> dict[str, list[Path]]:
    """Return the parts of a data set's table by split; empty if it is plain text or does not exist locally.

    The only table of a folder is its training split, whatever its name. The tables of a hub's repository are in its
    folder ``data``.

    Raises:
        BadInput: the choice among several tables is ambiguous, or a part of one is missing.
    """
    source = Path(path).expanduser()
    if source.is_file():
        return {"train": [source]} if is_table(source) else {}
    has_text = any(without_hidden(source.glob("*.txt")))
    tables = _tables_in(source) or ([] if has_text else _tables_in(source / "data"))
    named = by_split(lambda name: _parts(source, [file for file in tables if _table_name(file) == name]))
    if "train" in named or has_text:
        return named if "train" in named else {}
    taken = {name for names in SPLITS.values() for name in names}
    lone = _parts(source, [file for file in tables if _table_name(file) not in taken])
    return {**named, "train": lone} if lone else {}


def _tables_in(folder: Path) -> list[Path]:
    files = without_hidden(folder.glob("*"))
    return sorted(file for file in files if is_table(file) and file.is_file() and file.name not in _DESCRIPTIONS)


def _table_name(file: Path) -> str:
    """Return the name of the table that a file is, or is a part of."""
    part = _PART.fullmatch(file.stem)
    return part["table"] if part else file.stem


def _parts(folder: Path, files: list[Path]) -> list[Path]:
    """Return ``files`` if they are one table."""
    names = ", ".join(file.name for file in files[:8])
    matches = [_PART.fullmatch(file.stem) for file in files]
    tables = {(file.suffix, match and (match["table"], match["count"])) for file, match in zip(files, matches)}
    if len(tables) > 1 or (len(files) > 1 and None in matches):
        raise BadInput(f"data set {folder}: which table is meant? It has: {names}", "name one file, or call it train")
    count = int(matches[0]["count"]) if files and matches[0] else len(files)
    if len(files) != count:
        raise BadInput(f"data set {folder}: of the {count} parts of a table only {names}", "add the others")
    return files


def rows_of(path: Path) -> Iterator[tuple[Cells, str]]:
    """Yield the rows of a table, each with its location.

    Raises:
        BadInput: the file cannot be read, is empty, or does not hold rows.
    """
    ending, empty = path.suffix.lower(), True
    if ending in _DELIMITED:
        rows: Iterator[tuple[Cells, str]] = (
            (row.cells, row.location) for row in read_table(path, as_written=True).rows
        )
    else:
        rows = _columnar_rows(path) if ending in _COLUMNAR else _json_rows(path)
    for row in rows:
        empty = False
        yield row
    if empty:
        raise BadInput(f"{path}: the file is empty", "it needs a row for each text or conversation")


def _json_rows(path: Path) -> Iterator[tuple[Cells, str]]:
    text = read_text(path, "save the file as UTF-8")
    document = _whole_document(path, text)
    if document is None:
        yield from ((record, f"{path}, line {number}") for number, record in json_lines(path, text))
        return
    for number, record in enumerate(document, start=1):
        if not isinstance(record, dict):
            hint = 'a row is an object, like {"prompt": "...", "response": "..."}'
            raise BadInput(f"{path}, row {number}: not a JSON object", hint)
        yield record, f"{path}, row {number}"


def _whole_document(path: Path, text: str) -> list[Any] | None:
    """Return the rows of a file that is a single JSON document; ``None`` for JSON lines."""
    if not text.lstrip().startswith(("[", "{\n", "{\r\n")):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        number = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", "nothing that a table holds")
        raise BadInput(f"{path}, line {number}: not JSON ({reason})", "an array of objects, or one a line") from error
    return document if isinstance(document, list) else [document]


def _columnar_rows(path: Path) -> Iterator[tuple[Cells, str]]:
    import pyarrow  # 0.9 s with parquet
    import pyarrow.parquet

    if is_pointer(path):
        raise pointer_error(path)
    try:
        table = pyarrow.parquet.read_table(path) if path.suffix.lower() == ".parquet" else _arrow_table(path)
        rows = table.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path}: cannot be read: {reason}", "save it again, or as JSON lines") from error
    yield from ((row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))


def _arrow_table(path: Path) -> Any:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as source:
        try:
            return pyarrow.ipc.open_file(source).read_all()
        except pyarrow.ArrowInvalid:  # a stream, as written by the datasets package
            source.seek(0)
            return pyarrow.ipc.open_stream(source).read_all()
