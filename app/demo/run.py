"""The recorded run as one that goes on: in a process of its own that holds the run folder and obeys requests::

.venv/bin/python -m app.demo.run RUN_FOLDER --seed 0 --speed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.demo import PROFILE
from app.demo.player import Player, recorded
from distributed.planning.feedback import keep_planning
from distributed.planning.reasons import why_in_words
from distributed.run.requests import leave_request
from training.processes import BackgroundProcess, told_run
from training.run_folder import RunFolder

if TYPE_CHECKING:
    from distributed.launcher import Planned


def start_demo_run(
    output_dir: Path, planned: Planned, command: Sequence[str], seed: int = 0, speed: float = 1.0
) -> Path:
    """Start the recorded run with this plan; it outlives this process and its terminal. Return its folder.

    Raises:
        BadInput: the folder cannot be made.
        RunFailed: the run's process did not start.
    """
    run = create(output_dir, planned, command)
    run.close()
    BackgroundProcess("app.demo.run", "--seed", str(seed), "--speed", str(speed)).start(run.path)
    return run.path


def pace_of(seed: int) -> float:
    """Return how fast the record is played: as it was for 0, up to 5 % slower or faster for another seed."""
    return random.Random(seed).uniform(0.95, 1.05) if seed else 1.0


def create(output_dir: Path, planned: Planned, command: Sequence[str]) -> RunFolder:
    """Make the folder of a run of the tour, and hold it.

    Raises:
        BadInput: the folder cannot be made.
    """
    profile = planned.plan.profile.model_copy(update={"name": PROFILE})
    plan = planned.plan.model_copy(update={"profile": profile})
    reason = "scripted" if planned.planning is None else f"scripted: {why_in_words(planned.planning)}"
    run = RunFolder.create(output_dir, plan, list(command), run_type="distributed", strategy_reason=reason)
    if planned.planning is not None:
        keep_planning(run.path, planned.planning, None)  # without figures: nothing is learnt of machines that are not
    return run


def main() -> int:
    """Play the run that this process is told to its end."""
    parser = argparse.ArgumentParser(prog="python -m app.demo.run", description="Play the recorded run.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0)
    arguments = parser.parse_args()
    path = told_run()
    if path is None:
        return os.EX_OK
    signal.signal(signal.SIGTERM, lambda *_: leave_request(path, "stop"))
    with RunFolder.take_over(path) as run:
        Player(run, recorded(run.plan()), time.time(), pace_of(arguments.seed) * arguments.speed).play()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
