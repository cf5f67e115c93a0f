"""Parts of tensors in snapshots: where the devices of a member hold some rows of every weight, each writes its own.

Tensors go by the names of the whole model's weights, so rows of one part are put together with those of others, and a
whole tensor is divided, whichever layout wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from profiles.errors import RunFailed

_OF_THE_MODEL = {"model", "buffers", "best", "optimizer", "ema"}
"""Groups of a snapshot's tensors that are named after the model's."""
Cut = Callable[[str, Sequence[int]], tuple[slice, ...] | None]
"""Takes name and shape of a stored tensor; returns what is needed of it by dimension, ``None``: nothing."""


class Rows(NamedTuple):
    """The rows of a weight, the elements of one of its dimensions, that a device holds."""

    start: int
    end: int
    """Exclusive."""
    total: int
    """Of the whole weight."""
    dimension: int = 0


def weight_of(name: str) -> str:
    """Return the name of the weight or buffer that a snapshot's tensor belongs to; empty: it belongs to none."""
    group, _, rest = name.partition("/")
    if group not in _OF_THE_MODEL:
        return ""
    return rest.rpartition("/")[0] if group == "optimizer" else rest


class Assembly:
    """Puts the tensors that a device needs together from the parts of a snapshot, which are read one after another.

    Args:
        wanted: whether a tensor is needed.
        rows: those that the device needs of each weight; without an entry it needs all.
    """

    def __init__(self, wanted: Callable[[str], bool], rows: Mapping[str, Rows]) -> None:
        self._wanted, self._rows = wanted, rows
        self._held: dict[str, Rows] = {}
        self._pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def begin(self, held: Mapping[str, Sequence[int]]) -> None:
        """Begin a part that holds these rows of weights, and whole ones without an entry."""
        self._held = {name: Rows(*numbers) for name, numbers in held.items()}

    def cut(self, name: str, shape: Sequence[int]) -> tuple[slice, ...] | None:
        """Return what is needed of a tensor of the part, see :data:`Cut`."""
        weight, cuts = weight_of(name), [slice(None)] * len(shape)
        held, needed = (rows.get(weight) if shape else None for rows in (self._held, self._rows))
        if not self._wanted(name) or (held is None and name in self._pieces):
            return None
        if needed is not None:
            start, end, offset = needed.start, needed.end, 0
            if held is not None and held.dimension == needed.dimension:
                start, end, offset = max(start, held.start), min(end, held.end), held.start
            cuts[needed.dimension] = slice(start - offset, end - offset) if start < end else slice(0, 0)
        return tuple(cuts)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what was read of the part."""
        for name, tensor in tensors.items():
            held = self._held.get(weight_of(name))
            self._pieces.setdefault(name, []).append((held.start if held else 0, tensor))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what was put together.

        Raises:
            RunFailed: a part with needed rows was not among them.
        """
        return {name: self._joined(name, pieces) for name, pieces in self._pieces.items()}

    def _joined(self, name: str, pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        held, needed = (rows.get(weight_of(name)) for rows in (self._held, self._rows))
        tensors = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
        if held is None or not tensors[0].ndim:
            return tensors[0]
        tensor, is_cut = torch.cat(tensors, held.dimension), needed is not None and needed.dimension == held.dimension
        count = needed.end - needed.start if needed is not None and is_cut else held.total
        if tensor.shape[held.dimension] != count:
            message = f"{tensor.shape[held.dimension]} of {count} rows of {name} are here"
            raise RunFailed(message, "resume on the machines that hold all parts of the snapshot")
        return tensor
