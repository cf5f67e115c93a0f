"""Starting the process of the trackers beside a run, and saying before the run what they lack."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from app.console import say
from profiles.declarations import OptionError
from profiles.errors import BadInput
from profiles.schema import tracker_names
from training.run_files import private_file

LOG = "trackers.log"
_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("tensorboard", "wandb", "trackio")
"""Trackers that need one; each is installed and imported under the tracker's name."""


def checked_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers of a comma-separated list.

    Raises:
        BadInput: one is unknown, or its library is not installed here.
    """
    try:
        names = tracker_names(text)
    except OptionError as error:
        raise BadInput(f"trackers: {error.problem}", "write for example csv,tensorboard") from error
    missing = [name for name in names if name in _LIBRARIES and importlib.util.find_spec(name) is None]
    if missing:
        hint = f"{sys.executable} -m pip install {' '.join(missing)}"
        raise BadInput(f"trackers: {', '.join(missing)} is not installed", hint)
    return names


def start_trackers(run_dir: Path, names: Sequence[str]) -> None:
    """Start the trackers of a run in a process of their own; that they cannot start is said, and no reason to stop."""
    if not names:
        return
    try:
        with open(run_dir / "logs" / LOG, "ab", opener=private_file) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "app.trackers", str(run_dir.resolve()), ",".join(names)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                start_new_session=True,
            )
    except OSError as error:
        say(f"warning: trackers: {error.strerror}; the run goes on without them")
        return
    threading.Thread(target=process.wait, daemon=True).start()  # no zombie, where this process goes on
