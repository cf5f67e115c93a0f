"""Modules that are loaded when they are first used.

Strategies, tasks and codecs declare their options and their cost in the file that also holds their algorithm. The
command line and the planner read these declarations and must stay quick, so such a file does not load torch. It takes
it from here instead::

    from training.lazy import torch
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

__all__ = ["lazy", "nn", "np", "torch"]


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the module is inspected, not used
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


def lazy(name: str) -> Any:
    """Return a stand-in for the module ``name``, which loads it when the first of its names is asked for."""
    return _Lazy(name)


if not TYPE_CHECKING:
    np, torch, nn = lazy("numpy"), lazy("torch"), lazy("torch.nn")
