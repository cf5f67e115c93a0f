"""Read rows of texts and conversations from files verbatim, without stripping or normalising cells.

CSV (comma, semicolon or tab), JSON lines, a JSON array of objects, Parquet, and Arrow as ``datasets`` saves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
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


def is_table(file: Path) -> bool:
    """Whether a file holds rows."""
    return file.suffix.lower() in _ENDINGS


def row_files(path: str) -> dict[str, Path]:
    """Return the tables of a data set by split; empty if it is plain text or does not exist locally.

    The only table of a folder is its training split, whatever its name.

    Raises:
        BadInput: the choice among several tables is ambiguous.
    """
    source = Path(path).expanduser()
    if source.is_file():
        return {"train": source} if is_table(source) else {}
    tables = sorted(file for file in without_hidden(source.glob("*")) if is_table(file) and file.is_file())
    tables = [file for file in tables if file.name not in _DESCRIPTIONS]
    named = by_split(lambda name: _only_file(source, [file for file in tables if file.stem == name]))
    if "train" in named or any(without_hidden(source.glob("*.txt"))):
        return named if "train" in named else {}
    taken = {name for names in SPLITS.values() for name in names}
    lone = _only_file(source, [file for file in tables if file.stem not in taken])
    return {**named, "train": lone} if lone is not None else {}


def _only_file(folder: Path, files: list[Path]) -> Path | None:
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise BadInput(f"data set {folder}: which table is meant? It has: {names}", "name one file, or call it train")
    return files[0] if files else None


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
