"""VoxPopuli, as its own tools leave it: ``LANGUAGE/asr_train.tsv`` (dev, test) and ``LANGUAGE/YEAR/ID.ogg``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.recordings.places import located
from training.recordings.recording import Recording, Request, one_line
from training.tasks.tables import Row, read_table

_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
_TEXTS = ("raw_text", "normalized_text")


def read(request: Request) -> Iterator[Recording]:
    """Give the recordings of all languages in the folder; the raw text where there is one, else the normalised one.

    Raises:
        BadInput: a table cannot be read, or lacks a column.
    """
    texts = (request.columns.text,) if request.columns.text else _TEXTS
    for file in tables_of(Path(request.source).expanduser()):
        table = read_table(file, quoted=False)
        table.column(("id",), "names of the recordings")
        table.column(texts, "transcripts", "--text-column")
        split = _SPLITS[file.stem.removeprefix("asr_")]
        for row in table.rows:
            yield _recording(row, texts, split, request)


def tables_of(folder: Path) -> list[Path]:
    """Return the tables of the folder's languages; none if this is no VoxPopuli."""
    places = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("transcribed_data/*"))]
    return [path for place in places for split in _SPLITS if (path := place / f"asr_{split}.tsv").is_file()]


def _recording(row: Row, texts: tuple[str, ...], split: str, request: Request) -> Recording:
    name = row.cells.get("id", "")
    audio, fault = located(f"{name[:4]}/{name}.ogg" if name else "", row.table.parent, request.roots)
    text = next((cell for column in texts if (cell := row.cells.get(column, ""))), "")
    speaker = row.cells.get("speaker_id", "")
    known = "" if speaker.lower() in ("none", "na", "n/a") else speaker
    return Recording(
        name or row.where,
        audio,
        one_line(text),
        row.where,
        known,
        row.table.parent.name,
        split,
        fault=fault,
    )
