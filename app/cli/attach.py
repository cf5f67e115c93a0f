"""``attach``: watch a run that goes on in the background."""

from __future__ import annotations

from pathlib import Path

from app.cli.dashboard import dashboard_command, fits_here
from profiles.errors import ExitCode
from training.runs import find_run


def watch(output: Path, run: str, plain: bool = False, ascii_only: bool = False, as_json: bool = False) -> ExitCode:
    """Carry out ``attach``: the dashboard where it fits, else one line after the other.

    Raises:
        BadInput: no such run.
    """
    if fits_here() and not plain and not as_json:
        return dashboard_command(find_run(output, run), ascii_only)
    from app.cli.distributed import attach_command

    return attach_command(output, run, as_json, ascii_only)
