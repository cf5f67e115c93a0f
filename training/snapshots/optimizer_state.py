"""The state of an optimizer as tensors with names, for snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from profiles.errors import RunFailed
from training.numerics.schedule import RATE_SHARE

_NUMBERS: dict[str, type[bool] | type[int] | type[float]] = {"bool": bool, "int": int, "float": float}


_GROUP = "group."
"""Before the name of a number that a group of weights has, which then stands beside the state of each of them."""
_RATES = frozenset({RATE_SHARE, "lr", "initial_lr"})
"""Numbers of a group that follow the schedule of the run."""


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the state of any torch optimizer as ``<parameter>/<name>``, numbers in it as tensors too.

    A user's own may count or measure in its groups of weights, as Prodigy and schedule-free ones do: their numbers are
    in it with each weight, but for learning rates.

    Args:
        parameters: names of its parameters, in its order; without them their numbers are taken.

    Raises:
        RunFailed: its state holds something else, which no snapshot can hold.
    """
    tensors: dict[str, Tensor] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                tensors |= _as_tensor(f"{parameters[index] if parameters else index}/{name}", value, optimizer)
    for index, group in enumerate(_groups(optimizer)):
        for name, value in group.items() if RATE_SHARE in group else ():
            if name not in _RATES and (isinstance(value, int | float) or _is_number(value)):
                tensors |= _as_tensor(f"{parameters[index] if parameters else index}/{_GROUP}{name}", value, optimizer)
    return tensors


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the group of each parameter, in the optimizer's order."""
    return [group for group in optimizer.param_groups for _ in group["params"]]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _as_tensor(key: str, value: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {key: value}
    if isinstance(value, int | float):
        kind = next(name for name, number_type in _NUMBERS.items() if isinstance(value, number_type))
        return {f"{key}:{kind}": torch.tensor(value, dtype=torch.float64 if kind == "float" else None)}
    name = key.rpartition("/")[2]
    message = f"{type(optimizer).__name__} keeps '{name}', a {type(value).__name__}: no snapshot can hold it"
    raise RunFailed(message, "keep tensors and numbers for each weight, or take another optimizer")


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], parameters: Sequence[str] = ()
) -> None:
    """Give an optimizer over the same parameters the state of another, bit for bit; its hyper-parameters stay.

    Args:
        tensors: from :func:`optimizer_tensors`.
        parameters: as there; without them the parameters are in the same order.
    """
    document = optimizer.state_dict()
    document["state"] = {}
    numbers = {name: number for number, name in enumerate(parameters)}
    of_groups: list[tuple[int, str, Any]] = []
    for key, tensor in tensors.items():
        parameter, _, name = key.rpartition("/")
        name, _, kind = name.partition(":")
        number = numbers[parameter] if parameters else int(parameter)
        value = _NUMBERS[kind](tensor.item()) if kind else tensor.clone()
        if name.startswith(_GROUP):
            of_groups.append((number, name.removeprefix(_GROUP), value))
        else:
            document["state"].setdefault(number, {})[name] = value
    optimizer.load_state_dict(document)
    groups = _groups(optimizer)
    for number, name, value in of_groups:
        groups[number][name] = value
