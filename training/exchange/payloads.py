"""Payloads that members exchange: JSON documents, parsed so that an invalid one harms only its sender, and the state
that a newcomer or a member without its snapshot takes over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch

from training.exchange.base import ExchangeError, JoiningState


def documents(gathered: Mapping[int, bytes]) -> dict[int, dict[str, Any]]:
    """Return the JSON object of every member by rank, ascending; invalid ones are left out, equally on all members."""
    by_rank: dict[int, dict[str, Any]] = {}
    for rank in sorted(gathered):
        try:
            document = json.loads(gathered[rank])
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            by_rank[rank] = document
    return by_rank


def figures_by_rank(gathered: Mapping[int, bytes]) -> dict[int, dict[str, float]]:
    """Return the numbers of every member by rank, ascending; anything that is no valid number is left out, NaN is
    one."""
    return {
        rank: {name: float(value) for name, value in document.items() if _is_figure(value)}
        for rank, document in documents(gathered).items()
    }


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -1e300 < value < 1e300 or value != value  # NaN is not itself


_STATE = "state"
_OPERATIONS = "operations"


def state_to_bytes(joining: JoiningState) -> bytes:
    """Return the joining state as one safetensors blob; tensors of any device and any dtype that safetensors
    supports."""
    tensors = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in joining.tensors.items()}
    data: bytes = safetensors.torch.save(
        tensors, metadata={_STATE: json.dumps(joining.state), _OPERATIONS: str(joining.operations)}
    )
    return data


def state_from_bytes(data: bytes) -> JoiningState:
    """Parse what :func:`state_to_bytes` wrote.

    Raises:
        ExchangeError: it is invalid.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        state, operations = json.loads(metadata[_STATE]), int(metadata[_OPERATIONS])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ExchangeError(f"the training state that arrived cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise ExchangeError("the training state that arrived cannot be read: it is not a JSON object")
    return JoiningState(tensors, state, operations)
