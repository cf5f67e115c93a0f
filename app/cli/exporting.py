"""What ``export`` does: find the model and the format, have it written, and show what both models heard."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.models import only_data_on_stdout
from app.console import bytes_text, say, show_json, show_line, visible
from profiles.counts import counted
from profiles.errors import BadInput, ExitCode
from training.export.formats import Format, find_format
from training.export.source import ModelSource, find_source

if TYPE_CHECKING:
    from training.export.export import ExportOutcome  # loads torch


@dataclass(frozen=True)
class ExportCommand:
    """The command line."""

    output: Path
    reference: str
    to: str
    out: Path | None = None
    quantize: str = ""
    files: tuple[Path, ...] = ()
    check: bool = True
    bound: float = 0.1
    adapter: bool = False
    overwrite: bool = False
    as_json: bool = False


def export_command(command: ExportCommand) -> ExitCode:
    """Export a model, and tell how what was written compares with the original.

    Raises:
        BadInput: the model or the format cannot be used, or the folder is there already.
        RunFailed: the exported model writes other texts.
    """
    made = find_format(command.to, command.quantize)
    source = find_source(command.output, command.reference)
    _refuse_unfit(command, made, source)
    out = command.out.expanduser() if command.out else _usual_folder(source, made, command.quantize)
    say(f"exporting {visible(source.folder)} to {visible(out)}")
    with only_data_on_stdout():
        outcome = _carry_out(command, made, source, out)
    if command.as_json:
        show_json(_document(outcome))
    else:
        _show(outcome, made)
    return ExitCode.DONE


def _carry_out(command: ExportCommand, made: Format, source: ModelSource, out: Path) -> ExportOutcome:
    from training.export.export import ExportRequest, check_files, export, refuse_existing  # loads torch

    refuse_existing(out, command.overwrite)
    check_files(command.files)
    request = ExportRequest(
        source,
        made,
        out,
        command.quantize,
        command.files,
        command.check,
        command.bound,
        command.adapter,
        command.overwrite,
    )
    return export(request, say)


def _refuse_unfit(command: ExportCommand, made: Format, source: ModelSource) -> None:
    if math.isnan(command.bound):
        raise BadInput("--max-difference nan: not a number", "pass a share of the words, such as 0.1")
    if made.speech_only and source.kind != "whisper":
        message = f"{visible(source.folder)} is a model of type {visible(source.kind)!r}, not whisper"
        raise BadInput(message, "only a Whisper is exported; a language model's folder is a plain hf folder already")
    if command.adapter and (made.name != "hf" or not source.adapter):
        why = "goes with --to hf" if made.name != "hf" else f"{visible(source.folder)} holds merged weights"
        raise BadInput(f"--adapter: {why}", "train with lora_merge = false to keep adapters apart")
    if command.adapter and command.quantize:
        raise BadInput("--adapter: adapters keep their precision", "leave out --quantize")


def _usual_folder(source: ModelSource, made: Format, quantize: str) -> Path:
    """``exports/`` in the run's folder, or in the current one for a model without a run."""
    name = f"{made.name}-{quantize}" if quantize else made.name
    return source.folder.parent / "exports" / name if source.run else Path("exports") / f"{source.name}-{name}"


def _document(outcome: ExportOutcome) -> dict[str, Any]:
    texts = [asdict(one) for one in outcome.result.heard] if outcome.result else []
    return {"folder": str(outcome.folder), "manifest": outcome.manifest, "heard": texts, "exit_code": 0}


def _show(outcome: ExportOutcome, made: Format) -> None:
    result = outcome.result
    for one in result.heard if result else ():
        show_line(f"{visible(one.name)}\n  original: {visible(one.original)}\n  exported: {visible(one.exported)}")
    if result:
        same = f"the same: {result.same} of {counted(len(result.heard), 'text')}"
        show_line(f"{same}; {result.differing:.1%} of the words differ")
    else:
        show_line(f"not checked: {visible(outcome.manifest['check']['reason'])}")
    files = outcome.manifest["files"]
    size = bytes_text(sum(file["bytes"] for file in files))
    show_line(f"wrote {visible(outcome.folder)}: {counted(len(files), 'file')}, {size}, for {made.reader}")
