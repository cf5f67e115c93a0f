"""Scripted runs in real run folders.

``write_demo_run`` leaves a finished one at once. ``start_demo_run`` starts one that goes on by itself, in a process of
its own that holds the folder, and obeys what is asked through ``requests/``::

    .venv/bin/python -m app.demo.run RUN_FOLDER --seed 0 --speed 1
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from app.demo.job import STRATEGY_REASON, run_id
from app.demo.machines import scripted_machines
from app.demo.player import play
from app.demo.run_plan import demo_plan
from app.demo.script import script_of
from app.demo.stage import Stage, utc_text
from app.holder import start_holder
from distributed.planning.document import Planning
from distributed.planning.words import why_in_words
from distributed.run.prediction import keep_planning, prediction_metrics
from distributed.run.requests import leave_request
from training.events import RunEvent
from training.plan import RunPlan
from training.run_folder import RunFolder

DEMO_START = 1_767_258_000.0
"""2026-01-01 09:00 UTC: when a finished demo run pretends to have started."""


def write_demo_run(
    folder: Path, machines: int = 3, seed: int = 0, start: float = DEMO_START, until: float | None = None
) -> Path:
    """Write a whole finished run into the output folder ``folder``, and return its own folder.

    Args:
        machines: how many scripted machines take part.
        seed: of all chances; the same seed and start give the same events.
        start: when the run pretends to have started, in seconds since the epoch.
        until: seconds after the start at which the run is left as it is, in the middle; ``None``: it is finished.

    Raises:
        BadInput: too many machines, the run is there already, or the folder cannot be written.
    """
    plan, planning = demo_plan(scripted_machines(machines), run_id(seed, start))
    script = script_of(plan, seed)
    run = _create(folder, plan, planning, ["cli_typer.py", "demo-run", "--machines", str(machines)])
    with run, Stage(run, start, 1.0) as stage:
        for beat in script.beats:
            if until is not None and beat.at > until:
                return run.path
            stage.write(beat)
        stage.say(RunEvent(status="completed"), stage.due(script.ends))
        run.finish("completed", {**script.metrics, **prediction_metrics(run)})
        run.update_metadata(start_time=utc_text(start), end_time=utc_text(stage.due(script.ends)))
    return run.path


def start_demo_run(
    output_dir: Path,
    plan: RunPlan,
    planning: Planning,
    command: Sequence[str],
    seed: int = 0,
    speed: float = 1.0,
) -> Path:
    """Start a scripted run with this plan; it outlives this process and its terminal. Return its folder.

    Raises:
        BadInput: the folder cannot be made.
        RunFailed: the run's process did not start.
    """
    run = _create(output_dir, plan, planning, command)
    run.close()
    start_holder("app.demo.run", run.path, "--seed", str(seed), "--speed", str(speed))
    return run.path


def _create(output_dir: Path, plan: RunPlan, planning: Planning, command: Sequence[str]) -> RunFolder:
    reason = f"{STRATEGY_REASON}: {why_in_words(planning)}"
    run = RunFolder.create(output_dir, plan, list(command), run_type="distributed", strategy_reason=reason)
    keep_planning(run.path, planning, None)  # without figures: nothing is learnt about machines that do not exist
    return run


def main() -> int:
    """Play the run of the command line to its end."""
    parser = argparse.ArgumentParser(prog="python -m app.demo.run", description="Play a scripted run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: leave_request(arguments.folder, "stop"))
    with RunFolder.take_over(arguments.folder) as run:
        play(run, script_of(run.plan(), arguments.seed), arguments.speed)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
