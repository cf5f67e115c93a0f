"""Weights & Biases: one run of project ``muster``, online where this machine is logged in, else in offline files."""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from app.trackers.base import TrackedRun
from app.trackers.scalars import by_name
from training.events import Event

PROJECT = "muster"


class WandbRun:
    """A run whose figures are drawn over the step of training; members' figures carry their names."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        os.environ.setdefault("WANDB_SILENT", "true")
        mode = None if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False) else "offline"
        self._tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.metadata.run_id,
            name=run.path.name,
            dir=str(folder),
            config=run.settings,
            resume="allow",
            mode=mode,
            settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off"),
        )
        self._tracked.define_metric("*", step_metric="step")

    def log(self, event: Event, newest_step: int) -> None:
        step, figures = by_name(event, newest_step, self._run.name)
        if figures:
            self._tracked.log({"step": step, **figures})

    def flush(self) -> None:
        """Nothing to do: its library writes as it goes."""

    def close(self, status: str) -> str:
        self._tracked.finish(exit_code=0 if status == "completed" else 1)
        return str(self._tracked.url or f"{self._folder} (wandb sync {self._folder}/wandb/offline-run-*)")
