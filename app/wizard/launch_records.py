"""What the last step of the set-up shows: every machine on its way to the first step of training."""

from __future__ import annotations

from dataclasses import dataclass

from app.wizard.records import AssessedRow, ItemStatus


@dataclass(frozen=True)
class LaunchRow(AssessedRow):
    """One machine; ``key`` is its name in the run. One status a column of :attr:`LaunchProgress.steps`."""

    cells: tuple[ItemStatus, ...] = ()
    log: tuple[str, ...] = ()
    """The last lines of what went wrong there."""


@dataclass(frozen=True)
class LaunchProgress:
    steps: tuple[str, ...] = ()
    rows: tuple[LaunchRow, ...] = ()
    run: str = ""
    """The run's folder, as soon as there is one: attach to it."""
