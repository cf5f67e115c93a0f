"""A run in the live dashboard, on a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from app.console import command_line, say
from profiles.errors import BadInput, ExitCode


def fits_here() -> bool:
    """Whether this is a terminal that can show the dashboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "", None)


def dashboard_command(path: Path, ascii_only: bool) -> ExitCode:
    """Show a run in the dashboard; the exit code is the run's where it has ended, else 0."""
    from app.dashboard import run_dashboard  # loads textual

    code = ExitCode(run_dashboard(path, ascii_only))
    tell_of_run(path)
    return code


def tell_of_run(path: Path) -> None:
    """Say, where the screen was, whether the run goes on and what can be typed next."""
    from app.cli.train import tell
    from app.follow import Follower
    from app.run_state import reduce_events
    from training.event_log import read_events
    from training.run_files import is_live

    where = [] if path.parent.resolve() == Path("output").resolve() else ["--output", str(path.parent)]
    run_id = path.name[:20]
    if is_live(path):
        attach, stop = command_line("attach", run_id, *where), command_line("stop", run_id, *where)
        say(f"detached; the run goes on: {attach}, {stop}")
        return
    try:
        tell(Follower(path).ended(reduce_events(read_events(path / "events.jsonl"))), False)
    except BadInput as error:
        say(f"{error.message}; {error.hint}" if error.hint else error.message)
