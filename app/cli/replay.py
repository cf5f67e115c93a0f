"""``replay`` and ``demo-run``: a recorded run, as it was seen while it went on."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.arguments import OUTPUT, Ascii, Detach, Json, Output, RunReference
from app.console import command_about, say, visible
from profiles.errors import ExitCode

if TYPE_CHECKING:
    from app.follow import Replay


def replay(
    run: RunReference,
    speed: Annotated[
        float, typer.Option("--speed", metavar="X", min=0.01, max=100_000, help="Playback speed; 2: twice as fast.")
    ] = 1.0,
    ascii_only: Ascii = False,
    output: Output = OUTPUT,
) -> ExitCode:
    """Play a finished run once more, in its own time or faster."""
    from app.cli.attach import fits_here
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
    from app.cli.attach import ascii_lines
    from app.progress import PlainProgress
    from app.report import evaluation_lines, title_of
    from app.run_state import RunState

    write = ascii_lines() if ascii_only else say
    events = source.events()
    first = next(events, None)  # sets the clock of the run to its first event
    with PlainProgress(f"replay of {title_of(source.plan)}", RunState(), write, source.now) as progress:
        for event in itertools.chain([first], events):
            if event is not None:
                progress(event)
    ended = source.ended(progress.state)
    write(visible(f"the run {ended.status}: {ended.message}" if ended.message else f"the run {ended.status}"))
    for line in evaluation_lines(ended.state):
        write(line)
    return ExitCode.DONE


def demo_run(
    machines: Annotated[int, typer.Option("--machines", metavar="N", help="Number of machines, 1 to 8.")] = 3,
    speed: Annotated[float, typer.Option("--speed", min=0.1, max=1000, help="Playback speed; 2: twice as fast.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="0: the recorded times; else they vary by up to 5 %.")] = 0,
    at_once: Annotated[bool, typer.Option("--at-once", help="Write the finished run and show nothing.")] = False,
    detach: Detach = False,
    ascii_only: Ascii = False,
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Write a recorded run into a run folder of its own, at once or in its own time, and show it."""
    from app.cli.attach import attach
    from app.cli.terminal import answer
    from app.demo.finished import recommended, write_demo_run
    from app.demo.run import start_demo_run

    if at_once:
        path = write_demo_run(output, machines, seed, time.time())
    else:
        path = start_demo_run(output, recommended(machines), sys.argv, seed, speed)
    if not (at_once or detach):
        return attach(path.name[:20], ascii_only=ascii_only, output=output, as_json=as_json)
    if not as_json:
        say("demo: no machine trains; this is a recorded run")
    if not (as_json or at_once):
        say(f"watch it with: {command_about(path, 'attach')}")
    return answer(as_json, {"run_dir": str(path), "run_id": path.name[:20]}, [str(path)])
