"""Remembers the last log-in at each SSH server: a refusal right after it is a connection limit, not a stopped server.

Stored in the user's cache, because each command is a separate process: an empty file per server, named by a hash.
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
    """Record a successful log-in at the SSH server of a literal address."""
    with contextlib.suppress(OSError):  # without a writable home folder only the better message is lost
        path = _file(address, port)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def seconds_since_answer(address: str, port: int) -> float | None:
    """Return the seconds since the last log-in; ``None`` where that is long ago or unknown."""
    with contextlib.suppress(OSError):
        ago = max(time.time() - _file(address, port).stat().st_mtime, 0.0)
        return ago if ago < _RECENT else None
    return None


def _file(address: str, port: int) -> Path:
    name = hashlib.sha256(f"{address} {port}".encode()).hexdigest()[:16]
    return Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "answered" / name
