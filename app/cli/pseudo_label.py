"""``pseudo-label``: transcripts of recordings that have none, by a model, with how far they can be trusted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, ModelReference, Output
from app.cli.terminal import answer, reporting
from app.console import say
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.tasks.pseudo_table import PseudoRow


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
    from training.runs import find_model
    from training.tasks.pseudo_table import NAME, TextBounds, recordings

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

        rows = label(Labelling(first, second, language, device, batch_size, bounds), files, target / NAME, progress)
    kept = sum(not row.left_out for row in rows)
    reasons = Counter(_kind(row) for row in rows if row.left_out)
    if as_json:
        document = {"file": str(target / NAME), "recordings": len(rows), "kept": kept, "left_out": dict(reasons)}
        return answer(True, {**document, "with_transcript": transcribed}, ())
    for reason, count in reasons.most_common():
        say(f"left out {count}: {reason}")
    say(f"kept {kept} of {counted(len(rows), 'text')} in {target / NAME}; to train on them: --set pseudo_share=0.5; "
        "to undo: delete the file")  # fmt: skip
    return ExitCode.DONE


def _without_transcripts(files: list[tuple[str, Path]], target: Path) -> tuple[list[tuple[str, Path]], int]:
    """Take out what a person's table in ``target`` names; say how many those are."""
    from training.tasks.speech_clips import FileSource
    from training.tasks.speech_dataset import has_tables, read_tables

    known = set[Path]()
    if has_tables(target):
        clips = [clip for split in read_tables(str(target)).splits.values() for clip in split]
        known = {clip.audio.path.resolve() for clip in clips if isinstance(clip.audio, FileSource)}
    new = [(name, path) for name, path in files if path.resolve() not in known]
    if not new:
        raise BadInput(f"{target}: every recording has a transcript ({len(files)})", "there is nothing to do")
    return new, len(files) - len(new)


def _kind(row: PseudoRow) -> str:
    """The reason without the row's own figure: a measure and its bound."""
    return re.sub(r" \S+ (above|below) ", r" \1 ", row.left_out.partition(":")[0])
