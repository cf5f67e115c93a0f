"""What a person asks of a running run: small files in its ``requests`` folder, taken by whoever carries it out."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed.hosts.schema import Machine
from profiles.errors import BadInput
from training.run_files import explain, private_folder, write_whole

Action = Literal["stop", "kill", "pause", "resume", "snapshot", "drop", "add"]
FOLDER = "requests"


class _Document(BaseModel):
    model_config = ConfigDict(extra="ignore")

    action: Action
    machine: str = Field("", max_length=1000)
    entry: Machine | None = None


class Request(NamedTuple):
    """One thing that was asked for."""

    id: str
    action: Action
    machine: str = ""
    """Of ``drop`` and ``add``: the machine's name."""
    entry: Machine | None = None
    """Of ``add``: a machine that is not in the run's hosts file."""


def leave_request(run_dir: Path, action: Action, machine: str = "", entry: Machine | None = None) -> str:
    """Ask a run for something; what becomes of it are ``request`` events with the id that is returned.

    Nobody answers where nobody works on the run any more: ask :func:`training.run_files.is_live`.

    Raises:
        BadInput: no machine is named where one is needed, or the run folder cannot be written.
    """
    if action in ("drop", "add") and not machine and entry is None:
        raise BadInput(f"'{action}' needs the name of a machine", "name one of the run's machines")
    identity = f"{time.time_ns()}-{secrets.token_hex(4)}"
    path = run_dir / FOLDER / f"{identity}.json"
    document: dict[str, Any] = {"action": action, "machine": machine or (entry.name if entry else "")}
    if entry is not None:
        document["entry"] = entry.model_dump(mode="json", exclude_defaults=True)
    try:
        private_folder(path.parent)
        write_whole(path, json.dumps(document).encode())
    except OSError as error:
        raise BadInput(*explain(error, path)) from None
    return identity


def withdraw_request(run_dir: Path, identity: str) -> bool:
    """Take a request back; return whether nobody had taken it yet."""
    with contextlib.suppress(OSError):
        (run_dir / FOLDER / f"{identity}.json").unlink()
        return True
    return False


def take_requests(run_dir: Path) -> list[Request]:
    """Return what was asked for since the last time, oldest first, and remove it; nonsense is passed over."""
    requests: list[Request] = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):
            said = _Document.model_validate_json(path.read_bytes())
            requests.append(Request(path.stem, said.action, said.machine, said.entry))
        with contextlib.suppress(OSError):
            path.unlink()
    return requests


def actions() -> tuple[str, ...]:
    """Return everything that may be asked for."""
    return get_args(Action)
