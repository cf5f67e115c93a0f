"""A manifest of NeMo, as Granary is published: one JSON object a line with ``audio_filepath``, ``text``, ``duration``.

``offset`` cuts a clip out of a longer file. Lines whose ``target_lang`` is not their ``source_lang`` hold translations,
which are no transcripts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from training.recordings.readers.cells import names_in, recording_of, split_named
from training.recordings.recording import Columns, Fault, Reason, Recording, Request
from training.tasks.tables import JSON_LINES, Row, read_table

_PEEK = 2**16  # characters of the first line that are looked at


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of the manifest.

    Raises:
        BadInput: it cannot be read, or a line is no JSON object.
    """
    path = Path(request.source).expanduser()
    table = read_table(path)
    columns = Columns(request.columns.audio or "audio_filepath", request.columns.text, request.columns.speaker)
    asked = Request(request.source, columns, request.roots)
    names = names_in(table, asked)
    split = _split_in(path.stem)
    for row in table.rows:
        found = recording_of(row, names, path.parent, asked, split, always_cut=True)
        yield _transcript_only(found, row)


def is_one(path: Path) -> bool:
    """Whether a file looks like a manifest."""
    if path.suffix.lower() not in JSON_LINES:
        return False
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = json.loads(file.readline(_PEEK))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "audio_filepath" in first


def _split_in(stem: str) -> str:
    """The split that a name like ``train_manifest`` tells."""
    return next((split for part in stem.replace("-", "_").split("_") if (split := split_named(part))), "")


def _transcript_only(found: Recording, row: Row) -> Recording:
    spoken, written = row.cells.get("source_lang", ""), row.cells.get("target_lang", "")
    if found.fault is None and spoken and written and spoken != written:
        return dataclasses.replace(found, fault=Fault(Reason.TRANSLATION, f"from {spoken} into {written}"))
    return found
