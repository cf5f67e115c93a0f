"""What a person asks of a running run: small files in its ``requests`` folder, which the supervisor takes."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from pathlib import Path
from typing import Literal, get_args

from profiles.errors import BadInput
from training.run_files import explain, write_whole

Action = Literal["stop", "kill", "pause", "resume", "snapshot"]
FOLDER = "requests"


def leave_request(run_dir: Path, action: Action) -> None:
    """Ask the supervisor of a run for something.

    Raises:
        BadInput: the run folder cannot be written.
    """
    path = run_dir / FOLDER / f"{time.time_ns()}-{secrets.token_hex(4)}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps({"action": action}).encode())
    except OSError as error:
        raise BadInput(*explain(error, path)) from None


def take_requests(run_dir: Path) -> list[Action]:
    """Return what was asked for since the last time, oldest first, and remove it; nonsense is passed over."""
    actions: list[Action] = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            action = json.loads(path.read_bytes())["action"]
            if action in get_args(Action):
                actions.append(action)
        with contextlib.suppress(OSError):
            path.unlink()
    return actions
