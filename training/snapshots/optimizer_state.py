"""The state of an optimizer as tensors with names, for snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from profiles.errors import RunFailed

_NUMBERS: dict[str, type[bool] | type[int] | type[float]] = {"bool": bool, "int": int, "float": float}


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the state of any torch optimizer as ``<parameter>/<name>``, numbers in it as tensors too.

    What an optimizer changes in its groups of parameters is not in it.

    Args:
        parameters: names of its parameters, in its order; without them their numbers are taken.

    Raises:
        RunFailed: its state holds something else, which no snapshot can hold.
    """
    tensors: dict[str, Tensor] = {}
    for index, state in optimizer.state_dict()["state"].items():
        parameter = parameters[index] if parameters else index
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{parameter}/{name}"] = value
            elif isinstance(value, (int, float)):
                kind = next(name for name, number_type in _NUMBERS.items() if isinstance(value, number_type))
                tensors[f"{parameter}/{name}:{kind}"] = torch.tensor(
                    value, dtype=torch.float64 if kind == "float" else None
                )
            elif value is not None:
                message = (
                    f"{type(optimizer).__name__} keeps '{name}', a {type(value).__name__}: no snapshot can hold it"
                )
                raise RunFailed(message, "keep tensors and numbers for each weight, or take another optimizer")
    return tensors


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
    for key, tensor in tensors.items():
        parameter, _, name = key.rpartition("/")
        name, _, kind = name.partition(":")
        state = document["state"].setdefault(numbers[parameter] if parameters else int(parameter), {})
        state[name] = _NUMBERS[kind](tensor.item()) if kind else tensor.clone()
    optimizer.load_state_dict(document)
