"""``demo-run``: a recorded run, to look at without machines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from profiles.errors import ExitCode


def demo_run(
    machines: Annotated[int, typer.Option("--machines", metavar="N", help="Number of machines, 1 to 8.")] = 3,
    speed: Annotated[float, typer.Option("--speed", min=0.1, max=1000, help="Playback speed; 2: twice as fast.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="0: the recorded times; else they vary by up to 5 %.")] = 0,
    at_once: Annotated[bool, typer.Option("--at-once", help="Write the finished run and show nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")] = False,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Folder that holds the runs.")] = Path(
        "output"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
    ] = False,
) -> ExitCode:
    """Show a recorded run under the names of invented machines: no machine trains, nothing is asked."""
    from app.console import command_about, say, show_json, show_line
    from app.demo.finished import recommended, write_demo_run
    from app.demo.run import start_demo_run

    if at_once:
        path = write_demo_run(output, machines, seed, time.time())
    else:
        path = start_demo_run(output, recommended(machines), sys.argv, seed, speed)
    if not (at_once or detach):
        from app.cli.attach import watch

        return watch(output, path.name[:20], ascii_only=ascii_only, as_json=as_json)
    if as_json:
        show_json({"run_dir": str(path), "run_id": path.name[:20], "exit_code": int(ExitCode.DONE)})
        return ExitCode.DONE
    say("demo: no machine trains; this is a recorded run")
    if not at_once:
        say(f"watch it with: {command_about(path, 'attach')}")
    show_line(str(path))
    return ExitCode.DONE
