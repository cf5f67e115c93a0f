"""``evaluate``: how well a model hears."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Device, Json, Language, ModelReference, Output
from profiles.errors import ExitCode


def evaluate(
    model: ModelReference,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data folder, table or hub name.")],
    split: Annotated[str, typer.Option("--split", help="Part of the data set; empty: test, or all of a table.")] = "",
    predictions: Annotated[
        Path | None, typer.Option("--predictions", metavar="FILE", help="Write what it wrote for each clip, as CSV.")
    ] = None,
    language: Language = "",
    device: Device = "auto",
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Measure WER and CER of a model on a data set."""
    from app.cli.models import ModelRequest, evaluate_command

    return evaluate_command(ModelRequest(output, model, device, language, as_json), dataset, split, predictions)
