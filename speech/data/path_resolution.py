"""Resolve file names in table cells to files on disk, tolerating different spellings and folders."""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from pathlib import Path
from urllib.parse import unquote

from speech.data.sound_containers import SOUND_ENDINGS

_INNER = ("clips", "wavs", "wav", "audio", "audios", "recordings", "data", "sounds", "files")
"""Folders beside a table that may hold its recordings, if the table has only their names."""
_MAX_DEPTH = 6  # trailing components of a path from another computer that are tried
_DRIVE = re.compile(r"[A-Za-z]:[/\\]")
FILE_URL = re.compile(r"file:(?://(?:localhost(?=/))?)?", re.IGNORECASE)
_MOST_FOLDERS = 64
"""Further subfolders in which a recording is searched by its name alone."""
SEARCHED = "nor in a folder below"
"""Where a missing file was looked for, beside its table."""


def resolve_path(folder: Path, cell: str) -> Path:
    """Return the file that a cell names, relative to ``folder``, in the spelling on disk.

    A missing file is searched in all its :func:`readings`, by the trailing components of its path (for tables from
    another computer), in usual subfolders (``clips/``, ``wavs/``, ...), then in the only other subfolder that has it,
    with audio extensions if the cell has none, and regardless of case and Unicode normalisation (file names from a Mac
    may be decomposed). If nothing is found, the path is as written.
    """
    meanings = readings(cell)
    for path in map(path_as_written, meanings):
        if os.path.exists(folder / path):
            return folder / path
    path_ends = [spelled for text in meanings for end in _path_suffixes(text) for spelled in _with_extensions(end)]
    for path_end in path_ends:
        for inner in (folder, *(folder / name for name in _INNER)):
            if (stored := _find_on_disk(inner, path_end)) is not None:
                return stored
    for path_end in path_ends:
        matches = [match for inner in _subfolders(folder) if (match := _find_on_disk(inner, path_end)) is not None]
        if matches:
            return matches[0] if len(matches) == 1 else folder / path_end
    return folder / path_as_written(meanings[-1] if "\\" in cell else cell)


def readings(cell: str) -> list[str]:
    """Return the paths that a cell may mean, the literal one first: without quotes, the path of a ``file://`` URL,
    percent-decoded, and with the slashes of this system."""
    bare = cell.strip().strip("\"'").strip()
    path = FILE_URL.sub("", bare, count=1)
    texts = (cell, bare, path, unquote(path))
    return list(dict.fromkeys(reading for text in texts for reading in (text, text.replace("\\", "/"))))


def is_written_absolute(cell: str, path: Path) -> bool:
    """Whether a cell means ``path`` as an absolute path, which is invalid on other machines."""
    return path.is_absolute() and path in map(path_as_written, readings(cell))


def path_as_written(cell: str) -> Path:
    """Return the path as written in a cell, with ``~`` expanded."""
    try:
        return Path(cell).expanduser()
    except RuntimeError:  # unknown user
        return Path(cell)


def _path_suffixes(cell: str) -> list[Path]:
    """Return candidate relative paths, longest first: the trailing components of an absolute path."""
    path = path_as_written(cell)
    components = path.parts
    if ".." in components:
        return []
    if not _DRIVE.match(cell) and not path.is_absolute():
        return [path]
    return [Path(*components[start:]) for start in range(max(1, len(components) - _MAX_DEPTH), len(components))]


def _with_extensions(path: Path) -> list[Path]:
    has_extension = path.suffix.lower() in SOUND_ENDINGS or not path.name
    return [path] if has_extension else [path, *(path.with_name(path.name + ending) for ending in SOUND_ENDINGS)]


def _find_on_disk(folder: Path, path: Path) -> Path | None:
    """Return ``path`` below ``folder`` in the spelling on disk; ``None`` if it does not exist."""
    for component in path.parts:
        try:
            is_there = os.path.lexists(folder / component)
            name = component if is_there else _names(folder, os.stat(folder).st_mtime_ns).get(_key(component))
        except (OSError, ValueError):
            return None
        if name is None:
            return None
        folder /= name
    return folder if os.path.isfile(folder) else None


def _subfolders(folder: Path) -> tuple[Path, ...]:
    """Return the folders below ``folder``, two levels deep; none if there are more than a person would search."""
    try:
        inner = _folders_in(folder, os.stat(folder).st_mtime_ns)
        folders = (*inner, *(deeper for path in inner for deeper in _folders_in(path, os.stat(path).st_mtime_ns)))
    except OSError:
        return ()
    return folders if len(folders) <= _MOST_FOLDERS else ()


@functools.lru_cache(maxsize=256)
def _folders_in(folder: Path, changed: int) -> tuple[Path, ...]:
    """Return the visible folders in a folder, at most one more than are searched."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return tuple(folder / name for name in names[: _MOST_FOLDERS + 1])


@functools.lru_cache(maxsize=256)
def _names(folder: Path, changed: int) -> dict[str, str]:
    """Return the names in a folder by :func:`_key`, without ambiguous ones."""
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
