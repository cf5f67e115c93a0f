"""``export``: conversion of a trained model for other programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import OUTPUT, Json, Output
from app.cli.terminal import answer, only_data_on_stdout
from app.console import say, visible
from profiles.errors import BadInput, ExitCode, counted
from profiles.quantities import bytes_text, share_text

if TYPE_CHECKING:
    from speech.export.export import ExportOutcome
    from speech.export.formats import Format, ModelSource


def export(
    to: Annotated[str, typer.Option(metavar="FORMAT", help="hf, ctranslate2, gguf, onnx or coreml.")] = "",
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, run id or profile; default: the newest run's.")
    ] = "",
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
    from speech.export.formats import find_format, find_source

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
        from speech.export import export as exporting  # loads torch

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
        yield f"{equal_texts}; {share_text(result.word_difference)} of the words differ"
    else:
        yield f"not checked: {visible(outcome.manifest['check']['reason'])}"
    files = outcome.manifest["files"]
    size = bytes_text(sum(file["bytes"] for file in files))
    yield f"wrote {visible(outcome.folder)}: {counted(len(files), 'file')}, {size}, for {export_format.reader}"
