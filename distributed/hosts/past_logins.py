"""The machines that have let Muster in: listed again by a later search, and meant by the name that Muster shows.

A search cannot read their names in a hashed ``known_hosts``: so there is a small file per machine in the user's state
folder, so that processes do not overwrite one another's. It holds no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed.hosts.schema import Machine
from profiles.errors import BadInput, counted
from profiles.installation import user_folder
from training.records.run_files import private_folder, write_atomically

_MOST_LOGINS = 64
"""Machines that are remembered; of more, those of the latest log-ins."""
_LARGEST = 8192
"""Bytes of a file about one machine."""
_SSH_PATIENCE = 15.0


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


def save_login(login: PastLogin) -> None:
    """Remember a log-in as the latest. If nothing can be written, the machine is not listed later."""
    text = json.dumps(asdict(login)).encode()
    with contextlib.suppress(OSError):
        folder = _logins_folder()
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = private_folder(folder) / digest(login.host.casefold(), login.port)
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


def at_last_login(machine: Machine) -> Machine:
    """Return a typed machine with the destination at which one of this name let Muster in, if it leads nowhere itself.

    Raises:
        BadInput: machines with different host keys let Muster in under this name.
    """
    name = machine.host.casefold()
    logins = [login for login in past_logins() if login.name.casefold() == name != login.host.casefold()]
    if not logins or _leads_somewhere(machine):
        return machine
    if (count := len({login.fingerprint for login in logins})) > 1:
        hosts = ", ".join(login.host for login in logins)
        problem = f"the name '{machine.host}' is that of {counted(count, 'machine')} that let Muster in: {hosts}"
        raise BadInput(problem, "give the address of the one that is meant")
    latest = logins[0]
    port = None if latest.port == 22 else latest.port
    return machine.model_copy(update={"address": latest.host, "port": port, "user": machine.user or latest.user})


def _leads_somewhere(machine: Machine) -> bool:
    """Whether the SSH configuration or the system's name service knows the name."""
    configuration = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # without ssh there is no configuration to be read
        configuration = subprocess.run(
            ["ssh", "-G", "--", machine.host],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SSH_PATIENCE,
        ).stdout  # fmt: skip
    options = dict(line.partition(" ")[::2] for line in configuration.splitlines())
    if {"proxycommand", "proxyjump"} & options.keys():
        return True
    host = options.get("hostname", machine.host)
    with contextlib.suppress(OSError, UnicodeError):
        return host.casefold() != machine.host.casefold() or bool(socket.getaddrinfo(host, 22))
    return False


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


def digest(host: str, port: int) -> str:
    """Return the file name of a server."""
    return hashlib.sha256(f"{host} {port}".encode()).hexdigest()[:16]
