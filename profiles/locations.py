"""Interpretation of texts that may be a path, a hub name (``owner/name``) or ``module:factory``, and of files that only
point to others (Git LFS)."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

from profiles.errors import BadInput

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""First bytes of the text that stands in a cloned repository for a file that Git LFS has not fetched."""
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_AND = re.compile(r"\s+\+\s+")
_FACTORY = re.compile(r"(?P<file>.+):(?P<factory>[A-Za-z_][\w.]*)")


def absolute_path(value: str, folder: Path) -> str:
    """Return ``value`` as an absolute path; ``~`` is the home folder, a relative path is relative to ``folder``."""
    return os.path.abspath(os.path.join(folder, os.path.expanduser(value))) if value else value


def absolute_location(value: str, folder: Path) -> str:
    """Return ``value`` with its path made absolute; a hub name or module is unchanged.

    ``owner/name`` is a path where it exists below ``folder``, else a hub name.
    """
    match = _FACTORY.fullmatch(value)
    if match and not _exists(value, folder):
        return f"{absolute_location(match['file'], folder)}:{match['factory']}"
    is_path = value and (value[0] in "~/." or not _HUB_NAME.fullmatch(value) or _exists(value, folder))
    return absolute_path(value, folder) if is_path else value


def remote_path(value: str, folder: Path) -> str:
    """Return a path to be used on several machines: a leading ``~`` is kept, for the home folder of each."""
    return value if value.startswith("~") else absolute_path(value, folder)


def user_code_in(value: str) -> list[str]:
    """Return the references to user code (``file.py:name``, ``module:name``) in a list of names that is separated by
    ``+`` with spaces around it."""
    return [name.strip() for name in _AND.split(value) if _FACTORY.fullmatch(name.strip())]


def with_files(value: str, change: Callable[[str], str]) -> str:
    """Return such a list with ``change`` applied to its files; names and modules are unchanged."""
    return " + ".join(_with_file(name.strip(), change) for name in _AND.split(value))


def _with_file(value: str, change: Callable[[str], str]) -> str:
    match = _FACTORY.fullmatch(value)
    is_file = match and match["file"].endswith(".py")
    return f"{change(match['file'])}:{match['factory']}" if match and is_file else value


def is_location(value: str, folder: Path) -> bool:
    """Whether ``value`` is a path, an ``owner/name`` or a ``module:factory`` rather than a bare word."""
    return "/" in value or value[:1] in ("~", ".") or bool(_FACTORY.fullmatch(value)) or _exists(value, folder)


def _exists(value: str, folder: Path) -> bool:
    return os.path.exists(absolute_path(value, folder))


def is_on_hub(path: str) -> bool:
    """Whether a data set does not exist locally, and its name may be one on the hub."""
    return bool(path) and not Path(path).expanduser().exists() and not looks_like_path(path)


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be a path, not ``name`` or ``owner/name`` on the hub."""
    is_file = Path(name).suffix.lower() in {".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow"}
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or is_file


def similar_path(path: Path) -> Path | None:
    """Return the entry beside a missing file or folder whose name is most like its name; ``None``: none is."""
    names = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.glob("*")], 1)
    return path.parent / names[0] if names else None


def check_model_path(path: str) -> bool:
    """Return whether ``path`` is a local folder (otherwise it is a hub name).

    Raises:
        BadInput: empty, a file, or neither an existing folder nor a possible hub name.
    """
    if not path:
        raise BadInput("no model was given", "set model_path to a hub name or a folder")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise BadInput(f"model {path}: no config.json in this folder", "name the folder of a saved model")
        return True
    if folder.exists() or not _HUB_NAME.fullmatch(path):
        raise BadInput(f"model {path}: no such folder", "check model_path")
    return False


def check_weights(folder: Path) -> None:
    """Check that the folder of a model holds its weights, without reading them.

    Raises:
        BadInput: it holds none, or a file that only points to them.
    """
    files = [path for end in ("safetensors", "bin") for path in sorted(folder.glob(f"*.{end}"))]
    if not files:
        hint = "name the folder of a complete model, or set from_scratch = true to begin with random weights"
        raise BadInput(f"model {folder}: no weights in this folder, as in model.safetensors", hint)
    if pointer := next(filter(is_pointer, files), None):
        raise pointer_error(pointer)


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer of Git LFS."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def pointer_error(path: Path) -> BadInput:
    """Return the error for a pointer of Git LFS."""
    return BadInput(f"{path}: a Git LFS pointer instead of the file", "fetch it, in its repository: git lfs pull")
