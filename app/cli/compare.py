"""``compare``: whether one model is better than another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import Json, Output
from profiles.errors import BadInput, ExitCode

Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed of the interval.")]


def compare(
    references: Annotated[
        list[str], typer.Argument(metavar="A [B]", help="predictions.csv or run; one run: before and after.")
    ],
    seed: Seed = 0,
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Show whether B hears better than A, with a 95 % interval; no model runs."""
    from app.cli.comparing import compare_command

    if len(references) > 2:
        raise BadInput(f"{len(references)} cannot be compared", "name one run, or A and B")
    return compare_command(output, references, seed, as_json)
