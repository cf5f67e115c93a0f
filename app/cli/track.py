"""``track RUN --to csv,tensorboard``: the events of a run for other programs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import RunReference
from profiles.errors import BadInput, ExitCode


def track(
    run: RunReference,
    to: Annotated[str, typer.Option("--to", metavar="NAMES", help="csv, tensorboard, wandb, trackio; by comma.")],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder that holds the runs.")] = Path(
        "output"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> ExitCode:
    """Send the events of a run to CSV, TensorBoard, Weights & Biases or trackio; follows a live run."""
    from app.console import say, show_json, show_line, visible
    from app.trackers.tracking import Tracking, checked_trackers
    from training.runs import find_run

    folder = find_run(output, run)
    names = checked_trackers(to)
    if not names:
        raise BadInput("--to names no tracker", "write for example --to csv,tensorboard")
    with contextlib.redirect_stdout(sys.stderr):  # libraries talk, and stdout is for data
        tracking = Tracking(folder, names, say)
        tracking.follow()
    if as_json:
        show_json({"run_dir": str(folder), "trackers": tracking.places, "exit_code": 0})
    else:
        for name, place in tracking.places.items():
            show_line(visible(f"{name}: {place}"))
    return ExitCode.DONE if len(tracking.places) == len(names) else ExitCode.RUN_FAILED
