"""``evaluate`` and ``export``, and ``compare`` of two models: word error rates in total and by group, differences
between models, and conversion for other programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, MixedPrecision, ModelReference, Output, Prompt, Timestamps
from app.cli.model.language_models import evaluate_texts, refuse_of_speech
from app.cli.terminal import answer, only_data_on_stdout, reporting
from app.console import command_line, say, visible
from app.run_view.figures import (
    breakdown_document,
    breakdown_lines,
    difference_document,
    difference_lines,
    predictions_in,
)
from app.run_view.metrics import metric_label, metric_text, unfinished_text
from profiles.errors import BadInput, ExitCode, counted
from profiles.locations import is_on_hub
from profiles.quantities import bytes_text, duration_text
from training.records.model_folders import is_language_model
from training.records.plan import read_plan
from training.records.run_files import check_writable
from training.records.runs import find_model, find_run
from training.tasks.outputs.predictions import FOLDER, NAME, Prediction, read_predictions, write_predictions
from training.tasks.scoring.error_analysis import slice_of, wer_difference
from training.tasks.speech.speech_dataset import clips_of_split, split_to_evaluate

if TYPE_CHECKING:
    from training.export.export import ExportOutcome
    from training.export.formats import Format, ModelSource
    from training.tasks.whisper.evaluation import EvaluationResult


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
        return evaluate_texts(paths, dataset, split, as_json, device=device, mixed_precision=mixed_precision)
    split = split_to_evaluate(dataset, split)
    if not is_on_hub(dataset):
        clips_of_split(dataset, split)  # what is wrong with a table is told before torch is loaded
    if predictions is not None:
        check_writable(predictions.parent, "--predictions")
    decoding = {"language": language, "prompt": prompt, "timestamps": timestamps}
    options = {"device": device, "mixed_precision": mixed_precision, **decoding}
    measured = _measured(path, dataset, split, **options)
    if predictions is not None:
        write_predictions(predictions, measured.predictions, 0o644)
    if against_path is not None:
        against_result = _measured(against_path, dataset, split, **options)
        texts, figures = (against_result.predictions, measured.predictions), [against_result.metrics, measured.metrics]
        return _show_difference([str(against_path), str(path)], *texts, seed, as_json, metrics=figures)
    evaluation = {"model": str(path), "dataset": dataset, "split": split, "metrics": measured.metrics}
    details = {"precision": measured.precision, "predictions": str(predictions) if predictions is not None else None}
    breakdown = breakdown_document(measured.predictions) if as_json else None
    dataset_part = Path(dataset).name if Path(dataset).expanduser().is_file() else split
    lines = [*_figures(measured, dataset_part), *([] if any(decoding.values()) else _run_said(path, measured))]
    code = answer(as_json, {**evaluation, "breakdown": breakdown, **details}, lines)
    if predictions is not None and not as_json:
        say(f"text of each clip: {predictions}")
    return code


def _measured(model: Path, dataset: str, split: str, **options: Any) -> EvaluationResult:
    with reporting(f"evaluating {model}") as progress:
        from training.tasks.whisper.evaluation import evaluate_model  # imports torch

        return evaluate_model(model, dataset, split, progress=progress, **options)


def _figures(measured: EvaluationResult, dataset_part: str) -> Iterator[str]:
    """Yield the result lines of a model on ``dataset_part`` of the recordings."""
    metrics = measured.metrics
    for name, value in metrics.items():
        if name == "cut":
            yield unfinished_text(value)
        elif name not in ("samples", "hours"):
            yield f"{metric_label(name):5} {metric_text(name, value)}"
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


def compare_texts(references: Sequence[str], seed: int, output: Path, as_json: bool) -> ExitCode:
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
        hint = f"{command_line('evaluate', reference, 'DATASET', '--predictions', 'FILE')} writes one"
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


def export(
    model: ModelReference,
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hf, ctranslate2, gguf, onnx or coreml.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder; empty: exports/ beside the model.")
    ] = None,
    quantize: Annotated[str, typer.Option(metavar="PRECISION", help="Precision: float16, int8, q5_0 ...")] = "",
    check_with: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Recording to compare with; may be repeated.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare with the original.")] = True,
    max_difference: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=10, help="Largest share of words that may differ.")
    ] = 0.1,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="With --to hf: write the adapters without merging them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Export a model, and report how the exported one compares with the original.

    Raises:
        BadInput: the model or the format cannot be used, or the folder is there already.
        RunFailed: the exported model writes other texts.
    """
    from training.export.formats import find_format, find_source

    export_format = find_format(to, quantize)
    source = find_source(output, model)
    if math.isnan(max_difference):
        raise BadInput("--max-difference nan: not a number", "pass a share of the words, such as 0.1")
    _refuse_unfit(export_format, source, adapter, quantize)
    name = f"{export_format.name}-{quantize}" if quantize else export_format.name
    default = source.folder.parent / "exports" / name if source.run else Path("exports") / f"{source.name}-{name}"
    folder = out.expanduser() if out else default
    say(f"exporting {visible(source.folder)} to {visible(folder)}")
    files = tuple(check_with or ())
    with only_data_on_stdout():
        from training.export import export as exporting  # loads torch

        exporting.refuse_existing(folder, overwrite)
        exporting.check_files(files)
        request = exporting.ExportRequest(
            source, export_format, folder, quantize, files, check, max_difference, adapter=adapter, overwrite=overwrite
        )
        outcome = exporting.export(request, say)
    comparisons = [asdict(comparison) for comparison in outcome.result.transcripts] if outcome.result else []
    document = {"folder": str(outcome.folder), "manifest": outcome.manifest, "heard": comparisons}
    return answer(as_json, document, _compared(outcome, export_format))


def _refuse_unfit(export_format: Format, source: ModelSource, adapter: bool, quantize: str) -> None:
    if adapter and (export_format.name != "hf" or not source.adapter):
        why = "goes with --to hf" if export_format.name != "hf" else f"{visible(source.folder)} holds merged weights"
        raise BadInput(f"--adapter: {why}", "train with lora_merge = false to keep adapters apart")
    if adapter and quantize:
        raise BadInput("--adapter: adapters keep their precision", "leave out --quantize")


def _compared(outcome: ExportOutcome, export_format: Format) -> Iterator[str]:
    result = outcome.result
    for comparison in result.transcripts if result else ():
        yield visible(comparison.name)
        yield f"  original: {visible(comparison.original)}"
        yield f"  exported: {visible(comparison.exported)}"
    if result:
        equal_texts = f"the same: {result.identical} of {counted(len(result.transcripts), 'text')}"
        yield f"{equal_texts}; {result.word_difference:.1%} of the words differ"
    else:
        yield f"not checked: {visible(outcome.manifest['check']['reason'])}"
    files = outcome.manifest["files"]
    size = bytes_text(sum(file["bytes"] for file in files))
    yield f"wrote {visible(outcome.folder)}: {counted(len(files), 'file')}, {size}, for {export_format.reader}"
