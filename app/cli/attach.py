"""``attach`` and ``logs``: a run that goes on, watched from any terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from app.cli.arguments import OUTPUT, Ascii, Json, Output, RunReference
from app.cli.terminal import heard_by
from app.console import command_about, say, say_error, show_json, show_line, visible
from app.follow import Follower
from app.progress import progress_for
from app.report import Ended, completed_lines, document, failure_hint, stopped_line, title_of
from app.run_state import reduce_events
from distributed.run.requests import Action, leave_request
from profiles.errors import BadInput, ExitCode
from training.event_log import follow_lines, read_events
from training.run_files import is_live
from training.runs import find_run

STOPPING = {"stop": "stopping after the step under way, with a snapshot", "kill": "ending at once, without a snapshot"}
_ACTIONS: dict[str, Action] = {"s": "stop", "k": "kill"}


# --------------------------------------------------------------------------------------------------------------- attach


def attach(
    run: RunReference,
    plain: Annotated[bool, typer.Option("--plain", help="Print progress instead of the dashboard.")] = False,
    ascii_only: Ascii = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Show a run from its beginning until it ends: in the dashboard where it fits, else line by line.

    Raises:
        BadInput: no such run.
    """
    path = find_run(output, run)
    if fits_here() and not plain and not as_json:
        return show_dashboard(path, ascii_only)
    return show_run(path, as_json, ascii_only)


def fits_here() -> bool:
    """Whether this is a terminal that can show the dashboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "", None)


def ascii_lines() -> Callable[[str], None]:
    """Return what writes lines of nothing but ASCII to stderr."""
    from app.shell.look import ascii_text  # loads textual

    return lambda line: say(ascii_text(line))


def show_dashboard(path: Path, ascii_only: bool = False) -> ExitCode:
    """Show a run in the dashboard; the exit code is the run's where it has ended, else 0."""
    from app.dashboard.app import run_dashboard  # loads textual

    code = ExitCode(run_dashboard(path, ascii_only))
    tell_of_run(path)
    return code


def tell_of_run(path: Path) -> None:
    """Say, where the screen was, whether the run goes on and what can be typed next."""
    if is_live(path):
        say(_goes_on(path))
        return
    try:
        tell(Follower(path).ended(reduce_events(read_events(path / "events.jsonl"))), False)
    except BadInput as error:
        say(f"{error.message}; {error.hint}" if error.hint else error.message)


def tell(ended: Ended, as_json: bool) -> None:
    """Write how a run ended: the document on stdout, or lines for a person."""
    if as_json:
        show_json(document(ended))
    elif ended.status == "completed":
        for line in completed_lines(ended):
            show_line(line)
    if ended.status == "cancelled":
        say(stopped_line(ended))
    elif ended.status == "failed" and not as_json:
        say_error(ended.message, failure_hint(ended))


def _goes_on(path: Path) -> str:
    return f"detached; the run goes on: {command_about(path, 'attach')}, {command_about(path, 'stop')}"


def show_run(path: Path, as_json: bool, ascii_only: bool = False) -> ExitCode:
    """Show a run until it ends or the person goes; the exit code is the run's."""
    follower = Follower(path)
    write = ascii_lines() if ascii_only else None
    progress = progress_for(title_of(follower.plan), write=write)
    events = follower.events()
    asked: list[int] = []
    with heard_by(lambda number, frame: asked.append(number)):
        while True:
            with progress:
                for event in events:
                    if event is not None:
                        progress(event)
                    if asked:
                        break
                else:
                    break
            number = asked.pop()
            asked.clear()
            if _leave(path, number):
                return ExitCode.DONE
            progress = progress_for(title_of(follower.plan), progress.state, write)
    ended: Ended = follower.ended(progress.state)
    tell(ended, as_json)
    return ended.exit_code


def _leave(path: Path, number: int) -> bool:
    """Ask what Ctrl-C means; return whether to stop watching. Without a person to ask: watch no more, run on."""
    choice = _asked() if number == signal.SIGINT and sys.stdin.isatty() else "d"
    if (action := _ACTIONS.get(choice)) is not None:
        leave_request(path, action)
        say(STOPPING[action])
        return False
    say(_goes_on(path))
    return True


def _asked() -> str:
    say("\n[d]etach: the run goes on (default), [s]top with a snapshot, or [k]ill? ")
    with contextlib.suppress(OSError, InterruptedError):
        return sys.stdin.readline().strip().lower()[:1]
    return "d"


# ----------------------------------------------------------------------------------------------------------------- logs


def logs(
    run: RunReference,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    output: Output = OUTPUT,
) -> ExitCode:
    """Write the logs of a run's processes to stdout, each line with its machine.

    Raises:
        BadInput: no such run.
    """
    path = find_run(output, run)
    readers: dict[Path, Iterator[bytes]] = {}

    def goes_on() -> bool:
        return follow and is_live(path)

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            last_round = not goes_on()
            for log in sorted((path / "logs").glob("*.log")):
                readers.setdefault(log, follow_lines(log, goes_on))
                _show_new(log.stem, readers[log], last_round)
            if last_round:
                return ExitCode.DONE
            time.sleep(0.2)
    return ExitCode.DONE


def _show_new(machine: str, lines: Iterator[bytes], to_the_end: bool) -> None:
    for line in lines:
        if line:
            show_line(f"{machine}: {visible(line.decode(errors='replace').rstrip())}")
        elif not to_the_end:
            return
