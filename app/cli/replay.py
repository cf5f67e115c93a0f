"""``replay RUN``: a finished run once more, as it was seen while it went on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import RunReference
from profiles.errors import ExitCode

if TYPE_CHECKING:
    from app.follow import Replay


def replay(
    run: RunReference,
    speed: Annotated[
        float, typer.Option("--speed", metavar="X", min=0.01, max=100_000, help="Playback speed; 2: twice as fast.")
    ] = 1.0,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")] = False,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder that holds the runs.")] = Path(
        "output"
    ),
) -> ExitCode:
    """Replay a finished run, in its own time or faster."""
    from app.cli.dashboard import fits_here
    from app.follow import Replay
    from training.runs import find_run

    source = Replay(find_run(output, run), speed)
    if not fits_here():
        return _plainly(source, ascii_only)
    from app.dashboard.app import run_dashboard  # loads textual, which a pipe does not need

    run_dashboard(source.path, ascii_only, source=source)
    return ExitCode.DONE


def _plainly(source: Replay, ascii_only: bool) -> ExitCode:
    """Write the lines of the run's progress with the times of the run."""
    from app.cli.dashboard import ascii_lines
    from app.cli.train import title_of
    from app.console import say as say_line
    from app.console import visible
    from app.progress import PlainProgress
    from app.report import evaluation_lines
    from app.run_state import RunState

    say = ascii_lines() if ascii_only else say_line
    events = source.events()
    first = next(events, None)  # sets the clock of the run to its first event
    with PlainProgress(f"replay of {title_of(source.plan)}", RunState(), say, source.now) as progress:
        for event in itertools.chain([first], events):
            if event is not None:
                progress(event)
    ended = source.ended(progress.state)
    say(visible(f"the run {ended.status}: {ended.message}" if ended.message else f"the run {ended.status}"))
    for line in evaluation_lines(ended.state):
        say(line)
    return ExitCode.DONE
