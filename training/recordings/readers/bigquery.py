"""A table of BigQuery by its name, ``bigquery:project.dataset.table``, with addresses of recordings in a column."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from profiles.errors import BadInput
from training.recordings.readers.cells import names_in, recording_of
from training.recordings.recording import Fault, Reason, Recording, Request
from training.tasks.speech_clips import FileSource
from training.tasks.tables import Row, Table

PREFIX = "bigquery:"
_NAME = re.compile(r"[\w-]+(?:[.:][\w-]+)?\.[\w-]+\.[\w$-]+")


class TableClient(Protocol):
    """What is used of ``google.cloud.bigquery.Client``."""

    def list_rows(self, table: str) -> Iterable[Mapping[str, object]]: ...


def connect() -> TableClient:
    """Return the client of Google's package, with the credentials that it finds by itself.

    Raises:
        BadInput: the package is missing, or there are no credentials.
    """
    try:
        from google.auth.exceptions import GoogleAuthError  # an extra of this package
        from google.cloud import bigquery
    except ImportError as error:
        hint = "pip install google-cloud-bigquery, or export the table and name the file"
        raise BadInput("BigQuery needs the package google-cloud-bigquery", hint) from error
    try:
        client: TableClient = bigquery.Client()
    except (GoogleAuthError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"BigQuery: {reason}", "log in with 'gcloud auth application-default login'") from error
    return client


def read(request: Request, open_client: Callable[[], TableClient] = connect) -> Iterator[Recording]:
    """Give the recordings of a table; what it names on this machine's disk is not followed.

    Raises:
        BadInput: no such table, no access to it, or no column with recordings.
    """
    name = request.source.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise BadInput(f"{request.source}: not the name of a table", f"write it like {PREFIX}project.dataset.table")
    table = _fetch(name, open_client())
    names = names_in(table, request)
    for row in table.rows:
        yield _not_here(recording_of(row, names, Path(), request))


def _fetch(name: str, client: TableClient) -> Table:
    try:
        rows = tuple(
            Row({key: _text(value) for key, value in cells.items()}, Path(name), number)
            for number, cells in enumerate(client.list_rows(name), start=1)
        )
    except Exception as error:  # the client's own classes are known only where it is installed
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(f"{PREFIX}{name}: {reason}", "check the name and your access to it") from error
    if not rows:
        raise BadInput(f"{PREFIX}{name}: the table is empty", "it needs a row for each recording")
    return Table(Path(name), tuple(rows[0].cells), rows)


def _not_here(found: Recording) -> Recording:
    if isinstance(found.audio, FileSource):
        fault = Fault(Reason.OUTSIDE, "a table of BigQuery names no files of this machine")
        return Recording(found.id, found.audio, found.text, found.where, found.speaker, fault=fault)
    return found


def _text(value: object) -> str:
    return "" if value is None or isinstance(value, bytes) else unicodedata.normalize("NFC", str(value)).strip()
