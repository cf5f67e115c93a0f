"""Remembers log-ins: when each SSH server last let Muster in, and which machines have done so at all.

A refusal right after a log-in is a connection limit, not a stopped server: an empty file per server in the user's
cache, named by a hash, says when that was. The machines are kept by :mod:`distributed.hosts.past_logins`.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import platformdirs

from distributed.hosts.file import is_literal_address
from distributed.hosts.past_logins import PastLogin, digest, save_login
from distributed.hosts.schema import HERE
from distributed.ssh.config import ResolvedHost, SshTarget

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
    return Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "answered" / digest(address, port)


def note_login(target: SshTarget, host: ResolvedHost, address: str, fingerprint: str, host_name: str) -> None:
    """Record that a machine let Muster in. If nothing can be written, it is not listed later.

    Args:
        address: literal address that was dialled; empty: none, as another machine stands between. Such a machine, and
            one with a configuration of its own, is not recorded: a later search would not get there.
        host_name: its own name, as it told it.
    """
    if not (address and host.is_dialled) or target.config_file or (target.host in HERE and host.port == 22):
        return
    is_address = is_literal_address(target.host) and target.host in target.name  # as it was typed, with user and port
    name = (host_name or target.host) if is_address else target.name
    user = "" if host.user_is_guess else host.user
    save_login(PastLogin(name, target.host, address, host.port, user, fingerprint))
