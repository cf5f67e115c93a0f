"""Published models that can be had without a model hub: a script of ours makes their folders of other sources."""

from __future__ import annotations

from pathlib import Path

from training.tasks.cache import cache_root


def made_folder(name: str) -> Path:
    """Return where the folder of the model ``name`` of the hub stands once it is made, in the user's cache folder."""
    return cache_root("") / "models" / name.replace("/", "--")
