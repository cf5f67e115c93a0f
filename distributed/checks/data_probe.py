"""Inspects local data at a path on a machine. The program is passed in the command itself, and writes nothing.

``python -c PROGRAM PATH`` prints one JSON object: ``path``, absolute there; ``problem``: why it cannot be trained on,
or empty; ``columns`` of the table to train on, if there is one. No rows are revealed.
"""

from __future__ import annotations

import json
import os
import sys

_TABLES = ("train", "training", "metadata")
_ENDS = (".csv", ".tsv", ".jsonl")
_MOST = 1 << 20
"""Maximum bytes of a line."""


def inspect_path(text: str) -> dict[str, object]:
    """Inspect a path; a relative one is below the home folder."""
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


def main() -> int:
    json.dump(inspect_path(sys.argv[1]), sys.stdout)
    return 0
