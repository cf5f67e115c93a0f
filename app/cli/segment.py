"""``segment``: long recordings with their transcripts become clips to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Device, Json, Language, Output
from profiles.errors import ExitCode

_TRANSCRIPT = ".txt, .srt or .vtt; empty: the file beside it of the same name."
_MODEL = "Whisper that aligns the text: a folder, a run or a profile."
_DRAFT = "Without a transcript: use what the model hears, for you to correct."


def segment(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="A sound file, or a folder of them.")],
    transcript: Annotated[Path | None, typer.Argument(metavar="[TRANSCRIPT]", help=_TRANSCRIPT)] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder of the new data set.")] = Path(
        "segments"
    ),
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help=_MODEL)] = "",
    longest: Annotated[float, typer.Option("--longest", metavar="S", min=1, max=30, help="Longest clip.")] = 30.0,
    agreement: Annotated[
        float, typer.Option("--agreement", metavar="SHARE", min=0, max=1, help="Least agreement of text and sound.")
    ] = 0.6,
    draft: Annotated[bool, typer.Option("--draft", help=_DRAFT)] = False,
    language: Language = "",
    device: Device = "auto",
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Cut long recordings at pauses, and assign to each clip the words of the transcript spoken in it."""
    from app.cli.models import ModelRequest
    from app.cli.segments import segment_command
    from training.recordings.segments.cutting import SegmentOptions

    request = ModelRequest(output, model, device, language, as_json=as_json)
    return segment_command(request, recording, transcript, out, SegmentOptions(longest, agreement, draft))
