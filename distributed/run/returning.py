"""A run that its members carry on without its supervisor, and how this machine takes it up again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from distributed.hosts.file import RUN_HOSTS
from training.records.run_folder import RunFolder
from training.run.processes import BackgroundProcess

CUT_OFF = 900.0
"""Seconds for which a supervisor that cannot reach most members waits for them."""


class CutOff:
    """Whether most members that train cannot be reached: they may go on by themselves, and are not given up.

    Args:
        warn: tells the user something.
        leave: called when that has lasted for :data:`CUT_OFF`; it does not return.
        clock: in seconds.
    """

    def __init__(
        self, warn: Callable[[str], object], leave: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._warn, self._leave, self._clock = warn, leave, clock
        self._lock = threading.Lock()
        self._since: float | None = None

    def judge(self, reached: int, members: int) -> bool:
        """Return whether most of the ``members`` cannot be reached."""
        with self._lock:
            if 2 * reached >= members:
                self._since = None
                return False
            if self._since is None:
                self._since = self._clock()
                self._warn(
                    f"{members - reached} of {members} members cannot be reached, and may train on without this "
                    f"computer; it looks for them for {CUT_OFF / 60:.0f} minutes"
                )
            if self._clock() - self._since >= CUT_OFF:
                self._leave()
        return True


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
