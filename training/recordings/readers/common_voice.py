"""A Common Voice release: ``train.tsv``, ``dev.tsv`` and ``test.tsv`` (else ``validated.tsv``) beside ``clips/``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.recordings.readers.cells import names_in, recording_of, split_named
from training.recordings.recording import Columns, Recording, Request
from training.tasks.tables import read_table

_SPLITS = ("train", "dev", "test")
_PEEK = 2**16  # characters of the first line that are looked at


def read(request: Request) -> Iterator[Recording]:
    """Give the validated recordings; fields are never quoted there.

    Raises:
        BadInput: a table cannot be read.
    """
    folder = Path(request.source).expanduser()
    columns = Columns("path", request.columns.text or "sentence", request.columns.speaker or "client_id")
    asked = Request(request.source, columns, request.roots)
    for file in _tables(folder):
        table = read_table(file, quoted=False)
        names = names_in(table, asked)
        for row in table.rows:
            yield recording_of(row, names, folder / "clips", asked, split_named(file.stem))


def is_one(folder: Path) -> bool:
    """Whether a folder is a release."""
    return (folder / "clips").is_dir() and any(_has_columns(path) for path in _tables(folder))


def _has_columns(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return {"client_id", "path", "sentence"} <= set(file.readline(_PEEK).split("\t"))
    except (OSError, UnicodeDecodeError):
        return False


def _tables(folder: Path) -> list[Path]:
    found = [path for name in _SPLITS if (path := folder / f"{name}.tsv").is_file()]
    return found or [path for path in [folder / "validated.tsv"] if path.is_file()]
