"""``evaluate``, and ``compare`` of two models: word error rates in total and by group, and differences of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.terminal import answer, reporting
from app.console import command_line, say, visible
from app.run_view.metrics import metric_label, metric_text, unfinished_text
from app.task_results import EvaluationRequest
from profiles.errors import BadInput, ExitCode, counted
from profiles.locations import is_on_hub
from profiles.quantities import duration_text
from speech.data.speech_dataset import clips_of_split, split_to_evaluate
from speech.report.figures import (
    breakdown_document,
    breakdown_lines,
    difference_document,
    difference_lines,
    predictions_in,
)
from speech.scoring.error_analysis import slice_of, wer_difference
from training.records.plan import read_plan
from training.records.run_files import check_writable
from training.records.runs import find_run
from training.tasks.outputs.predictions import FOLDER, NAME, Prediction, read_predictions, write_predictions

if TYPE_CHECKING:
    from speech.whisper.evaluation import EvaluationResult


def evaluate(request: EvaluationRequest) -> ExitCode:
    """Evaluate a model on one split of a data set, or on a single table; with two models, compare them.

    Raises:
        BadInput: the data set or the split cannot be found or used.
    """
    dataset, as_json, predictions = request.dataset, request.as_json, request.predictions
    split = split_to_evaluate(dataset, request.split)
    if not is_on_hub(dataset):
        clips_of_split(dataset, split)  # what is wrong with a table is told before torch is loaded
    if predictions is not None:
        check_writable(predictions.parent, "--predictions")
    decoding = {"language": request.language, "prompt": request.prompt, "timestamps": request.timestamps}
    options: dict[str, Any] = {"device": request.device, "mixed_precision": request.mixed_precision, **decoding}
    options["workers"] = request.workers
    measured = _measured(request.model, dataset, split, **options)
    if predictions is not None:
        write_predictions(predictions, measured.predictions, 0o644)
    if request.against is not None:
        against_result = _measured(request.against, dataset, split, **options)
        texts, figures = (against_result.predictions, measured.predictions), [against_result.metrics, measured.metrics]
        return _show_difference(
            [str(request.against), str(request.model)], *texts, request.seed, as_json, metrics=figures
        )
    evaluation = {"model": str(request.model), "dataset": dataset, "split": split, "metrics": measured.metrics}
    details = {"precision": measured.precision, "predictions": str(predictions) if predictions is not None else None}
    breakdown = breakdown_document(measured.predictions) if as_json else None
    dataset_part = Path(dataset).name if Path(dataset).expanduser().is_file() else split
    lines = [*_figures(measured, dataset_part), *([] if any(decoding.values()) else _run_said(request.model, measured))]
    code = answer(as_json, {**evaluation, "breakdown": breakdown, **details}, lines)
    if predictions is not None and not as_json:
        say(f"text of each clip: {predictions}")
    return code


def _measured(model: Path, dataset: str, split: str, **options: Any) -> EvaluationResult:
    with reporting(f"evaluating {model}") as progress:
        from speech.whisper.evaluation import evaluate_model  # imports torch

        return evaluate_model(model, dataset, split, progress=progress, **options)


def _figures(measured: EvaluationResult, dataset_part: str) -> Iterator[str]:
    """Yield the result lines of a model on ``dataset_part`` of the recordings."""
    metrics = measured.metrics
    for name, value in metrics.items():
        if name == "cut":
            yield unfinished_text({"": value})
        elif name not in ("samples", "hours"):
            yield f"{metric_label(name):5} {metric_text(name, value, exact=True)}"
    length = duration_text(metrics["hours"] * 3600)
    amount = f"{counted(round(metrics['samples']), 'recording')} of {visible(dataset_part)}, {length} of sound"
    yield f"on {amount}, computed in {measured.precision}"
    yield from breakdown_lines(measured.predictions)


def _run_said(model: Path, measured: EvaluationResult) -> Iterator[str]:
    """Yield the WER that the model's own run measured on the same recordings, if it differs, and why."""
    try:
        predictions = {prediction.id: prediction for prediction in read_predictions(model.parent / FOLDER / NAME)}
        profile = read_plan(model.parent / "plan.json").profile
    except BadInput:  # it is no run's, or the run kept nothing
        return
    run_errors, measured_errors = slice_of("", list(predictions.values())), slice_of("", measured.predictions)
    references = {prediction.id: prediction.reference for prediction in measured.predictions}
    same_references = references == {name: prediction.reference for name, prediction in predictions.items()}
    if same_references and run_errors.edits != measured_errors.edits:
        adapter_note = ", the adapters beside the weights and not merged" if profile.model.tuning == "lora" else ""
        conditions = f"mixed_precision = {profile.training.mixed_precision}{adapter_note}"
        wer = metric_text("wer", run_errors.wer)
        yield f"the run itself found {wer} on these ({conditions}; here {measured.precision})"


def compare(references: Sequence[str], seed: int, output: Path, as_json: bool) -> ExitCode:
    """Compare two files or runs; for a single run, before and after training.

    Raises:
        BadInput: a file or run is not there or holds no predictions, or they have no recording in common.
    """
    if len(references) > 2:
        raise BadInput(f"{len(references)} runs or files cannot be compared at once", "name one run, or A and B")
    if len(references) == 2:
        before, after = (_predictions(output, reference) for reference in references)
        return _show_difference(references, before, after, seed, as_json)
    path = find_run(output, references[0])
    before, after = predictions_in(path)
    if not before or not after:
        raise BadInput(
            f"{path.name} has no predictions from before and after training", "evaluate two models and compare them"
        )
    return _show_difference([f"{path.name} before", f"{path.name} after"], before, after, seed, as_json)


def _predictions(output: Path, reference: str) -> list[Prediction]:
    path = Path(reference).expanduser()
    file = path if path.is_file() else find_run(output, reference) / FOLDER / NAME
    if not file.is_file():
        hint = f"{command_line('model', 'evaluate', reference, 'DATASET', '--predictions', 'FILE')} writes one"
        raise BadInput(f"{reference} has no {NAME}", hint)
    return read_predictions(file)


def _show_difference(
    names: Sequence[str],
    before: Sequence[Prediction],
    after: Sequence[Prediction],
    seed: int,
    as_json: bool,
    **extra: Any,
) -> ExitCode:
    model_difference = wer_difference(before, after, seed)
    document = {"models": list(names), **difference_document(model_difference), "seed": seed, **extra}
    lines = [f"{letter}     {visible(name)}" for letter, name in zip("AB", names, strict=True)]
    return answer(as_json, document, [*lines, *difference_lines(model_difference), *breakdown_lines(after, before)])
