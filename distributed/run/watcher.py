"""Watches the supervisor of a run, and starts another one in its place when it is killed.

    python -m distributed.run.watcher RUN_FOLDER LOCK

The standard input closes with the supervisor, whatever ends it. This process has inherited its lock of the run folder
(descriptor ``LOCK``), so nobody takes the run for dead meanwhile; the next supervisor inherits it from here. Standard
library only: it costs some 10 MB of memory and no time.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.records.lease import LOCK_NAME

_MOST_DEATHS, _SETTLED = 10, 60.0
"""Supervisors that may be killed one after the other, each so many seconds after its start at most."""


def watch_this_process(folder: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the watcher of this supervisor and return it; its standard input must stay open.

    Args:
        lock: descriptor of this process's lock of the run folder.
    """
    words = [sys.executable, "-m", __name__, str(folder), str(lock)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[lock], start_new_session=True)


def _is_held(folder: Path) -> bool:
    """Whether a supervisor has ended without releasing the run."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the run was removed
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def main() -> None:
    """Wait for the end of the supervisor, and of those that take its place."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder, lock, deaths = Path(sys.argv[1]), int(sys.argv[2]), 0
    words = [sys.executable, "-m", "distributed.supervisor", str(folder), str(lock)]
    begun = time.monotonic()
    os.read(0, 1)
    while _is_held(folder):
        deaths = deaths + 1 if time.monotonic() - begun < _SETTLED else 1
        if deaths > _MOST_DEATHS:
            return
        begun = time.monotonic()
        subprocess.run(words, stdin=subprocess.DEVNULL, pass_fds=[lock], start_new_session=True, check=False)


if __name__ == "__main__":
    main()
