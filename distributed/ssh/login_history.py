"""Remembers log-ins: when each SSH server last let Muster in, and which machines have done so at all.

A refusal right after a log-in is a connection limit, not a stopped server: an empty file per server in the user's
cache, named by a hash, says when that was. The machines are listed again by a later search, which cannot read their
names in a hashed ``known_hosts``: a small file per machine in the user's state folder, so that processes do not
overwrite one another's. It holds no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from distributed.hosts.file import is_literal_address
from distributed.hosts.schema import HERE
from distributed.ssh.config import ResolvedHost, SshTarget
from profiles.installation import user_folder
from training.records.run_files import private_folder, write_atomically

_RECENT = 60.0
"""Seconds; firewalls that limit new connections count those of half a minute."""
_MOST_LOGINS = 64
"""Machines that are remembered; of more, those of the latest log-ins."""
_LARGEST = 8192
"""Bytes of a file about one machine."""


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
    return Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "answered" / _digest(address, port)


def _digest(host: str, port: int) -> str:
    return hashlib.sha256(f"{host} {port}".encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------ machines


@dataclass(frozen=True)
class PastLogin:
    """How a machine let Muster in the last time. Its name may be the machine's own word: escape it for display."""

    name: str
    host: str
    """Destination as typed after ``ssh``."""
    address: str
    """Literal address that it had; empty where that is unknown."""
    port: int
    user: str
    """Login user; empty: that of the SSH configuration."""
    fingerprint: str
    """Fingerprint of its host key."""


def note_login(target: SshTarget, host: ResolvedHost, address: str, fingerprint: str, host_name: str) -> None:
    """Record that a machine let Muster in. If nothing can be written, it is not listed later.

    Args:
        address: literal address that was dialled; empty: none, as another machine stands between. Such a machine, and
            one with a configuration of its own, is not recorded: a later search would not get there.
        host_name: its own name, as it told it.
    """
    if not address or host.proxy_command or target.config_file or (target.host in HERE and host.port == 22):
        return
    name = target.name if not is_literal_address(target.name) else host_name or target.name
    user = "" if host.user_is_guess else host.user
    login = PastLogin(name, target.host, address, host.port, user, fingerprint)
    text = json.dumps(asdict(login)).encode()
    with contextlib.suppress(OSError):
        folder = _logins_folder()
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = private_folder(folder) / _digest(target.host.casefold(), host.port)
        if path.is_file() and path.read_bytes() == text:
            os.utime(path)
            return
        write_atomically(path, text, durable=False)
        for old in _newest_first()[_MOST_LOGINS:]:
            old.unlink(missing_ok=True)


def past_logins() -> list[PastLogin]:
    """Return the machines that have let Muster in, the latest first; what cannot be read is left out."""
    return [login for path in _newest_first()[:_MOST_LOGINS] if (login := _read(path)) is not None]


def forget_login(host: str, port: int | None) -> None:
    """Forget the machine at a destination, under all names that it has here; ``None``: at any port."""
    logins = [(path, login) for path in _newest_first() if (login := _read(path)) is not None]
    forgotten = {
        login.fingerprint
        for _, login in logins
        if login.host.casefold() == host.casefold() and port in (None, login.port)
    }
    for path, login in logins:
        if login.fingerprint in forgotten:
            with contextlib.suppress(OSError):
                path.unlink()


def _logins_folder() -> Path:
    return user_folder("state") / "logins"


def _newest_first() -> list[Path]:
    with contextlib.suppress(OSError):
        paths = [path for path in _logins_folder().iterdir() if not path.name.startswith(".")]
        return [path for _, path in sorted(((path.stat().st_mtime, path) for path in paths), reverse=True)]
    return []


def _read(path: Path) -> PastLogin | None:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        with path.open("rb") as stream:
            document: dict[str, Any] = json.loads(stream.read(_LARGEST))
        login = PastLogin(**document)
        texts = (login.name, login.host, login.address, login.user, login.fingerprint)
        is_text = all(isinstance(text, str) and text.isprintable() and not text.startswith("-") for text in texts)
        if is_text and login.host and login.fingerprint and type(login.port) is int and 0 < login.port < 65536:
            return login
    return None
