"""``patches``: what the patch files of a data set change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import Json
from profiles.counts import counted
from profiles.errors import ExitCode

if TYPE_CHECKING:
    from training.tasks.patches import Change
    from training.tasks.speech_dataset import SpeechTables


def patches(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data folder or table.")],
    origin: Annotated[bool, typer.Option("--origin", help="Show file and line of each change.")] = False,
    text_column: Annotated[str, typer.Option("--text-column", help="Transcript column; empty: the usual names.")] = "",
    as_json: Json = False,
) -> ExitCode:
    """Show what the files in a data set's folder 'patches' change: texts, protected samples, samples left out."""
    from app.console import say, show_json, show_line, visible
    from profiles.errors import BadInput
    from training.tasks.speech_dataset import is_on_hub, read_tables

    if is_on_hub(dataset):
        raise BadInput(f"{dataset}: patches belong to a data set in a folder", "name the folder of its tables")
    tables = read_tables(dataset, text_column)
    if as_json:
        show_json(_document(tables))
        return ExitCode.DONE
    for change in tables.changes:
        show_line(_line(change, origin))
    for note in tables.notes:
        say(f"note: {visible(note)}")
    counts = Counter(change.kind for change in tables.changes)
    done = ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "nothing is changed"
    for split, clips in tables.splits.items():
        left = sum(not clip.left_out for clip in clips)
        say(f"{split}: {left} of {counted(len(clips), 'sample')}")
    say(f"{done}; patches are read from {visible(_folder(tables))}")
    return ExitCode.DONE


def _folder(tables: SpeechTables) -> Path:
    from training.tasks.patches import FOLDER

    return (tables.folder or Path()) / FOLDER


def _line(change: Change, origin: bool) -> str:
    from app.console import visible

    place = f"  ({change.where})" if origin else ""
    what = f"{change.split} {change.id}  {change.kind}: {change.before!r} -> {change.after!r}"
    return visible(what + place)


def _document(tables: SpeechTables) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "folder": str(_folder(tables)),
        "samples": {split: sum(not clip.left_out for clip in clips) for split, clips in tables.splits.items()},
        "changes": [asdict(change) for change in tables.changes],
        "notes": list(tables.notes),
        "exit_code": 0,
    }
