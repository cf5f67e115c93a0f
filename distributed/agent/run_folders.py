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
    """Write files (base64 by relative path) readable by this user only."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(base64.b64decode(content))
