"""Parquet files as tables of text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profiles.errors import BadInput
from training.tasks.tables import Row, Table

_BATCH = 1024  # rows


def read_parquet(path: Path) -> Table:
    """Read a Parquet file; a cell with bytes, which no path is, stays empty.

    Raises:
        BadInput: missing, damaged, or without a row.
    """
    import pyarrow  # 0.9 s with parquet: only who has such a file pays it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            rows = tuple(_rows(file, path))
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path}: not a readable Parquet file: {reason}", "export it again") from error
    if not rows:
        raise BadInput(f"{path}: the table is empty", "it needs a row for each recording")
    return Table(path, columns, rows)


def _rows(file: Any, path: Path) -> Iterator[Row]:
    number = 0
    for batch in file.iter_batches(batch_size=_BATCH):
        for record in batch.to_pylist():
            number += 1
            yield Row({name: _text(value) for name, value in record.items()}, path, number)


def _text(value: object) -> str:
    if value is None or isinstance(value, bytes | dict | list):
        return ""
    return unicodedata.normalize("NFC", str(value)).strip()
