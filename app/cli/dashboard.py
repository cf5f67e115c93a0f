"""A run in the live dashboard, on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from app.console import command_about, say
from profiles.errors import BadInput, ExitCode


def fits_here() -> bool:
    """Whether this is a terminal that can show the dashboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "", None)


def ascii_lines() -> Callable[[str], None]:
    """Return what writes lines of nothing but ASCII to stderr."""
    from app.shell.look import ascii_text  # loads textual

    return lambda line: say(ascii_text(line))


def dashboard_command(path: Path, ascii_only: bool) -> ExitCode:
    """Show a run in the dashboard; the exit code is the run's where it has ended, else 0."""
    from app.dashboard.app import run_dashboard  # loads textual

    code = ExitCode(run_dashboard(path, ascii_only))
    tell_of_run(path)
    return code


def goes_on(path: Path) -> str:
    """Return what is said to who watches a run no more."""
    return f"detached; the run goes on: {command_about(path, 'attach')}, {command_about(path, 'stop')}"


def tell_of_run(path: Path) -> None:
    """Say, where the screen was, whether the run goes on and what can be typed next."""
    from app.cli.train import tell
    from app.follow import Follower
    from app.run_state import reduce_events
    from training.event_log import read_events
    from training.run_files import is_live

    if is_live(path):
        say(goes_on(path))
        return
    try:
        tell(Follower(path).ended(reduce_events(read_events(path / "events.jsonl"))), False)
    except BadInput as error:
        say(f"{error.message}; {error.hint}" if error.hint else error.message)
