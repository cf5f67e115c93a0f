"""The run that the tour recommends, planned, and written whole into a run folder."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from app.demo.player import Player, recorded
from app.demo.run import create, pace_of
from app.demo.services import DemoServices
from distributed.run.planning import Planned

DEMO_START = 1_767_258_000.0
"""2026-01-01 09:00 UTC: when a finished demo run pretends to have started."""
_AT_ONCE = 1e9


def recommended(machines: int) -> Planned:
    """Return the run that the set-up recommends for so many machines of the tour.

    Raises:
        BadInput: there are not so many.
    """
    return DemoServices(machines, _AT_ONCE, open_doors=True).recommended()


def write_demo_run(
    folder: Path, machines: int = 3, seed: int = 0, start: float = DEMO_START, until: float | None = None
) -> Path:
    """Write a whole finished run into the output folder ``folder``, and return its own folder.

    Args:
        machines: how many machines take part.
        seed: see :func:`pace_of`; the same seed and start give the same events.
        start: when the run pretends to have started, in seconds since the epoch.
        until: seconds after the start at which the run is left as it is, in the middle; ``None``: it is finished.

    Raises:
        BadInput: too many machines, the run is there already, or the folder cannot be written.
    """
    planned = recommended(machines)
    identifier = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(start))}-{seed & 0xFFFF:04x}"
    plan = planned.plan.model_copy(update={"run_id": identifier})
    command = ["cli_typer.py", "demo-run", "--machines", str(machines)]
    with create(folder, replace(planned, plan=plan), command) as run:
        Player(run, recorded(plan), start, pace_of(seed)).write(until)
        return run.path
