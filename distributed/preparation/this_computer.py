"""Lets a light core run its commands in the training environment of this computer, with a copy of its code.

The environment is built as on every other machine, and contains no code of ours. The copy lies beside it, so that a
Python of another minor version never sees compiled packages of the light core.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

from distributed.machine.link import CACHE
from profiles.installation import DISTRIBUTION, TOP, installation_digest, record_training_environment

_PACKAGES = ("app", "distributed", "profiles", "speech", "training", "muster")


def train_with(python: str) -> None:
    """Run later commands of this installation with ``python``, the training environment of this computer."""
    record_training_environment(python, _copied_code(Path(CACHE).expanduser() / "code" / installation_digest()))


def _copied_code(folder: Path) -> Path:
    """Copy this installation's packages to ``folder``, atomically."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        for name in _PACKAGES:
            shutil.copytree(TOP / name, partial / name, ignore=shutil.ignore_patterns("__pycache__"))
        metadata = importlib.metadata.distribution(DISTRIBUTION)
        version = f"{DISTRIBUTION.replace('-', '_')}-{metadata.version}.dist-info"
        (partial / version).mkdir()
        for name in ("METADATA", "RECORD"):
            (partial / version / name).write_text(metadata.read_text(name) or "")
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another command of this installation was quicker
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
