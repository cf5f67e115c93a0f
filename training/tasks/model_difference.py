"""Whether a model that was built again is the model it was built from: structure, settings, weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PLAIN = (
    bool, int, float, complex, str, bytes, set, frozenset, type(None), type, torch.dtype, torch.Size, torch.device,
)  # fmt: skip
_BOOKKEEPING = frozenset(vars(nn.Module())) | {"name_or_path"}
_DEPTH = 4


def difference(model: nn.Module, again: nn.Module, objects: bool) -> str:
    """Return in words the first difference in structure, types, settings or values; empty where there is none.

    Args:
        objects: look into objects that are settings too; else these count by their type.
    """
    ours, theirs = (dict(m.named_modules()) for m in (model, again))
    if ours.keys() != theirs.keys():
        return f"its part {min(ours.keys() ^ theirs.keys())!r} is in one of the two only"
    for name, module in ours.items():
        if type(module) is not type(theirs[name]):
            return f"{name or 'model'} is {type(module).__name__}, and then {type(theirs[name]).__name__}"
        found = _setting_difference(vars(module), vars(theirs[name]), objects, 0)
        if found:
            return f"{name}.{found}".lstrip(".")
    return _tensor_difference(model, again)


def _tensor_difference(model: nn.Module, again: nn.Module) -> str:
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(again, kind)())
        for name, value in getattr(model, kind)():
            other = theirs.pop(name, None)
            if other is None or value.dtype != other.dtype or value.shape != other.shape:
                return f"{name} has another shape or type"
            if not torch.equal(value.detach().cpu(), other.detach().cpu()) and not bool(value.isnan().any()):
                return f"{name} has other values"
        if theirs:
            return f"{min(theirs)} is in one of the two only"
    return ""


def _setting_difference(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], objects: bool, depth: int) -> str:
    for name in dict.fromkeys([*ours, *theirs]):
        if name in _BOOKKEEPING or (not objects and str(name).startswith("_")):
            continue
        if not _equal(ours.get(name, _equal), theirs.get(name, _equal), objects, depth):
            return f"{name} is {_short(ours.get(name))}, and then {_short(theirs.get(name))}"
    return ""


def _equal(one: Any, other: Any, objects: bool, depth: int) -> bool:
    """Whether two settings are alike; what cannot be looked into counts by its type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one.detach().cpu(), other.detach().cpu())
    if isinstance(one, _PLAIN):
        return bool(one == other) or (one != one and other != other)
    if inspect.isroutine(one):
        return getattr(one, "__qualname__", "") == getattr(other, "__qualname__", "")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b, objects, depth) for a, b in zip(one, other))
    if not objects or depth > _DEPTH or isinstance(one, nn.Module):
        return True
    inside = [value if isinstance(value, Mapping) else getattr(value, "__dict__", {}) for value in (one, other)]
    return not _setting_difference(inside[0], inside[1], objects, depth + 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
