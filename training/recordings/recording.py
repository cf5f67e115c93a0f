"""One recording of a source, as every reader gives it; how a row of a stranger's table becomes one, and why not.

Columns go by many names. A cell may lead to ``https`` addresses, and to files inside the folders a person named.
Nothing else is followed: no ``http``, ``file`` or other scheme, no absolute path, ``..`` or symbolic link out of those
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
from training.tasks.speech_clips import (
    COLUMNS,
    END_COLUMNS,
    FILE_COLUMNS,
    LANGUAGE_COLUMNS,
    OFFSET_COLUMNS,
    SPEAKER_COLUMNS,
    SPLITS,
    FileSource,
    find_text_column,
    says_silence,
    split_named,
)
from training.tasks.stored_files import as_stored, written_path
from training.tasks.tables import Row, Table

if TYPE_CHECKING:
    from typing import TypeAlias

    from training.tasks.speech_clips import AudioSource

    Source: TypeAlias = "AudioSource | UrlSource | NoSource"

AUDIO = (*FILE_COLUMNS[:3], "audio_url", "audio_uri", "url", "uri", "gcs_uri", *FILE_COLUMNS[3:])
SPEAKER = (*SPEAKER_COLUMNS, "user_id")
LANGUAGE = LANGUAGE_COLUMNS
LONGEST_ID = 200
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_LONGEST_CELL = 4096  # characters of a path or address


class ExclusionReason(str, Enum):
    """Why a recording is left out; the values are the words of ``left_out.csv``."""

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
class Fault:
    """Why one recording is left out."""

    reason: ExclusionReason
    detail: str
    may_pass: bool = False
    """The same command may get it the next time: a server did not answer."""


class UnusableRecording(Exception):
    """One recording cannot be used."""

    def __init__(self, reason: ExclusionReason, detail: str, may_pass: bool = False) -> None:
        super().__init__(detail)
        self.fault = Fault(reason, detail, may_pass)


@dataclass(frozen=True)
class UrlSource:
    """A recording behind an ``https`` address."""

    url: str

    def stamp(self) -> str:
        return self.url


@dataclass(frozen=True)
class NoSource:
    """What a cell holds that leads to no recording."""

    text: str

    def stamp(self) -> str:
        return self.text


@dataclass(frozen=True)
class Recording:
    """One row of a source."""

    id: str
    audio: Source
    text: str
    where: str
    """Where it came from, for messages: table and line."""
    speaker: str = ""
    language: str = ""
    split: str = ""
    """``train``, ``validation`` or ``test``; empty if the source does not say."""
    offset: float = 0.0
    """Seconds into the sound file at which it begins."""
    duration: float | None = None
    """Seconds from there on; ``None``: to the end of the file."""
    fault: Fault | None = None
    """Why it cannot be used, if the reader knows already."""
    silence: bool = False
    """Nobody speaks in it, so it has no text."""

    @property
    def shown_source(self) -> str:
        """File or address, for a report."""
        if isinstance(self.audio, (UrlSource, NoSource)):
            return shown(self.audio.stamp())
        return str(getattr(self.audio, "path", self.where))


@dataclass(frozen=True)
class Columns:
    """Names of columns that a person gave; an empty one is found by the usual names."""

    audio: str = ""
    text: str = ""
    speaker: str = ""


@dataclass(frozen=True)
class ReadRequest:
    """What a reader is asked for."""

    source: str
    columns: Columns = field(default_factory=Columns)
    roots: tuple[Path, ...] = ()
    """Folders besides the table's own in which recordings may be."""


def one_line(text: str) -> str:
    """Return a transcript in one line, without control characters."""
    return " ".join("".join(c if unicodedata.category(c) != "Cc" else " " for c in text).split())


@dataclass(frozen=True)
class TableColumns(Columns):
    """The columns of one table that count; empty where it has none."""

    language: str = ""
    offset: str = ""
    end: str = ""


def names_in(table: Table, request: ReadRequest) -> TableColumns:
    """Find the columns of a table, whose usual ones are spelled as usual (:func:`spelled`).

    Raises:
        BadInput: no column with recordings or none with transcripts, or one that was named is not there.
    """
    columns = request.columns
    speaker = table.column((columns.speaker,), "speakers", "--speaker-column") if columns.speaker else ""
    return TableColumns(
        table.column((columns.audio,) if columns.audio else AUDIO, "recordings", "--audio-column"),
        find_text_column(table, columns.text, "--text-column"),
        speaker or _first(SPEAKER, table.columns),
        _first(LANGUAGE, table.columns),
        _first(OFFSET_COLUMNS, table.columns),
        _first(END_COLUMNS, table.columns),
    )


def spelled(table: Table) -> Table:
    """Return a table with the usual columns in the usual spelling."""
    return table.spelled(tuple(dict.fromkeys((*COLUMNS, *AUDIO, *SPEAKER))))


def _first(names: Sequence[str], columns: Iterable[str]) -> str:
    """Return the column with the first of ``names``, in capitals or not; empty if there is none."""
    there = {**{column.lower(): column for column in columns}, **{column: column for column in columns}}
    return next((there[name] for name in names if name in there), "")


def recording_of(
    row: Row, names: TableColumns, base: Path, request: ReadRequest, split: str = "", always_cut: bool = False
) -> Recording:
    """Return the recording of one row; what is wrong with it is its ``fault``.

    Args:
        base: the folder that relative paths start from.
        split: the split that the whole table stands for; empty: a column ``split`` tells it.
        always_cut: ``duration`` cuts the file also where no offset is given.
    """
    cells = row.cells
    cell = cells.get(names.audio, "")
    audio, fault = located(cell, base, request.roots)
    offset, duration, text = 0.0, None, ""
    try:
        text = one_line(row.text(names.text))
        offset = row.number(names.offset) or 0.0
        if always_cut or cells.get(names.offset):
            duration = _length(row, names.end, offset)
    except BadInput as error:
        fault = Fault(ExclusionReason.BAD_CELL, error.message)
    named = cells.get("split", "")
    if not split and named and not split_named(named):
        fault = Fault(ExclusionReason.BAD_CELL, f"column split: {named[:40]!r} is none of {', '.join(SPLITS)}")
    return Recording(
        id=_identity(cells, cell, offset if cells.get(names.offset) else None),
        audio=audio,
        text=text,
        where=row.where,
        speaker=cells.get(names.speaker, ""),
        language=cells.get(names.language, ""),
        split=split or split_named(named),
        offset=offset,
        duration=duration,
        fault=fault,
        silence=not text and says_silence(cells),
    )


def _length(row: Row, end_column: str, offset: float) -> float | None:
    """Return the seconds from ``offset`` on that a row stands for; ``None`` where it does not say.

    Raises:
        BadInput: its cells are no seconds, or it ends before it begins.
    """
    end = row.number(end_column)
    if end is None:
        return row.number("duration")
    if end <= offset:
        raise BadInput(
            f"{row.where}, column {end_column}: it ends at {end:g} s and begins at {offset:g} s", "correct it"
        )
    return end - offset


def shown(cell: str) -> str:
    """What a cell names, without the query of an address, which may hold a key."""
    return cell.partition("?")[0] if "://" in cell else cell


def _identity(cells: dict[str, str], cell: str, offset: float | None) -> str:
    given = cells.get("id") or cells.get("utt_id")
    named = one_line(given or (shown(cell) if offset is None else f"{shown(cell)}@{offset:g}"))
    return named[-LONGEST_ID:]


def located(cell: str, base: Path, roots: Sequence[Path] = ()) -> tuple[Source, Fault | None]:
    """Return the recording that ``cell`` names; or what it holds, and why that is none or is not followed.

    Args:
        base: the table's folder.
        roots: further folders in which recordings may be; relative paths are looked for in all of them.
    """
    try:
        return _source(cell, (base, *roots)), None
    except UnusableRecording as error:
        return NoSource(cell), error.fault


def _source(cell: str, folders: Sequence[Path]) -> FileSource | UrlSource:
    if not cell:
        raise UnusableRecording(ExclusionReason.NOT_THERE, "no file and no address")
    if len(cell) > _LONGEST_CELL:
        raise UnusableRecording(ExclusionReason.BAD_CELL, f"a path of {len(cell)} characters")
    scheme = _SCHEME.match(cell)
    if scheme is None:
        return _file(cell, folders)
    match scheme[1].lower():
        case "https":
            return UrlSource(cell)
        case "gs":  # how BigQuery names an object of Cloud Storage; a public one is read without its client
            return UrlSource(f"https://storage.googleapis.com/{cell[len(scheme[0]) :]}")
        case other:
            raise UnusableRecording(ExclusionReason.NOT_HTTPS, f"{other} is not followed, only https and files")


def _file(cell: str, roots: Sequence[Path]) -> FileSource:
    outside = False
    for root in roots:
        try:
            path = as_stored(root, cell).resolve()
            mode = path.stat().st_mode
        except (OSError, ValueError, RuntimeError):  # not there; a zero byte; links in a circle
            continue
        if not any(path.is_relative_to(allowed.resolve()) for allowed in roots):
            outside = True
        elif stat.S_ISREG(mode):
            return FileSource(path)
    if outside or written_path(cell).is_absolute() or ".." in Path(cell).parts:
        raise UnusableRecording(
            ExclusionReason.OUTSIDE, "leads out of the table's folder; --audio-root FOLDER allows one more"
        )
    raise UnusableRecording(ExclusionReason.NOT_THERE, "no such file")
