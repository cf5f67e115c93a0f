"""An anchor as bytes: one safetensors file whose metadata holds the JSON document."""

from __future__ import annotations

import json

import safetensors.torch

from training.exchange.base import Anchor, ExchangeError

_STATE = "state"
_OPERATIONS = "operations"


def anchor_to_bytes(anchor: Anchor) -> bytes:
    """Return the anchor as one safetensors blob; tensors of any device and dtype that safetensors knows."""
    tensors = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in anchor.tensors.items()}
    data: bytes = safetensors.torch.save(
        tensors, metadata={_STATE: json.dumps(anchor.state), _OPERATIONS: str(anchor.operations)}
    )
    return data


def anchor_from_bytes(data: bytes) -> Anchor:
    """Read what :func:`anchor_to_bytes` wrote.

    Raises:
        ExchangeError: it is something else.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        state, operations = json.loads(metadata[_STATE]), int(metadata[_OPERATIONS])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ExchangeError(f"the anchor cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise ExchangeError("the anchor cannot be read: its state is not a JSON object")
    return Anchor(tensors, state, operations)
