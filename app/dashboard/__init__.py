"""The live dashboard: a reader of the run folder that never disturbs the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from app.event_source import EventSource


def run_dashboard(run_dir: Path, ascii_only: bool = False, *, source: EventSource | None = None) -> int:
    """See :func:`app.dashboard.app.run_dashboard`."""
    from app.dashboard.app import run_dashboard as run  # loads textual, which nobody else needs

    return run(run_dir, ascii_only, source=source)
