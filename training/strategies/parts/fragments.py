"""Division of a model's trainable parameters into fragments, each of which is synchronised by itself.

The layers of a stack (parameters with a number in their name) are dealt out in turn: fragment ``p`` holds every
``P``-th layer from the ``p``-th on, the strided pattern of Streaming DiLoCo (arXiv 2501.18512, section 2.2). Other
parameters go to the smallest fragment, the largest parameter first; a tensor is cut where a fragment is full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.lazy import nn, torch

_SMALLEST_CUT = 16
"""No tensor is cut to fill less than one 16th of a fragment."""
_LAYER = re.compile(r"((?:.*?\.)?\d+)\.")


@dataclass(frozen=True)
class Piece:
    """A parameter, or a contiguous range of its elements."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    is_embedding: bool = False

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def values(self) -> torch.Tensor:
        """The parameter, or a flat view of the range."""
        if self.elements == self.parameter.numel():
            return self.parameter
        return self.parameter.detach().view(-1)[self.start : self.stop]


def fragments_of(model: nn.Module, count: int) -> list[list[Piece]]:
    """Divide the trainable parameters into ``count`` fragments, or fewer if there are too few elements.

    Depends on names and shapes only, so the result is equal on all members. In a fragment, embeddings come last.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    pieces = [
        Piece(name, parameter, 0, parameter.numel(), id(parameter) in embeddings)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    ]
    layers: dict[str, list[Piece]] = {}
    for piece in pieces:
        if match := _LAYER.match(piece.name):
            layers.setdefault(match[1], []).append(piece)
    if len(layers) < count:
        layers = {}
    fragments: list[list[Piece]] = [[] for _ in range(count)]
    for index, layer in enumerate(layers.values()):
        fragments[index % count] += layer
    placed = {piece.name for layer in layers.values() for piece in layer}
    loose = [piece for piece in pieces if piece.name not in placed]
    _fill(fragments, sorted(loose, key=lambda piece: -piece.elements), -(-size_of(pieces) // count))
    return [sorted(fragment, key=lambda piece: piece.is_embedding) for fragment in fragments if fragment]


def size_of(pieces: Sequence[Piece]) -> int:
    """Return the number of elements of a fragment."""
    return sum(piece.elements for piece in pieces)


def _fill(fragments: Sequence[list[Piece]], loose: Sequence[Piece], share: int) -> None:
    """Add each piece to the smallest fragment; cut a piece that is too large where that fragment reaches ``share``."""
    for piece in loose:
        remainder: Piece | None = piece
        while remainder is not None:
            smallest = min(fragments, key=size_of)
            capacity = share - size_of(smallest)
            cuts = remainder.elements > capacity >= share // _SMALLEST_CUT and remainder.parameter.is_contiguous()
            middle = remainder.start + capacity if cuts else remainder.stop
            smallest.append(replace(remainder, stop=middle))
            remainder = replace(remainder, start=middle) if cuts else None
