"""What a text means that may be a path, a hub name (``owner/name``) or ``module:factory``."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
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


def is_location(value: str, folder: Path) -> bool:
    """Whether ``value`` reads as a path, an ``owner/name`` or a ``module:factory``, and not as a bare word."""
    return "/" in value or value[:1] in ("~", ".") or bool(_FACTORY.fullmatch(value)) or _exists(value, folder)


def _exists(value: str, folder: Path) -> bool:
    return os.path.exists(absolute_path(value, folder))
