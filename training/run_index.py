"""Which folders of this computer hold runs: a list in the user's state folder, of those that runs were started in.

It is a convenience: one that cannot be written or read keeps no run from starting or from being listed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from profiles.installation import RUNS_FOLDER, user_folder

_MOST = 200


def remember(output: Path) -> None:
    """Note an output folder in which a run was made; one that is noted already stays where it is."""
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
    """Return the folders with runs beside ``output``, where that is the usual one; of another only that counts."""
    if Path(output) != RUNS_FOLDER:
        return []
    with contextlib.suppress(OSError, UnicodeError):
        folders = [Path(line) for line in _index().read_text().splitlines()]
        return [folder for folder in folders if folder.is_dir() and os.path.abspath(output) != str(folder)]
    return []


def _index() -> Path:
    return user_folder("state") / "run_folders"
