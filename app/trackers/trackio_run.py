"""trackio: one run of project ``muster`` in its data base on this machine (``trackio show`` draws it)."""

from __future__ import annotations

import os
from pathlib import Path

import trackio

from app.trackers.base import TrackedRun
from app.trackers.scalars import by_name
from training.events import Event

PROJECT = "muster"


class TrackioRun:
    """A run; members' figures carry their names."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._tracked = trackio.init(
            project=self._project,
            name=run.path.name,
            config=run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, event: Event, newest_step: int) -> None:
        step, figures = by_name(event, newest_step, self._run.name)
        if figures:
            self._tracked.log(figures, step=step)

    def flush(self) -> None:
        """Nothing to do: its library writes as it goes."""

    def close(self, status: str) -> str:
        self._tracked.finish()
        return f"trackio show --project {self._project}"
