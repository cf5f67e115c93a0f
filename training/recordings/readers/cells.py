"""From the cells of a row to a recording: the names that columns go by, and what a cell may hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from profiles.errors import BadInput
from training.recordings.places import located
from training.recordings.recording import Fault, Reason, Recording, Request, one_line
from training.tasks.speech_clips import SPLITS, TEXT_COLUMNS
from training.tasks.tables import Row, Table

AUDIO = (
    *("audio_path", "file_name", "audio_filepath", "audio_url", "audio_uri", "url", "uri", "gcs_uri"),
    *("path", "file", "filename", "audio"),
)
TEXT = (*TEXT_COLUMNS, "transcript", "raw_text", "normalized_text")
SPEAKER = ("speaker", "speaker_id", "client_id", "voice", "user_id")
LANGUAGE = ("language", "lang", "locale", "source_lang")
OFFSET = ("offset", "start")
LONGEST_ID = 200


@dataclass(frozen=True)
class Names:
    """The columns of one table that count; empty where it has none."""

    audio: str
    text: str
    speaker: str
    language: str
    offset: str


def names_in(table: Table, request: Request) -> Names:
    """Find the columns of a table.

    Raises:
        BadInput: no column with recordings or none with transcripts, or one that was named is not there.
    """
    columns = request.columns
    there = set(table.columns)
    speaker = table.column((columns.speaker,), "speakers", "--speaker-column") if columns.speaker else ""
    return Names(
        table.column((columns.audio,) if columns.audio else AUDIO, "recordings", "--audio-column"),
        table.column((columns.text,) if columns.text else TEXT, "transcripts", "--text-column"),
        speaker or next((name for name in SPEAKER if name in there), ""),
        next((name for name in LANGUAGE if name in there), ""),
        next((name for name in OFFSET if name in there), ""),
    )


def recording_of(
    row: Row, names: Names, base: Path, request: Request, split: str = "", always_cut: bool = False
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
    offset, duration = 0.0, None
    try:
        offset = row.number(names.offset) or 0.0
        if always_cut or cells.get(names.offset):
            duration = row.number("duration")
    except BadInput as error:
        fault = Fault(Reason.BAD_CELL, error.message)
    named = cells.get("split", "")
    if not split and named and not split_named(named):
        fault = Fault(Reason.BAD_CELL, f"column split: {named[:40]!r} is none of {', '.join(SPLITS)}")
    return Recording(
        id=_identity(cells, cell, offset if cells.get(names.offset) else None),
        audio=audio,
        text=one_line(cells.get(names.text, "")),
        where=row.where,
        speaker=cells.get(names.speaker, ""),
        language=cells.get(names.language, ""),
        split=split or split_named(named),
        offset=offset,
        duration=duration,
        fault=fault,
    )


def split_named(name: str) -> str:
    """Return the split that ``name`` stands for; empty if it stands for none."""
    lowered = name.lower()
    return next((split for split, names in SPLITS.items() if lowered in names), "")


def shown(cell: str) -> str:
    """What a cell names, without the query of an address, which may hold a key."""
    return cell.partition("?")[0] if "://" in cell else cell


def _identity(cells: dict[str, str], cell: str, offset: float | None) -> str:
    given = cells.get("id") or cells.get("utt_id")
    named = one_line(given or (shown(cell) if offset is None else f"{shown(cell)}@{offset:g}"))
    return named[-LONGEST_ID:]
