"""``transcribe``: what is said in sound files, or into a microphone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Device, Json, Language, ModelReference, Output, Prompt, Timestamps
from profiles.errors import BadInput, ExitCode


def transcribe(
    model: ModelReference,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Sound files.")] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="NAME", help="txt, srt, vtt or json; several with commas.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for the files; default: the screen.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    microphone: Annotated[
        float, typer.Option("--microphone", metavar="SECONDS", help="Record from this machine's microphone.")
    ] = 0.0,
    language: Language = "",
    prompt: Prompt = "",
    timestamps: Timestamps = None,
    device: Device = "auto",
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Transcribe sound files."""
    from app.cli.models import ModelRequest, Writing, transcribe_command

    if bool(files) == bool(microphone):
        raise BadInput("no recording was named", "name sound files, or --microphone SECONDS")
    request = ModelRequest(output, model, device, language, prompt, timestamps, as_json)
    return transcribe_command(request, files or [], Writing(tuple(formats or ()), out, overwrite), microphone)
