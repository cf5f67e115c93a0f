"""The trainable parameters of a model in fragments, each of which members merge by itself.

The layers of a stack (what has a number in its name) go to the fragments in turns: fragment ``p`` holds every ``P``-th
layer from the ``p``-th on, the strided pattern of Streaming DiLoCo (arXiv 2501.18512, section 2.2). What is in no layer
goes where least is, the largest first, and a tensor is cut where a fragment has its share.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.lazy import nn, torch

_LEAST = 16
"""No tensor is cut for less than this part of a fragment."""
_LAYER = re.compile(r"((?:.*?\.)?\d+)\.")


@dataclass(frozen=True)
class Piece:
    """A parameter, or a run of its elements."""

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
        """The parameter, or a view of what is meant of it."""
        if self.elements == self.parameter.numel():
            return self.parameter
        return self.parameter.detach().view(-1)[self.start : self.stop]


def fragments_of(model: nn.Module, count: int) -> list[list[Piece]]:
    """Return the trainable parameters in ``count`` fragments, fewer where there are not so many elements.

    The same on all members: it follows from names and shapes. In each fragment embeddings come last.
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
    """Return the elements of a fragment."""
    return sum(piece.elements for piece in pieces)


def _fill(fragments: Sequence[list[Piece]], loose: Sequence[Piece], share: int) -> None:
    """Give each piece to the fragment with the least; of one that is too large what brings that to its ``share``."""
    for piece in loose:
        remainder: Piece | None = piece
        while remainder is not None:
            smallest = min(fragments, key=size_of)
            capacity = share - size_of(smallest)
            cuts = remainder.elements > capacity >= share // _LEAST and remainder.parameter.is_contiguous()
            middle = remainder.start + capacity if cuts else remainder.stop
            smallest.append(replace(remainder, stop=middle))
            remainder = replace(remainder, start=middle) if cuts else None
