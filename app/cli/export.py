"""``export``: a finished model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Json, ModelReference, Output
from profiles.errors import ExitCode


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
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Convert a trained model for other programs, and check that it hears the same."""
    from app.cli.exporting import ExportCommand, export_command

    command = ExportCommand(
        output, model, to, out, quantize, tuple(check_with or ()), check, max_difference, adapter, overwrite, as_json
    )
    return export_command(command)
