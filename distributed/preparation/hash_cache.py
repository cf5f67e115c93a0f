"""Hashes of large files that have not changed since they were last read, so that hours of audio are not read again.

A file is known by its path, size, inode and time of change, as git's index knows it. One that changed in the last
seconds before it was read is not kept: it might change again within the same tick of the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import platformdirs

from training.run_files import write_whole

SMALLEST = 1_000_000
"""Bytes; smaller files are read faster than they are looked up."""
_MOST = 200_000
_LARGEST_CACHE = 100_000_000
_SETTLED = 3.0
_HASH = re.compile(r"[0-9a-f]{64}")


class HashCache:
    """Hashes by file, on disk.

    Args:
        path: ``None`` for the user's cache folder of this operating system.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "hashes.json"
        self._known: dict[str, list[Any]] | None = None
        self._changed = False

    def get(self, path: Path, stat: os.stat_result) -> str:
        """Return the hash of a file that is as it was; empty where that is not known."""
        entry = self._entries().get(os.fspath(path))
        fits = isinstance(entry, list) and len(entry) == 4 and entry[:3] == _identity(stat)
        return str(entry[3]) if fits and entry is not None and _HASH.fullmatch(str(entry[3])) else ""

    def put(self, path: Path, stat: os.stat_result, digest: str) -> None:
        """Keep the hash of a file as it was when ``stat`` was asked, before it was read."""
        if time.time() - stat.st_mtime > _SETTLED:
            entries = self._entries()
            entries.pop(os.fspath(path), None)
            entries[os.fspath(path)] = [*_identity(stat), digest]
            self._changed = True

    def save(self) -> None:
        """Write what was learned; a cache that cannot be written is none."""
        if not self._changed:
            return
        kept = dict(list(self._entries().items())[-_MOST:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(kept).encode())
        self._changed = False

    def _entries(self) -> dict[str, list[Any]]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError, RecursionError):
                if self.path.stat().st_size < _LARGEST_CACHE:
                    found = json.loads(self.path.read_bytes())
                    self._known = found if isinstance(found, dict) else {}
        return self._known


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
