"""``patches`` and ``pseudo-label``: what patch files change in a data set, and transcripts by a model for recordings
that have none."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, ModelReference, Output
from app.cli.terminal import answer, reporting
from app.console import say, visible
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode
from training.runs import find_model
from training.tasks.patches import FOLDER, PSEUDO, Change, TextBounds, recordings
from training.tasks.speech_clips import FileSource
from training.tasks.speech_dataset import has_tables, is_on_hub, read_tables


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


def pseudo_label(
    model: ModelReference,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the recordings.")],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DATASET", help="Data folder to write to; empty: FOLDER.")
    ] = None,
    agree_with: Annotated[
        str, typer.Option("--agree-with", metavar="MODEL", help="Second model; empty: the first, with noise.")
    ] = "",
    min_confidence: Annotated[
        float, typer.Option("--min-confidence", max=0, help="Least mean log-probability of a token.")
    ] = -1.0,
    min_agreement: Annotated[
        float, typer.Option("--min-agreement", min=0, max=1, help="Least agreement (1 - WER) of the two texts.")
    ] = 0.9,
    max_compression: Annotated[
        float, typer.Option("--max-compression", min=0, help="Largest compression ratio of a text.")
    ] = 2.4,
    max_no_speech: Annotated[
        float, typer.Option("--max-no-speech", min=0, max=1, help="Largest no-speech probability.")
    ] = 0.6,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, max=1024, help="Recordings in one batch.")] = 8,
    language: Language = "",
    device: Device = "auto",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Let a model write transcripts of recordings that have none.

    Raises:
        BadInput: a model or a folder cannot be used, or no recording lacks a transcript.
    """
    target = (into or folder).expanduser()
    if not target.is_dir():
        raise BadInput(f"{target}: no such folder", "name the folder of a data set, or none")
    files, transcribed = _without_transcripts(recordings(folder.expanduser(), target), target)
    if transcribed:
        say(f"skipped, because they have a transcript in a table of {target}: {counted(transcribed, 'recording')}")
    first = find_model(output, model)
    second = find_model(output, agree_with) if agree_with else None
    bounds = TextBounds(min_confidence, max_compression, max_no_speech, min_agreement)
    with reporting(f"pseudo-label with {first}") as progress:
        from training.tasks.whisper.pseudo_label import Labelling, label

        rows = label(Labelling(first, second, language, device, batch_size, bounds), files, target / PSEUDO, progress)
    kept = sum(not row.left_out for row in rows)
    reasons = Counter(row.kind for row in rows if row.left_out)
    if as_json:
        document = {"file": str(target / PSEUDO), "recordings": len(rows), "kept": kept, "left_out": dict(reasons)}
        return answer(True, {**document, "with_transcript": transcribed}, ())
    for reason, count in reasons.most_common():
        say(f"left out {count}: {reason}")
    use = "to train on them: --set pseudo_share=0.5" if kept else "nothing to train on: another model, or other bounds"
    say(f"kept {kept} of {counted(len(rows), 'text')} in {target / PSEUDO}; {use}; to undo: delete the file")
    return ExitCode.DONE


def _without_transcripts(files: list[tuple[str, Path]], target: Path) -> tuple[list[tuple[str, Path]], int]:
    """Take out what a person's table in ``target`` names; say how many those are."""
    known = set[Path]()
    if has_tables(target):
        clips = [clip for split in read_tables(str(target)).splits.values() for clip in split]
        known = {clip.audio.path.resolve() for clip in clips if isinstance(clip.audio, FileSource)}
    new = [(name, path) for name, path in files if path.resolve() not in known]
    if not new:
        raise BadInput(f"{target}: every recording has a transcript ({len(files)})", "there is nothing to do")
    return new, len(files) - len(new)
