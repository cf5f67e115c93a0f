"""What a text means that may be a path, a hub name (``owner/name``) or ``module:factory``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_AND = re.compile(r"\s+\+\s+")
_FACTORY = re.compile(r"(?P<file>.+):(?P<factory>[A-Za-z_][\w.]*)")


def absolute_path(value: str, folder: Path) -> str:
    """Return ``value`` as an absolute path; ``~`` is the home folder, relative is relative to ``folder``."""
    return os.path.abspath(os.path.join(folder, os.path.expanduser(value))) if value else value


def absolute_location(value: str, folder: Path) -> str:
    """Return ``value`` with its path made absolute; a hub name or a module stays as it is.

    ``owner/name`` is a path where it exists below ``folder``, else a hub name.
    """
    match = _FACTORY.fullmatch(value)
    if match and not _exists(value, folder):
        return f"{absolute_location(match['file'], folder)}:{match['factory']}"
    is_path = value and (value[0] in "~/." or not _HUB_NAME.fullmatch(value) or _exists(value, folder))
    return absolute_path(value, folder) if is_path else value


def path_there(value: str, folder: Path) -> str:
    """Return a path that several machines look up: what begins with ``~`` stays so, for the home folder of each."""
    return value if value.startswith("~") else absolute_path(value, folder)


def own_code_in(value: str) -> list[str]:
    """Return what names code of somebody's own (``file.py:name``, ``module:name``) in a text of names that ``+`` with
    blanks puts together."""
    return [part.strip() for part in _AND.split(value) if _FACTORY.fullmatch(part.strip())]


def with_files(value: str, change: Callable[[str], str]) -> str:
    """Return such a text with its files changed; names and modules stay as they are."""
    return " + ".join(_with_file(part.strip(), change) for part in _AND.split(value))


def _with_file(value: str, change: Callable[[str], str]) -> str:
    match = _FACTORY.fullmatch(value)
    is_file = match and match["file"].endswith(".py")
    return f"{change(match['file'])}:{match['factory']}" if match and is_file else value


def is_location(value: str, folder: Path) -> bool:
    """Whether ``value`` reads as a path, an ``owner/name`` or a ``module:factory``, and not as a bare word."""
    return "/" in value or value[:1] in ("~", ".") or bool(_FACTORY.fullmatch(value)) or _exists(value, folder)


def _exists(value: str, folder: Path) -> bool:
    return os.path.exists(absolute_path(value, folder))
