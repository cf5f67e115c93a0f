"""The Home screen of scripted machines: scripted runs only."""

from __future__ import annotations

from collections.abc import Sequence

from app.demo.job import PROFILE
from app.wizard.machine_rows import status_of_run
from app.wizard.state import RunRow
from training.runs import RunSummary

MOST = 6


def run_rows(runs: Sequence[RunSummary]) -> tuple[RunRow, ...]:
    """Return the newest scripted runs, live ones first."""
    scripted = [run for run in runs if run.metadata is not None and run.metadata.profile == PROFILE]
    newest = sorted(scripted, key=lambda run: not run.live)[:MOST]
    return tuple(
        RunRow(
            run.run_id,
            PROFILE,
            status_of_run(run.status, run.live),
            words=run.status,
            path=str(run.path),
            started=run.metadata.start_time if run.metadata else "",
            live=run.live,
        )
        for run in newest
    )
