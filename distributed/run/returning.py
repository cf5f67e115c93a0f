"""How this machine takes up again a run that its members carry on, or have ended, without its supervisor."""

from __future__ import annotations

from pathlib import Path

from distributed.hosts.file import RUN_HOSTS
from training.records.run_folder import RunFolder
from training.run.processes import BackgroundProcess


def take_up(path: Path) -> bool:
    """Start a supervisor for a run that its members may carry on or have ended by themselves; return whether it is
    one. The supervisor gets the events since then, follows the coordinator that the members have elected, and fetches
    the model at the end.

    Raises:
        BadInput: there is no run, or it is damaged.
        RunFailed: the supervisor does not start.
    """
    folder = RunFolder.open(path)
    trains = folder.metadata.status in ("running", "paused") and (path / RUN_HOSTS).is_file()
    if folder.live or not trains or not (path / "secrets" / "coordinator").is_dir() or not folder.plan().elects:
        return False
    BackgroundProcess("distributed.supervisor").start(path)
    return True
