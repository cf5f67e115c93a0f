"""The process of a run's trackers: ``python -m app.trackers RUN_FOLDER NAMES``, started by whoever starts the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from app.trackers.tracking import Tracking, wait_until_it_lives
from profiles.errors import MusterError

_PATIENCE = 60.0
"""Seconds until the run must have begun."""
_NICENESS = 10


def main(arguments: list[str]) -> int:
    """Track one run to its end."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)  # the training comes first
    path, names = Path(arguments[0]), arguments[1].split(",")
    try:
        wait_until_it_lives(path, _PATIENCE)
        tracking = Tracking(path, names, lambda line: print(line, flush=True))
        tracking.follow()
    except MusterError as error:
        print(error, flush=True)
        return int(error.exit_code)
    for name, place in tracking.places.items():
        print(f"{name}: {place}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
