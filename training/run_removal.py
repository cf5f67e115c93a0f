"""The one place that removes run folders. One that holds a snapshot goes only when a person asked for that."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from training.event_log import read_events
from training.events import SnapshotEvent


def has_snapshots(folder: Path) -> bool:
    """Whether a run has snapshots: here, or on the machines that its events tell of."""
    if any(folder.glob("checkpoints/*/step-*")):
        return True
    return any(isinstance(event, SnapshotEvent) for event in read_events(folder / "events.jsonl"))


def remove_unused(folder: Path) -> bool:
    """Remove the folder of a run that never began; return whether it is gone. One with snapshots stays."""
    with contextlib.suppress(OSError):  # what is in doubt, or cannot be removed, stays
        if not has_snapshots(folder):
            shutil.rmtree(folder)
    return not folder.exists()


def remove_run_folder(folder: Path) -> None:
    """Remove a run with its snapshots, as a person asked.

    Raises:
        OSError: some of it cannot be removed.
    """
    shutil.rmtree(folder)
