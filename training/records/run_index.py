"""The folders of this computer that hold runs: a list in the user's state folder.

It is a convenience: if it cannot be written or read, runs are started and listed all the same.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from profiles.installation import RUNS_FOLDER, user_folder

_MOST = 200


def remember(output: Path) -> None:
    """Add an output folder to the list, unless it is there already."""
    line = os.path.abspath(output)
    with contextlib.suppress(OSError, UnicodeError):
        index = _index()
        noted = index.read_text().splitlines() if index.is_file() else []
        if line in noted or "\n" in line:
            return
        index.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = index.with_suffix(f".{os.getpid()}.part")
        temporary.write_text("\n".join([*(path for path in noted if Path(path).is_dir()), line][-_MOST:]) + "\n")
        temporary.replace(index)


def other_folders(output: Path) -> list[Path]:
    """Return the other folders with runs if ``output`` is the usual one; else none."""
    if Path(output) != RUNS_FOLDER:
        return []
    with contextlib.suppress(OSError, UnicodeError):
        folders = [Path(line) for line in _index().read_text().splitlines()]
        return [folder for folder in folders if folder.is_dir() and os.path.abspath(output) != str(folder)]
    return []


def _index() -> Path:
    return user_folder("state") / "run_folders"
