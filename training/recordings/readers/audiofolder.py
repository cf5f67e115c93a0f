"""Hugging Face's audiofolder: ``metadata.csv``, ``.jsonl`` or ``.parquet`` beside the audio, also one in each split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from training.recordings.readers.cells import names_in, recording_of, split_named
from training.recordings.readers.table import read_any
from training.recordings.recording import Recording, Request

_ENDINGS = ("csv", "jsonl", "parquet")


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of the folder.

    Raises:
        BadInput: a table cannot be read, or lacks a column.
    """
    folder = Path(request.source).expanduser()
    for file in metadata_of(folder):
        table = read_any(file)
        names = names_in(table, request)
        split = split_named(file.parent.name) if file.parent != folder else ""
        for row in table.rows:
            found = recording_of(row, names, file.parent, request, split)
            first = Path(row.cells.get(names.audio, "")).parts[:1]
            yield found if found.split else dataclasses.replace(found, split=split_named("".join(first)))


def metadata_of(folder: Path) -> list[Path]:
    """Return the folder's table, or those of its splits; empty if this is no audiofolder."""
    own = _table_in(folder)
    if own is not None:
        return [own]
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and split_named(path.name))
    return [table for path in inner if (table := _table_in(path)) is not None]


def _table_in(folder: Path) -> Path | None:
    return next((path for end in _ENDINGS if (path := folder / f"metadata.{end}").is_file()), None)
