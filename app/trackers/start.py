"""Starting the process of the trackers beside a run, and saying before the run what they lack."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from app.console import say
from profiles.errors import BadInput
from profiles.schema import OptionError, tracker_names

LOG = "trackers.log"
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Package to import, by tracker; all are installed under their own names."""


def checked_trackers(text: str) -> tuple[str, ...]:
    """Return the trackers of a comma-separated list.

    Raises:
        BadInput: one is unknown, or its library is not installed here.
    """
    try:
        names = tracker_names(text)
    except OptionError as error:
        raise BadInput(f"trackers: {error.problem}", "write for example csv,tensorboard") from error
    missing = [name for name in names if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None]
    if missing:
        packages = " ".join(_PACKAGES[name] for name in missing)
        raise BadInput(
            f"trackers: {', '.join(missing)} is not installed", f"{sys.executable} -m pip install {packages}"
        )
    return names


def start_trackers(run_dir: Path, names: Sequence[str]) -> None:
    """Start the trackers of a run in a process of their own; that they cannot start is said, and no reason to stop."""
    if not names:
        return
    try:
        with (run_dir / "logs" / LOG).open("ab") as log:
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
    with contextlib.suppress(AttributeError):
        process.returncode = 0  # nobody waits for it: it outlives this process, and no warning is due
