"""The folders of a run's workers on a machine: which snapshots are in them; writes and removes files there.

Standard library only, Python >= 3.9: part of :mod:`distributed.agent.program`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.agent.requests import ListSnapshots, RemoveRun
from training.records.lease import held_elsewhere

SECRETS = "secrets"
"""Folder of a worker's keys in its folder."""


def snapshots(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the parts of a run's snapshots that are complete by the sizes of their files."""
    for manifest in folder.glob("*/checkpoints/member-*/step-*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document, snapshot = json.loads(manifest.read_bytes()), manifest.parent
            sizes = {name: int(file["bytes"]) for name, file in document["files"].items()}
            if all((snapshot / name).stat().st_size == size for name, size in sizes.items()):
                state = document["state"]
                yield {
                    "member": int(snapshot.parent.name.split("-")[1]),
                    "step": document["step"],
                    "path": snapshot.relative_to(folder).as_posix().partition("/")[2],
                    "bytes": sum(sizes.values()),
                    "live": state["live"],
                    "part": state.get("part", (0, 1)),
                    "course": state.get("course", ()),
                }


def held(root: Path, request: ListSnapshots) -> dict[str, list[Any]]:
    """Return the parts of a run's snapshots that are here."""
    return {"snapshots": list(snapshots(root / "runs" / request.run))}


def remove(root: Path, request: RemoveRun) -> dict[str, Any]:
    """Remove the folders of a run's workers, but those in which an agent still works."""
    folder = root / "runs" / request.run
    for worker in folder.iterdir() if folder.is_dir() else ():
        if not (worker / "agent.sock").exists() and not held_elsewhere(worker):
            shutil.rmtree(worker, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return {}


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files (base64 by relative path) readable by this user only.

    Raises:
        ValueError: a path leaves the folder.
    """
    for name, content in files.items():
        path = Path(os.path.normpath(folder / name))
        if folder not in path.parents:
            raise ValueError(f"a path that leaves its folder: {name!r:.200}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(base64.b64decode(content))


def write_keys(folder: Path, files: Mapping[str, str]) -> None:
    """Write the keys of a running worker, which is given no other file.

    Raises:
        ValueError: a path is that of something else.
    """
    if others := [name for name in files if not name.startswith(f"{SECRETS}/")]:
        raise ValueError(f"no key: {others[0]!r:.200}")
    write_files(folder / SECRETS, {name.partition("/")[2]: content for name, content in files.items()})
