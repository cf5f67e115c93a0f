"""The readers of all kinds of sources by name, the recognition of a source's kind, and the readers of tables.

Tables are files (also exports of BigQuery), Hugging Face's audiofolder, tables of BigQuery by name, and data sets of
the Hugging Face hub. The formats of published corpora are in :mod:`speech.recordings.corpora`, those of folders in
:mod:`speech.recordings.layouts`. All readers yield :class:`speech.recordings.recording.Recording`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from profiles.errors import BadInput
from profiles.installation import package_line
from profiles.locations import looks_like_path
from speech.data.speech_clips import FileSource
from speech.recordings import corpora, layouts
from speech.recordings.recording import (
    Exclusion,
    ExclusionReason,
    ReadRequest,
    Recording,
    TableColumns,
    find_columns,
    one_line,
    recording_of,
    with_usual_spelling,
)
from training.tasks.data_files.splits import is_saved, split_named, without_hidden
from training.tasks.data_files.tables import JSON_LINES, Table, check_size, read_table, row_of

_FORMS = ((".parquet",), (".csv", ".tsv"), JSON_LINES)
ENDINGS = tuple(ending for form in _FORMS for ending in form)
_LARGEST = 4 * 2**30  # bytes: a table is read at once
_BATCH = 1024  # rows of a Parquet file
BIGQUERY = "bigquery:"
"""Prefix of a table of BigQuery, ``bigquery:project.dataset.table``."""
_BIGQUERY_NAME = re.compile(r"[\w-]+(?:[.:][\w-]+)?\.[\w-]+\.[\w$-]+")


def read_tables(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of one table, or of all in a folder: one for each split, or the numbered parts of an export.

    Raises:
        BadInput: there is no table, or one cannot be read.
    """
    path = Path(request.source).expanduser()
    for file in tables_of(path):
        split = split_named(file.stem) if path.is_dir() else ""
        table = _read(file, may_be_empty=bool(split))
        names = find_columns(table, request) if table.rows else TableColumns()
        for row in table.rows:
            yield recording_of(row, names, file.parent, request, split)


def tables_of(path: Path) -> list[Path]:
    """Return the tables at a path: the file itself, or a folder's tables of splits, or all of one format, by name."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in without_hidden(path.iterdir()) if file.is_file())
    forms = [[file for file in files if file.suffix.lower() in endings] for endings in _FORMS]
    divided = [[file for file in tables if split_named(file.stem)] for tables in forms]
    return next((tables for tables in (*divided, *forms) if tables), [])


def read_audiofolder(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of a folder with ``metadata.csv``, ``.jsonl`` or ``.parquet`` next to the audio, or with one
    in the folder of each split.

    Raises:
        BadInput: a table cannot be read, or lacks a column.
    """
    folder = Path(request.source).expanduser()
    for file in metadata_of(folder):
        table = _read(file)
        names = find_columns(table, request)
        split = split_named(file.parent.name) if file.parent != folder else ""
        for row in table.rows:
            recording = recording_of(row, names, file.parent, request, split)
            top_folder = Path(row.cells.get(names.audio, "")).parts[:1]
            yield (
                recording if recording.split else dataclasses.replace(recording, split=split_named("".join(top_folder)))
            )


def metadata_of(folder: Path) -> list[Path]:
    """Return the folder's table, or those of its splits; empty if this is not an audiofolder."""
    table_here = _metadata_in(folder)
    if table_here is not None:
        return [table_here]
    inner = sorted(path for path in folder.iterdir() if path.is_dir() and split_named(path.name))
    return [table for path in inner if (table := _metadata_in(path)) is not None]


def _metadata_in(folder: Path) -> Path | None:
    return next((path for end in ("csv", "jsonl", "parquet") if (path := folder / f"metadata.{end}").is_file()), None)


def _read(path: Path, may_be_empty: bool = False) -> Table:
    """Read a table of any format.

    Args:
        may_be_empty: accept a table without rows, such as that of one split of several.

    Raises:
        BadInput: it cannot be read, or is too large.
    """
    check_size(path, _LARGEST, "divide it into several tables in a folder")
    return with_usual_spelling(
        _read_parquet(path) if path.suffix.lower() == ".parquet" else read_table(path, may_be_empty=may_be_empty)
    )


def _read_parquet(path: Path) -> Table:
    """Read a Parquet file; a cell with bytes becomes empty, since it is not a path."""
    import pyarrow  # takes 0.9 s with parquet, so only for such files
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = tuple(file.schema_arrow.names)
            records = (record for batch in file.iter_batches(batch_size=_BATCH) for record in batch.to_pylist())
            rows = tuple(row_of(record, path, number) for number, record in enumerate(records, start=1))
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path}: not a readable Parquet file: {reason}", "export it again") from error
    if not rows:
        raise BadInput(f"{path}: the table is empty", "it needs a row for each recording")
    return Table(path, columns, rows)


def holds_sound(path: Path) -> bool:
    """Whether a Parquet file (or the first in a folder downloaded from the hub) holds the sound itself, or a folder was
    saved by ``datasets``."""
    if is_saved(path):
        return True
    inner = (sorted(without_hidden(path.glob(f"{form}.parquet"))) for form in ("*", "data/*", "*/*"))
    file = next((files[0] for files in inner if files), None) if path.is_dir() else path
    if file is None or file.suffix.lower() != ".parquet":
        return False
    import pyarrow
    import pyarrow.parquet

    try:
        fields = pyarrow.parquet.read_schema(file)
    except (OSError, pyarrow.ArrowException):
        return False
    return any(pyarrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0 for field in fields)


class TableClient(Protocol):
    """The part of ``google.cloud.bigquery.Client`` that is used."""

    def list_rows(self, table: str) -> Iterable[Mapping[str, object]]: ...


def connect() -> TableClient:
    """Return a client of Google's package with its default credentials.

    Raises:
        BadInput: the package is missing, or there are no credentials.
    """
    try:
        from google.auth.exceptions import GoogleAuthError  # an extra of this package
        from google.cloud import bigquery
    except ImportError as error:
        hint = f"{package_line('google-cloud-bigquery')}; or export the table and name the file"
        raise BadInput("BigQuery needs the package google-cloud-bigquery", hint) from error
    try:
        client: TableClient = bigquery.Client()
    except (GoogleAuthError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"BigQuery: {reason}", "log in with 'gcloud auth application-default login'") from error
    return client


def read_bigquery(request: ReadRequest, open_client: Callable[[], TableClient] = connect) -> Iterator[Recording]:
    """Yield the recordings of a table of BigQuery by its name; files that it names on this machine are not read.

    Raises:
        BadInput: there is no such table, no access to it, or no column with recordings.
    """
    name = request.source.removeprefix(BIGQUERY)
    if not _BIGQUERY_NAME.fullmatch(name):
        raise BadInput(f"{request.source}: not the name of a table", f"write it like {BIGQUERY}project.dataset.table")
    client = open_client()
    try:
        records = enumerate(client.list_rows(name), start=1)
        rows = tuple(row_of(record, Path(name), number) for number, record in records)
    except Exception as error:  # the client's own classes are known only where it is installed
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(f"{BIGQUERY}{name}: {reason}", "check the name and your access to it") from error
    if not rows:
        raise BadInput(f"{BIGQUERY}{name}: the table is empty", "it needs a row for each recording")
    table = with_usual_spelling(Table(Path(name), tuple(rows[0].cells), rows))
    names = find_columns(table, request)
    outside = Exclusion(ExclusionReason.OUTSIDE, "a table of BigQuery names no files of this machine")
    for row in table.rows:
        recording = recording_of(row, names, Path(), request)
        yield (
            dataclasses.replace(recording, exclusion=outside) if isinstance(recording.audio, FileSource) else recording
        )


def read_hub(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of a data set of the hub, or of its cache on this machine, by ``name`` or
    ``name:configuration``: those of its training, validation and test splits, or of all splits if it has none of these.

    Raises:
        BadInput: it does not exist, or has no audio or no text column.
    """
    from training.tasks.data_files.hub import load_hub_dataset  # the datasets package takes 2 s to import

    loaded = load_hub_dataset(request.source)
    splits = {key: split_named(re.split(r"[.\-_]", key)[0]) for key in loaded}  # train.clean.100, test.other
    for key in [key for key in loaded if splits[key]] or list(loaded):
        yield from _recordings_of_split(loaded[key], key, splits[key], request)


def _recordings_of_split(dataset: Any, key: str, split: str, request: ReadRequest) -> Iterator[Recording]:
    from speech.data.hub_speech import HubSource, undecoded_audio

    location = f"{request.source}, {key}"
    columns = dataset.column_names
    audio, column = undecoded_audio(dataset, location)
    split_request = dataclasses.replace(request, columns=dataclasses.replace(request.columns, audio=column))
    names = find_columns(Table(Path(f"data set {location}"), tuple(columns), ()), split_request)
    needed = dict.fromkeys(("id", names.text, names.speaker, names.language))
    texts = dataset.select_columns([name for name in needed if name in columns])
    for number, row in enumerate(texts):
        record = row_of(row, Path(location), number)
        yield Recording(
            record.cells.get("id") or f"{key}-{number}",
            HubSource(audio, column, number),
            one_line(record.text(names.text)),
            record.location,
            record.cells.get(names.speaker, ""),
            record.cells.get(names.language, ""),
            split,
        )


READERS: dict[str, Callable[[ReadRequest], Iterator[Recording]]] = {
    "table": read_tables,
    "audiofolder": read_audiofolder,
    "common-voice": corpora.read_common_voice,
    "librispeech": corpora.read_librispeech,
    "voxpopuli": corpora.read_voxpopuli,
    "nemo": corpora.read_nemo,
    "ljspeech": layouts.read_ljspeech,
    "kaldi": layouts.read_kaldi,
    "mls": layouts.read_mls,
    "fleurs": layouts.read_fleurs,
    "pairs": layouts.read_pairs,
    "hub": read_hub,
    "bigquery": read_bigquery,
}
_FOLDERS: dict[str, Callable[[Path], object]] = {
    "common-voice": corpora.is_common_voice,
    "voxpopuli": corpora.voxpopuli_tables,
    "kaldi": layouts.kaldi_folders,
    "mls": layouts.mls_transcripts,
    "fleurs": layouts.fleurs_tables,
    "ljspeech": layouts.ljspeech_tables,
    "audiofolder": metadata_of,
    "hub": holds_sound,
    "table": tables_of,
    "librispeech": lambda folder: next(corpora.librispeech_transcripts(folder), None),
    "pairs": lambda folder: next(layouts.pairs_in(folder), None),
}
"""Recognises the kind of a folder; tried in this order."""
_SOURCE_HINT = "name a table, a folder or a data set"


def kind_of(source: str, chosen: str = "") -> str:
    """Return the kind of a source.

    Args:
        chosen: the kind that the user chose; empty: it is recognised.

    Raises:
        BadInput: the kind is unknown, ``source`` does not exist, or its kind is not recognised.
    """
    if not source:
        raise BadInput("no source was given", _SOURCE_HINT)
    if chosen and chosen not in READERS:
        raise BadInput(f"unknown kind of source: {chosen!r}", f"known: {', '.join(READERS)}")
    path = Path(source).expanduser()
    is_remote = chosen in ("hub", "bigquery") if chosen else source.startswith(BIGQUERY)
    must_be_local = chosen or looks_like_path(source) or path.suffix.lower() in ENDINGS
    if not is_remote and must_be_local and not path.exists():
        raise BadInput(f"source {source}: not there", _SOURCE_HINT)
    if chosen or is_remote:
        return chosen or "bigquery"
    if path.is_dir():
        return _kind_of_folder(path)
    return _kind_of_file(path) if path.is_file() else "hub"


def _kind_of_file(path: Path) -> str:
    if corpora.is_nemo(path):
        return "nemo"
    if holds_sound(path):
        return "hub"
    if path.suffix.lower() in ENDINGS:
        return "table"
    raise BadInput(f"source {path}: not a table by its name", f"known endings: {', '.join(ENDINGS)}; or --kind")


def _kind_of_folder(folder: Path) -> str:
    for kind, recognises in _FOLDERS.items():
        if recognises(folder):
            return kind
    hint = f"known: tables ({', '.join(ENDINGS)}), sounds with a .txt beside them, or a form of --kind"
    raise BadInput(f"source {folder}: nothing there has a known form", hint)
