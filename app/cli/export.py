"""``export``: a finished model for other programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import OUTPUT, Json, ModelReference, Output
from app.cli.terminal import answer, only_data_on_stdout
from app.console import bytes_text, say, visible
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from training.export.export import ExportOutcome
    from training.export.formats import Format
    from training.export.source import ModelSource


def export(
    model: ModelReference,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, ctranslate2, gguf, onnx or coreml.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="New folder; empty: exports/ beside the model.")
    ] = None,
    quantize: Annotated[
        str, typer.Option("--quantize", metavar="PRECISION", help="Precision: float16, int8, q5_0 ...")
    ] = "",
    check_with: Annotated[
        list[Path] | None,
        typer.Option("--check-with", metavar="FILE", help="Recording to compare with; may be repeated."),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare with the original.")] = True,
    max_difference: Annotated[
        float, typer.Option("--max-difference", metavar="SHARE", min=0, max=10, help="Share of words that may differ.")
    ] = 0.1,
    adapter: Annotated[bool, typer.Option("--adapter", help="With --to hf: the adapters, not merged.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Export a model, and tell how what was written compares with the original.

    Raises:
        BadInput: the model or the format cannot be used, or the folder is there already.
        RunFailed: the exported model writes other texts.
    """
    from training.export.formats import find_format
    from training.export.source import find_source

    made = find_format(to, quantize)
    source = find_source(output, model)
    if math.isnan(max_difference):
        raise BadInput("--max-difference nan: not a number", "pass a share of the words, such as 0.1")
    _refuse_unfit(made, source, adapter, quantize)
    folder = out.expanduser() if out else _usual_folder(source, made, quantize)
    say(f"exporting {visible(source.folder)} to {visible(folder)}")
    files = tuple(check_with or ())
    with only_data_on_stdout():
        from training.export import export as exporting  # loads torch

        exporting.refuse_existing(folder, overwrite)
        exporting.check_files(files)
        outcome = exporting.export(
            exporting.ExportRequest(
                source, made, folder, quantize, files, check, max_difference, adapter=adapter, overwrite=overwrite
            ),
            say,
        )
    heard = [asdict(one) for one in outcome.result.heard] if outcome.result else []
    document = {"folder": str(outcome.folder), "manifest": outcome.manifest, "heard": heard}
    return answer(as_json, document, _lines(outcome, made))


def _refuse_unfit(made: Format, source: ModelSource, adapter: bool, quantize: str) -> None:
    if made.speech_only and source.kind != "whisper":
        message = f"{visible(source.folder)} is a model of type {visible(source.kind)!r}, not whisper"
        raise BadInput(message, "only a Whisper is exported; a language model's folder is a plain hf folder already")
    if adapter and (made.name != "hf" or not source.adapter):
        why = "goes with --to hf" if made.name != "hf" else f"{visible(source.folder)} holds merged weights"
        raise BadInput(f"--adapter: {why}", "train with lora_merge = false to keep adapters apart")
    if adapter and quantize:
        raise BadInput("--adapter: adapters keep their precision", "leave out --quantize")


def _usual_folder(source: ModelSource, made: Format, quantize: str) -> Path:
    """``exports/`` in the run's folder, or in the current one for a model without a run."""
    name = f"{made.name}-{quantize}" if quantize else made.name
    return source.folder.parent / "exports" / name if source.run else Path("exports") / f"{source.name}-{name}"


def _lines(outcome: ExportOutcome, made: Format) -> Iterator[str]:
    result = outcome.result
    for one in result.heard if result else ():
        yield f"{visible(one.name)}\n  original: {visible(one.original)}\n  exported: {visible(one.exported)}"
    if result:
        same = f"the same: {result.same} of {counted(len(result.heard), 'text')}"
        yield f"{same}; {result.differing:.1%} of the words differ"
    else:
        yield f"not checked: {visible(outcome.manifest['check']['reason'])}"
    files = outcome.manifest["files"]
    size = bytes_text(sum(file["bytes"] for file in files))
    yield f"wrote {visible(outcome.folder)}: {counted(len(files), 'file')}, {size}, for {made.reader}"
