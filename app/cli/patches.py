"""``patches``: what the patch files of a data set change."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import Json
from app.cli.terminal import answer
from app.console import say, visible
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.tasks.patches import Change


def patches(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data folder or table.")],
    origin: Annotated[bool, typer.Option("--origin", help="Show file and line of each change.")] = False,
    text_column: Annotated[str, typer.Option("--text-column", help="Transcript column; empty: the usual names.")] = "",
    as_json: Json = False,
) -> ExitCode:
    """Show what the files in a data set's folder 'patches' change.

    Raises:
        BadInput: the data set or one of the files cannot be used.
    """
    from training.tasks.patches import FOLDER
    from training.tasks.speech_dataset import is_on_hub, read_tables

    if is_on_hub(dataset):
        raise BadInput(f"{dataset}: patches belong to a data set in a folder", "name the folder of its tables")
    tables = read_tables(dataset, text_column)
    folder = (tables.folder or Path()) / FOLDER
    left = {split: sum(not clip.left_out for clip in clips) for split, clips in tables.splits.items()}
    changes = [asdict(change) for change in tables.changes]
    document = {"folder": str(folder), "samples": left, "changes": changes, "notes": list(tables.notes)}
    answer(as_json, document, [_line(change, origin) for change in tables.changes])
    if as_json:
        return ExitCode.DONE
    for note in tables.notes:
        say(f"note: {visible(note)}")
    for split, count in left.items():
        say(f"{split}: {count} of {counted(len(tables.splits[split]), 'sample')}")
    counts = Counter(change.kind for change in tables.changes)
    done = ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "nothing is changed"
    say(f"{done}; patches are read from {visible(folder)}")
    return ExitCode.DONE


def _line(change: Change, origin: bool) -> str:
    place = f"  ({change.where})" if origin else ""
    return visible(f"{change.split} {change.id}  {change.kind}: {change.before!r} -> {change.after!r}{place}")
