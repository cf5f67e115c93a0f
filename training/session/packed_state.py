"""What objects of a script say of their state, as a tensor of a snapshot: bit for bit and with the types that it has.

JSON would turn the keys of a scheduler's milestones into texts, and knows neither tuples nor tensors. What is read is
read by ``torch.load(weights_only=True)``, which runs no code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from profiles.errors import BadInput
from training.snapshots.snapshot_store import Snapshot


def pack_state(state: Any, owner: str) -> torch.Tensor:
    """Return a state as bytes, of type ``uint8``.

    Args:
        owner: whose state it is, for the message.

    Raises:
        BadInput: it holds an object that a snapshot cannot have, such as one of a class of the script.
    """
    stream = io.BytesIO()
    try:
        torch.save(state, stream)
        packed = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        unpack_state(packed)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        problem = f"the state of {owner} cannot be part of a snapshot: {reason}"
        raise BadInput(
            problem, "let its state_dict() return numbers, texts, tensors, lists and dictionaries"
        ) from error
    return packed


def unpack_state(packed: torch.Tensor) -> Any:
    """Return what :func:`pack_state` was given; tensors on the CPU."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)


class StatefulObjects:
    """Loaders and schedulers of a script, in the order in which it prepares them."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._restored = 0
        """How many of them have been restored."""

    def add(self, stateful: Any) -> None:
        """Add an object that has ``state_dict()`` and ``load_state_dict()``.

        Raises:
            BadInput: its state cannot be part of a snapshot.
        """
        pack_state(stateful.state_dict(), type(stateful).__name__)
        self._objects.append(stateful)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the states of all, by their name in a snapshot."""
        names = ", ".join(type(stateful).__name__ for stateful in self._objects)
        return {"stateful": pack_state([stateful.state_dict() for stateful in self._objects], names)}

    def restore(self, snapshot: Snapshot | None) -> None:
        """Restore those that were added since the last call."""
        if snapshot is not None:
            states = unpack_state(snapshot.tensors["stateful"])[self._restored :]
            for stateful, state in zip(self._objects[self._restored :], states, strict=False):
                stateful.load_state_dict(state)
            self._restored = len(self._objects)
