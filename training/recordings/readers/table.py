"""Tables: CSV, TSV, JSON lines or Parquet with files or addresses, one or several; also what BigQuery exports.

A folder may hold one table for each split (``train.csv``, ...) or the numbered parts of an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiles.errors import BadInput
from training.recordings.readers.cells import names_in, recording_of, split_named
from training.recordings.readers.parquet import read_parquet
from training.recordings.recording import Recording, Request
from training.tasks.tables import JSON_LINES, Table, read_table

_FORMS = ((".parquet",), (".csv", ".tsv"), JSON_LINES)
ENDINGS = tuple(ending for form in _FORMS for ending in form)
_LARGEST = 4 * 2**30  # bytes: a table is read whole


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of one table, or of all in a folder.

    Raises:
        BadInput: no table, or one that cannot be read.
    """
    path = Path(request.source).expanduser()
    for file in tables_of(path):
        table = read_any(file)
        names = names_in(table, request)
        split = split_named(file.stem) if path.is_dir() else ""
        for row in table.rows:
            yield recording_of(row, names, file.parent, request, split)


def tables_of(path: Path) -> list[Path]:
    """Return the tables that a path stands for: itself, those of its splits, or all of one form, by name."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file())
    forms = [[file for file in files if file.suffix.lower() in endings] for endings in _FORMS]
    divided = [[file for file in found if split_named(file.stem)] for found in forms]
    return next((found for found in (*divided, *forms) if found), [])


def read_any(path: Path) -> Table:
    """Read a table of any kind.

    Raises:
        BadInput: it cannot be read, or is too large to be read whole.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check the path") from error
    if size > _LARGEST:
        raise BadInput(f"{path}: {size / 1e9:.1f} GB are too large for one table", "divide it into several in a folder")
    return read_parquet(path) if path.suffix.lower() == ".parquet" else read_table(path)
