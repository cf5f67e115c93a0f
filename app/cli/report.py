"""``report RUN``: one HTML file that holds everything about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import RunReference
from profiles.errors import ExitCode


def report(
    run: RunReference,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; default: report.html of the run.")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder that holds the runs.")] = Path(
        "output"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> ExitCode:
    """Write a report of a run: one HTML file with its charts, machines, traffic and result."""
    from app.console import say, show_json, show_line, visible
    from app.html_report.page import show_report, write_report
    from training.runs import find_run

    folder = find_run(output, run)
    path = write_report(folder, out)
    if opens:
        say(visible(show_report(path)))
    if as_json:
        show_json({"run_dir": str(folder), "report": str(path), "bytes": path.stat().st_size, "exit_code": 0})
    else:
        show_line(visible(path))
    return ExitCode.DONE
