"""Files that the cells of a table name: as the disk spells them, and where people put them."""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from training.tasks.sound_containers import SOUND_ENDINGS

_INNER = ("clips", "wavs", "wav", "audio", "audios", "recordings", "data", "sounds", "files")
"""Folders beside a table that hold its recordings, where the table gives their names only."""
_DEEPEST = 6  # parts of a path from another computer that are looked for here
_DRIVE = re.compile(r"[A-Za-z]:[/\\]")


def as_stored(folder: Path, cell: str) -> Path:
    """Return the file that a cell names, below ``folder`` if it is relative, as the disk spells it.

    A file that is not there is looked for by the end of its path (the table came from another computer), one folder
    down (``clips/``, ``wavs/``, ...), with the ending of a sound where the cell has none, and without regard to case
    and to the form of composed characters: files that come from a Mac may have names where an umlaut is two characters.
    Where nothing is, the path is as written.
    """
    if "\\" in cell and not os.path.exists(folder / cell):  # written on Windows
        cell = cell.replace("\\", "/")
    path = written_path(cell)
    if os.path.exists(folder / path):
        return folder / path
    for path_end in (spelled for end in _ends(cell) for spelled in _with_endings(end)):
        for inner in (folder, *(folder / name for name in _INNER)):
            if (stored := _spelled(inner, path_end)) is not None:
                return stored
    return folder / path


def without_hidden(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that a person put there; not ``._a.wav``, which a Mac writes beside ``a.wav`` on other disks."""
    return (path for path in paths if not path.name.startswith("."))


def is_saved(folder: Path) -> bool:
    """Whether the package ``datasets`` saved a data set there."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def written_path(cell: str) -> Path:
    """Return the path as a cell has it; ``~`` is the home folder."""
    try:
        return Path(cell).expanduser()
    except RuntimeError:  # a user that is not there
        return Path(cell)


def _ends(cell: str) -> list[Path]:
    """Return the relative paths that a file may have here, the longest first: of an absolute path the ends of it."""
    path = written_path(cell)
    parts = path.parts
    if ".." in parts:
        return []
    if not _DRIVE.match(cell) and not path.is_absolute():
        return [path]
    return [Path(*parts[start:]) for start in range(max(1, len(parts) - _DEEPEST), len(parts))]


def _with_endings(path: Path) -> list[Path]:
    has_one = path.suffix.lower() in SOUND_ENDINGS or not path.name
    return [path] if has_one else [path, *(path.with_name(path.name + ending) for ending in SOUND_ENDINGS)]


def _spelled(folder: Path, path: Path) -> Path | None:
    """Return ``path`` below ``folder`` in the spelling of the disk; ``None`` if nothing is there."""
    for part in path.parts:
        try:
            is_there = os.path.lexists(folder / part)
            name = part if is_there else _names(folder, os.stat(folder).st_mtime_ns).get(_key(part))
        except (OSError, ValueError):
            return None
        if name is None:
            return None
        folder /= name
    return folder if os.path.isfile(folder) else None


@functools.lru_cache(maxsize=64)
def _names(folder: Path, changed: int) -> dict[str, str]:
    """Return the names in a folder by :func:`_key`, of two with one key none."""
    names: dict[str, str] = {}
    doubled = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            key = _key(entry.name)
            if names.setdefault(key, entry.name) != entry.name:
                doubled.add(key)
    return {key: name for key, name in names.items() if key not in doubled}


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
