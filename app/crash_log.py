"""Where the traceback of a fault goes: a file of the user's log folder, whose path a person is told."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from pathlib import Path

import platformdirs

KEPT_CRASH_LOGS = 20


def save_traceback() -> Path:
    """Write the traceback of the current exception into the user's log folder and return the file's path."""
    try:
        folder = Path(platformdirs.user_log_dir("muster", ensure_exists=True))
        _forget_old(folder)
        return _write_traceback(folder)
    except OSError:
        return _write_traceback(Path(tempfile.gettempdir()))


def _write_traceback(folder: Path) -> Path:
    prefix = time.strftime("crash-%Y%m%d-%H%M%S-")
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=".log", dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(traceback.format_exc())
    return Path(name)


def _forget_old(folder: Path) -> None:
    for path in sorted(folder.glob("crash-*.log"))[: -KEPT_CRASH_LOGS + 1]:
        with contextlib.suppress(OSError):
            path.unlink()
