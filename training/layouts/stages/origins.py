"""From what each tensor of a forward was computed: which modules' outputs, and which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHAPE_ONLY = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_")
"""Begins of the names of operations that read no number of their inputs."""


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates it in part
    """For each tensor of a forward: after which blocks the modules were left that it was computed from.

    Modules before the blocks count as block -1. A tensor that depends on inputs and no module has no origins.

    Args:
        check: is given the origins of what each operation reads.
        read: is given each weight that an operation reads, and returns its origins.
    """

    def __init__(self, check: Callable[[frozenset[int]], None], read: Callable[[nn.Parameter], frozenset[int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check, self._read = check, read
        self._origins: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}

    def of(self, values: object) -> frozenset[int]:
        """Return the origins of all tensors in ``values``."""
        return frozenset().union(*map(self._of, tree_leaves(values)))

    def set(self, values: object, origins: frozenset[int]) -> None:
        """Set the origins of all tensors in ``values``."""
        # with the tensor, whose id is another's once it is gone
        self._origins |= {id(leaf): (leaf, origins) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}

    def _of(self, leaf: object) -> frozenset[int]:
        if isinstance(leaf, nn.Parameter):
            return self._read(leaf)
        return self._origins[id(leaf)][1] if id(leaf) in self._origins else frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.overloadpacket.__name__.startswith(_SHAPE_ONLY) and (origins := self.of((args, kwargs))):
            self._check(origins)
            self.set(output, origins)
        return output
