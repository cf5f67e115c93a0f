"""Inspects local data at a path on a machine, and reveals no rows: part of :mod:`distributed.agent.program`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from distributed.agent.requests import InspectData

_TABLES = ("train", "training", "metadata")
_ENDS = (".csv", ".tsv", ".jsonl")
_MOST = 1 << 20
"""Maximum bytes of a line."""


def inspect(root: Path, request: InspectData) -> dict[str, object]:
    """Inspect what was asked for."""
    return inspect_path(request.path)


def inspect_path(text: str) -> dict[str, object]:
    """Inspect a path; a relative one is below the home folder.

    Returns:
        ``path``, absolute there; ``problem``: why it cannot be trained on, or empty; ``columns`` of its table, if any.
    """
    path = os.path.join(os.path.expanduser("~"), os.path.expanduser(text))
    try:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else [""] if os.stat(path).st_size else []
        visible = [name for name in names if not name.startswith(".")]
        table = next((name for stem in _TABLES for end in _ENDS for name in visible if name == stem + end), "")
        single_file = path if visible == [""] and path.endswith(_ENDS) else ""
        columns, rows = (
            _head(os.path.join(path, table) if table else single_file) if table or single_file else ([], True)
        )
    except FileNotFoundError:
        return {"path": path, "problem": "is not there", "columns": []}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or "not a table in UTF-8"
        return {"path": path, "problem": f"cannot be read ({reason})", "columns": []}
    return {"path": path, "problem": "" if visible and rows else "is empty", "columns": columns}


def _head(path: str) -> tuple[list[str], bool]:
    """Return the columns of a table, and whether it has a row."""
    with open(path, encoding="utf-8-sig") as table:
        header, row = table.readline(_MOST), table.readline(_MOST)
        if header.strip(' "\r\n').lower().startswith("sep="):
            header, row = row, table.readline(_MOST)
    if path.endswith(".jsonl"):
        record = json.loads(header or "{}")
        return sorted(record) if isinstance(record, dict) else [], bool(header.strip())
    separator = max(",;\t|", key=header.count)
    names = (name.strip().strip('"') for name in header.strip("\r\n").split(separator))
    return [name for name in names if name], bool(row.strip())
