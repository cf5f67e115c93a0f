"""The record of one recording that every reader yields, and how a row of an untrusted table becomes one.

Columns have many usual names. A cell may name an ``https`` address, or a file inside the folders that the user named.
Nothing else is followed: no ``http`` or other scheme, no absolute path, ``..`` or symbolic link out of those
folders, no device, no pipe.
"""

from __future__ import annotations

import re
import stat
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from profiles.errors import BadInput
from profiles.quantities import position_text
from speech.data.path_resolution import path_as_written, readings, resolve_path
from speech.data.speech_clips import (
    COLUMNS,
    END_COLUMNS,
    FILE_COLUMNS,
    LANGUAGE_COLUMNS,
    LONGEST_PATH,
    OFFSET_COLUMNS,
    FileSource,
    find_audio_column,
    find_text_column,
    says_silence,
)
from training.tasks.data_files.splits import SPEAKER_COLUMNS, SPLITS, split_named
from training.tasks.data_files.tables import Row, Table

if TYPE_CHECKING:
    from typing import TypeAlias

    from speech.data.speech_clips import AudioSource

    Source: TypeAlias = "AudioSource | UrlSource | MissingSource"

AUDIO = (*FILE_COLUMNS[:3], "audio_url", "audio_uri", "url", "uri", "gcs_uri", *FILE_COLUMNS[3:])
SPEAKER = (*SPEAKER_COLUMNS, "user_id")
LONGEST_ID = 200
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


class ExclusionReason(str, Enum):
    """Reasons for which a recording is left out; the values are written to ``left_out.csv``."""

    NO_TEXT = "no text"
    BAD_CELL = "bad cell"
    TRANSLATION = "translation"
    NOT_THERE = "not there"
    OUTSIDE = "outside"
    NOT_HTTPS = "not https"
    DOWNLOAD = "download"
    UNREADABLE = "unreadable"
    EMPTY = "empty"
    SILENT = "silent"
    CLIPPED = "clipped"
    TOO_SHORT = "too short"
    TOO_LONG = "too long"
    CHARACTERS = "characters per second"
    DUPLICATE = "duplicate"
    CONTRADICTION = "contradiction"
    LANGUAGE = "language"


@dataclass(frozen=True)
class Exclusion:
    """Why one recording is left out."""

    reason: ExclusionReason
    detail: str
    is_transient: bool = False
    """The same command may succeed the next time: a server did not answer."""


class UnusableRecording(Exception):
    """One recording cannot be used."""

    def __init__(self, reason: ExclusionReason, detail: str, is_transient: bool = False) -> None:
        super().__init__(detail)
        self.exclusion = Exclusion(reason, detail, is_transient)


@dataclass(frozen=True)
class UrlSource:
    """A recording at an ``https`` address."""

    url: str

    def stamp(self) -> str:
        return self.url


@dataclass(frozen=True)
class MissingSource:
    """The content of a cell that names no recording."""

    text: str

    def stamp(self) -> str:
        return self.text


@dataclass(frozen=True)
class Recording:
    """One row of a source."""

    id: str
    audio: Source
    text: str
    location: str
    """Table and line that it comes from, for messages."""
    speaker: str = ""
    language: str = ""
    split: str = ""
    """``train``, ``validation`` or ``test``; empty if the source names none."""
    offset: float = 0.0
    """Second of the sound file at which it begins."""
    duration: float | None = None
    """Length in seconds; ``None``: to the end of the file."""
    exclusion: Exclusion | None = None
    """Why it cannot be used, if the reader has determined it."""
    silence: bool = False
    """It holds no speech, so it has no text."""

    @property
    def shown_source(self) -> str:
        """File or address, for reports."""
        if isinstance(self.audio, (UrlSource, MissingSource)):
            return without_query(self.audio.stamp())
        return str(getattr(self.audio, "path", self.location))


@dataclass(frozen=True)
class Columns:
    """Names of columns that the user gave; where empty, the usual names are tried."""

    audio: str = ""
    text: str = ""
    speaker: str = ""


@dataclass(frozen=True)
class ReadRequest:
    """The source that a reader reads, and its options."""

    source: str
    columns: Columns = field(default_factory=Columns)
    roots: tuple[Path, ...] = ()
    """Further folders in which recordings may lie, besides that of the table."""


def one_line(text: str) -> str:
    """Return a transcript as one line, without control characters."""
    return " ".join("".join(c if unicodedata.category(c) != "Cc" else " " for c in text).split())


@dataclass(frozen=True)
class TableColumns(Columns):
    """The columns of one table that are read; empty where it has none."""

    language: str = ""
    offset: str = ""
    end: str = ""


def find_columns(table: Table, request: ReadRequest) -> TableColumns:
    """Find the columns of a table that :func:`with_usual_spelling` has returned.

    Raises:
        BadInput: there is no column with recordings or none with transcripts, or a named one does not exist.
    """
    columns = request.columns
    speaker = table.column((columns.speaker,), "speakers", "--speaker-column") if columns.speaker else ""
    audio = find_audio_column(table, AUDIO, columns.audio, "--audio-column")
    return TableColumns(
        audio,
        find_text_column(table, columns.text, "--text-column", audio),
        speaker or _first_present(SPEAKER, table.columns),
        _first_present(LANGUAGE_COLUMNS, table.columns),
        _first_present(OFFSET_COLUMNS, table.columns),
        _first_present(END_COLUMNS, table.columns),
    )


def with_usual_spelling(table: Table) -> Table:
    """Return a table whose usual columns are spelled as usual."""
    return table.with_spelling(tuple(dict.fromkeys((*COLUMNS, *AUDIO, *SPEAKER))))


def _first_present(names: Sequence[str], columns: Iterable[str]) -> str:
    """Return the column of the first of ``names`` that exists, regardless of case; empty if none does."""
    spellings = {**{column.lower(): column for column in columns}, **{column: column for column in columns}}
    return next((spellings[name] for name in names if name in spellings), "")


def recording_of(
    row: Row, names: TableColumns, base: Path, request: ReadRequest, split: str = "", always_cut: bool = False
) -> Recording:
    """Return the recording of one row; if it is invalid, ``exclusion`` says why.

    Args:
        base: the folder that relative paths start from.
        split: the split of the whole table; empty: that of the row's column ``split``.
        always_cut: ``duration`` cuts the file even if no offset is given.
    """
    cells = row.cells
    cell = cells.get(names.audio, "")
    audio, exclusion = locate_audio(cell, base, request.roots)
    offset, duration, text = 0.0, None, ""
    try:
        text = one_line(row.text(names.text))
        offset = row.number(names.offset) or 0.0
        if always_cut or cells.get(names.offset):
            duration = _length(row, names.end, offset)
    except BadInput as error:
        exclusion = Exclusion(ExclusionReason.BAD_CELL, error.message)
    split_cell = cells.get("split", "")
    if not split and split_cell and not split_named(split_cell):
        detail = f"column split: {split_cell[:40]!r} is none of {', '.join(SPLITS)}"
        exclusion = Exclusion(ExclusionReason.BAD_CELL, detail)
    return Recording(
        id=_identity(cells, cell, offset if cells.get(names.offset) else None),
        audio=audio,
        text=text,
        location=row.location,
        speaker=cells.get(names.speaker, ""),
        language=cells.get(names.language, ""),
        split=split or split_named(split_cell),
        offset=offset,
        duration=duration,
        exclusion=exclusion,
        silence=not text and says_silence(cells),
    )


def _length(row: Row, end_column: str, offset: float) -> float | None:
    """Return the length of a row's recording in seconds from ``offset``; ``None`` if the row names none.

    Raises:
        BadInput: its cells are not seconds, or it ends before it begins.
    """
    end = row.number(end_column)
    if end is None:
        return row.number("duration")
    if end <= offset:
        raise BadInput(
            f"{row.location}, column {end_column}: it ends at {position_text(end)}, before its begin at "
            f"{position_text(offset)}",
            "correct it",
        )
    return end - offset


def without_query(cell: str) -> str:
    """Return a cell without the query of an address, which may hold a key."""
    return cell.partition("?")[0] if "://" in cell else cell


def _identity(cells: dict[str, str], cell: str, offset: float | None) -> str:
    stated = cells.get("id") or cells.get("utt_id")
    identity = one_line(stated or (without_query(cell) if offset is None else f"{without_query(cell)}@{offset:g}"))
    return identity[-LONGEST_ID:]


def locate_audio(cell: str, base: Path, roots: Sequence[Path] = ()) -> tuple[Source, Exclusion | None]:
    """Return the audio that ``cell`` names, or the cell as :class:`MissingSource` with the reason of its exclusion.

    Args:
        base: the table's folder.
        roots: further folders in which recordings may lie; relative paths are resolved against all of them.
    """
    try:
        return _source(cell, (base, *roots)), None
    except UnusableRecording as error:
        return MissingSource(cell), error.exclusion


def _source(cell: str, folders: Sequence[Path]) -> FileSource | UrlSource:
    if not cell:
        raise UnusableRecording(ExclusionReason.NOT_THERE, "no file and no address")
    if len(cell) > LONGEST_PATH:
        raise UnusableRecording(ExclusionReason.BAD_CELL, f"a path of {len(cell)} characters")
    scheme = _SCHEME.match(cell)
    if scheme is None:
        return _file(cell, folders)
    match scheme[1].lower():
        case "file":
            return _file(cell, folders)
        case "https":
            return UrlSource(cell)
        case "gs":  # how BigQuery names an object of Cloud Storage; a public one is read without its client
            return UrlSource(f"https://storage.googleapis.com/{cell[len(scheme[0]) :]}")
        case scheme_name:
            raise UnusableRecording(ExclusionReason.NOT_HTTPS, f"{scheme_name} is not followed, only https and files")


def _file(cell: str, roots: Sequence[Path]) -> FileSource:
    outside = False
    for root in roots:
        try:
            path = resolve_path(root, cell).resolve()
            mode = path.stat().st_mode
        except (OSError, ValueError, RuntimeError):  # not there; a zero byte; links in a circle
            continue
        if not any(path.is_relative_to(allowed.resolve()) for allowed in roots):
            outside = True
        elif stat.S_ISREG(mode):
            return FileSource(path)
    if outside or any(path.is_absolute() or ".." in path.parts for path in map(path_as_written, readings(cell))):
        raise UnusableRecording(
            ExclusionReason.OUTSIDE, "leads out of the table's folder; --audio-root FOLDER allows one more"
        )
    raise UnusableRecording(ExclusionReason.NOT_THERE, ", nor ".join(["no such file", *readings(cell)[1:]]))
