"""Strategies by name. Importing this module does not import torch."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from profiles.errors import BadInput

if TYPE_CHECKING:
    from training.strategies.base import Strategy

_CLASSES = {
    "allreduce": "training.strategies.allreduce:AllReduce",
    "diloco": "training.strategies.diloco:DiLoCo",
}
STRATEGY_NAMES = tuple(_CLASSES)


def check_strategy(name: str) -> str:
    """Return ``name`` if it is a known strategy.

    Raises:
        BadInput: unknown; names the nearest known one.
    """
    if name not in _CLASSES:
        near = difflib.get_close_matches(name, _CLASSES, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known strategies: {', '.join(_CLASSES)}"
        raise BadInput(f"unknown strategy '{name}'", hint)
    return name


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a strategy (imports torch)."""
    module, _, attribute = _CLASSES[check_strategy(name)].partition(":")
    found: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return found
