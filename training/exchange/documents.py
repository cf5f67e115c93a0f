"""JSON documents that members gather: read so that one that says something else harms nobody but itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def documents(gathered: Mapping[int, bytes]) -> dict[int, dict[str, Any]]:
    """Return the JSON object of every member by rank, ascending; who said something else is left out, by all alike."""
    found: dict[int, dict[str, Any]] = {}
    for rank in sorted(gathered):
        try:
            document = json.loads(gathered[rank])
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found[rank] = document
    return found


def figures_by_rank(gathered: Mapping[int, bytes]) -> dict[int, dict[str, float]]:
    """Return the figures of every member by rank, ascending; what is not a number that fits is left out, NaN is one."""
    return {
        rank: {name: float(value) for name, value in document.items() if _is_figure(value)}
        for rank, document in documents(gathered).items()
    }


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -1e300 < value < 1e300 or value != value  # NaN is not itself
