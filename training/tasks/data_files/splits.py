"""Splits of data sets: their names, and which samples are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SPEAKER_COLUMNS = (
    *("speaker", "speaker_id", "voice", "client_id", "speaker_name", "narrator"),
    *("locuteur", "locutrice", "sprecher", "sprecherin", "hablante", "locutor", "parlante", "falante", "spreker"),
)
"""Recognised names of the speaker column; a table from home has them in its language."""
HELD_OUT = 0.1
"""Share of the training samples that are held out if there is no validation split."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
"""Recognised names of each split, as in Hugging Face's audiofolder."""


def split_named(name: str) -> str:
    """Return the split that ``name`` refers to; empty if none."""
    lowered = name.lower()
    return next((split for split, names in SPLITS.items() if lowered in names), "")


def held_out_count(count: int) -> int:
    """Return the number of training samples to hold out if there is no validation split."""
    return max(1, round(count * HELD_OUT))


def by_split(find: Callable[[str], T | None]) -> dict[str, T]:
    """Return the result of ``find`` for each split, by the first of its names with a truthy result."""
    hits = {split: next(filter(None, map(find, names)), None) for split, names in SPLITS.items()}
    return {split: hit for split, hit in hits.items() if hit is not None}


def path_if_file(path: Path) -> Path | None:
    """Return ``path`` if the file exists, else ``None``."""
    return path if path.is_file() else None


def without_hidden(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that are not hidden, such as ``._a.wav``, written by macOS beside ``a.wav`` on foreign disks."""
    return (path for path in paths if not path.name.startswith("."))


def id_hash(identity: str) -> bytes:
    """Return the hash by which samples are ranked for a choice that is independent of machine and other samples."""
    return hashlib.blake2b(identity.encode(), digest_size=16).digest()


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a data set saved by the package ``datasets``."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )
