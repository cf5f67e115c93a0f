"""Data of the Launch step: every machine's progress up to its first training step."""

from __future__ import annotations

from dataclasses import dataclass

from app.wizard.state.records import AssessedRow, ItemStatus


@dataclass(frozen=True)
class LaunchRow(AssessedRow):
    """One machine; ``key`` is its name in the run, ``cells`` its status at each of :attr:`LaunchProgress.steps`."""

    cells: tuple[ItemStatus, ...] = ()
    log: tuple[str, ...] = ()
    """Last lines of its log if it failed."""
    phase: str = ""
    """What it prepares, with its progress; empty: nothing that takes long."""


@dataclass(frozen=True)
class LaunchProgress:
    steps: tuple[str, ...] = ()
    rows: tuple[LaunchRow, ...] = ()
    run: str = ""
    """The run folder, once it exists: attach to it."""
