"""Data sets of the Hugging Face hub, of its local cache, or saved by the package ``datasets``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from profiles.errors import BadInput
from training.tasks.data_files.splits import by_split, is_saved
from training.tasks.pretrained import is_hub_reachable


def load_hub_dataset(name: str) -> Any:
    """Return the ``DatasetDict`` of ``name`` or ``name:configuration``.

    Raises:
        BadInput: not found, not reachable, or a configuration is missing (the message lists them).
    """
    path, _, configuration = name.partition(":")
    if Path(name).expanduser().exists():
        return _load_local(Path(name).expanduser())
    mode = None if is_hub_reachable() else "reuse_cache_if_exists"
    if mode and not datasets.config.HF_HUB_OFFLINE:
        datasets.config.HF_HUB_OFFLINE = True  # the client would retry for 23 s before using its cache
    try:
        return datasets.load_dataset(path, configuration or None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        message = f"data set {name}: no such folder, and not from the hub: {reason}"
        raise BadInput(
            message, "check the name, or use a folder; a configuration is written name:configuration"
        ) from error


def _load_local(path: Path) -> Any:
    """Return the data set in a folder downloaded from the hub or saved by ``datasets``, or in a Parquet file.

    Raises:
        BadInput: it cannot be read.
    """
    try:
        if is_saved(path):
            loaded = datasets.load_from_disk(str(path))
            return loaded if isinstance(loaded, datasets.DatasetDict) else datasets.DatasetDict({"train": loaded})
        return (
            datasets.load_dataset("parquet", data_files=str(path))
            if path.is_file()
            else datasets.load_dataset(str(path))
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"data set {path}: {' '.join(str(error).split())[:300]}", "fetch or save it again") from error


def splits_of(loaded: Any) -> dict[str, str]:
    """Return the splits of a ``DatasetDict``, with the keys that they have in it."""
    return by_split(lambda name: name if name in loaded else None)
