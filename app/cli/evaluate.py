"""``evaluate``: how well a model hears."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Device, Json, Language, ModelReference, Output, Prompt, Timestamps
from profiles.errors import ExitCode


def evaluate(
    model: ModelReference,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data folder, table or hub name.")],
    split: Annotated[str, typer.Option("--split", help="Empty: test, else validation; all of a table.")] = "",
    predictions: Annotated[
        Path | None, typer.Option("--predictions", metavar="FILE", help="Write the text of each clip to this CSV file.")
    ] = None,
    against: Annotated[
        str, typer.Option("--against", metavar="MODEL", help="Compare with this model: better or worse, by how much.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the interval.")] = 0,
    language: Language = "",
    prompt: Prompt = "",
    timestamps: Timestamps = None,
    device: Device = "auto",
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Measure WER and CER of a model on a data set, by speaker, length and noise."""
    from app.cli.evaluating import evaluate_command
    from app.cli.models import ModelRequest

    request = ModelRequest(output, model, device, language, prompt, timestamps, as_json)
    return evaluate_command(request, dataset, split, out=predictions, against=against, seed=seed)
