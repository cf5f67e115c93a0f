"""``evaluate``: how good a model is on a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import (
    OUTPUT,
    Device,
    Json,
    Language,
    MixedPrecision,
    ModelReference,
    Output,
    Prompt,
    Timestamps,
    Together,
)
from app.cli.model.language_models import evaluate_texts, refuse_of_speech
from app.task_results import EvaluationRequest, results_of
from profiles.errors import ExitCode
from profiles.schema import DEFAULT_TASK
from training.records.model_folders import is_language_model
from training.records.runs import find_model

Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed of the confidence interval.")]


def evaluate(
    model: ModelReference,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Data folder, table or hub name.")],
    split: Annotated[
        str, typer.Option(help="Split to evaluate; empty: test, else validation; of a table, all of it.")
    ] = "",
    predictions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the text of each clip to this CSV file.")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="MODEL", help="Compare with this model, and say by how much the two differ.")
    ] = "",
    seed: Seed = 0,
    language: Language = "",
    prompt: Prompt = "",
    timestamps: Timestamps = None,
    mixed_precision: MixedPrecision = "off",
    device: Device = "auto",
    local: Together = 1,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Evaluate a model on one split of a data set, or on a single table; with two models, compare them.

    Raises:
        BadInput: a model, the data set or the split cannot be found or used.
    """
    path, against_path = find_model(output, model), find_model(output, against) if against else None
    if is_language_model(path):
        refused = {"--predictions": predictions, "--language": language, "--prompt": prompt, "--timestamps": timestamps}
        refuse_of_speech([option for option, value in refused.items() if value])
        paths = [path, *([against_path] if against_path is not None else [])]
        options = {"device": device, "mixed_precision": mixed_precision, "workers": local}
        return evaluate_texts(paths, dataset, split, as_json, **options)
    request = EvaluationRequest(
        model=path,
        against=against_path,
        dataset=dataset,
        split=split,
        predictions=predictions,
        seed=seed,
        language=language,
        prompt=prompt,
        timestamps=timestamps,
        mixed_precision=mixed_precision,
        device=device,
        workers=local,
        as_json=as_json,
    )
    return results_of(DEFAULT_TASK).evaluate(request)
