"""``transcribe``: what is said in sound files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Device, Json, Language, ModelReference, Output
from profiles.errors import ExitCode


def transcribe(
    model: ModelReference,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Sound files.")],
    language: Language = "",
    device: Device = "auto",
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Write down what is said in sound files."""
    from app.cli.models import ModelRequest, transcribe_command

    return transcribe_command(ModelRequest(output, model, device, language, as_json=as_json), files)
