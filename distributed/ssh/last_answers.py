"""When SSH servers let us in last: a refusal right after it is a limit on new connections, not a server that is off.

Kept in the user's cache, because each command is a process of its own: an empty file for each server, named by a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import platformdirs

_RECENT = 60.0
"""Seconds; firewalls that limit new connections count those of half a minute."""


def note_answer(address: str, port: int) -> None:
    """Note that the SSH server at a literal address let us in just now."""
    with contextlib.suppress(OSError):  # a home folder that cannot be written to costs the better message only
        path = _file(address, port)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def seconds_since_answer(address: str, port: int) -> float | None:
    """Return how long ago it let us in; ``None`` where that is long ago or never was."""
    with contextlib.suppress(OSError):
        ago = max(time.time() - _file(address, port).stat().st_mtime, 0.0)
        return ago if ago < _RECENT else None
    return None


def _file(address: str, port: int) -> Path:
    name = hashlib.sha256(f"{address} {port}".encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "answered" / name
