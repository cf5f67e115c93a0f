"""What is known of the tensors of a forward on the meta device: from which modules and weights each was computed, and
the numbers of those that were computed from inputs alone, which models look into (a mask, a padding token)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_SHAPE_ONLY = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_")
"""Begins of the names of operations that read no number of their inputs."""
_UNKNOWN = object()


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates it in part
    """For each tensor of a forward: after which blocks the modules were left that it was computed from.

    Modules before the blocks count as block -1. A tensor that depends on inputs and no module has no origins.

    Args:
        check: is given the origins of what each operation reads.
        read: is given each weight that an operation reads, and returns its origins.
        assumes_numbers: whether a model that looks into unknown numbers is given ones; else that is an error.
    """

    def __init__(
        self,
        check: Callable[[frozenset[int]], None],
        read: Callable[[nn.Parameter], frozenset[int]],
        assumes_numbers: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check, self._read, self._assumes_numbers = check, read, assumes_numbers
        self._origins: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}
        self._numbers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors on the meta device, with their numbers, by id."""

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

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation of the meta device gives for the numbers of its inputs, or :data:`_UNKNOWN`."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor | torch.device)]
        on_meta = [leaf for leaf in leaves if _is_meta(leaf)]
        if not on_meta or "empty" in func.overloadpacket.__name__:
            return _UNKNOWN
        if any(isinstance(leaf, torch.Tensor) and id(leaf) not in self._numbers for leaf in on_meta):
            return _UNKNOWN
        numbers = tree_map_only(torch.Tensor, self._numbers_of, (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda device: torch.device("cpu"), numbers)
        return func(*args, **kwargs)

    def _note_numbers(self, outputs: Sequence[object], computed: object) -> None:
        if computed is _UNKNOWN:
            for leaf in outputs:  # which may have been written into
                self._numbers.pop(id(leaf), None)
            return
        pairs = zip(outputs, tree_leaves(computed), strict=True)
        self._numbers |= {id(leaf): (leaf, number) for leaf, number in pairs if isinstance(leaf, torch.Tensor)}

    def _numbers_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._numbers[id(tensor)][1] if _is_meta(tensor) else tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        computed = self._computed(func, args, kwargs)
        try:
            output = func(*args, **kwargs)
        except RuntimeError:  # it needs numbers, which the meta device has not
            if computed is not _UNKNOWN:
                output = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), computed)
            elif self._assumes_numbers and func is torch.ops.aten._local_scalar_dense.default:
                output = torch.ones((), dtype=args[0].dtype).item()
            else:
                raise
        self._note_numbers(tree_leaves(output), computed)
        if not func.overloadpacket.__name__.startswith(_SHAPE_ONLY) and (origins := self.of((args, kwargs))):
            self._check(origins)
            self.set(output, origins)
        return output


def _is_meta(leaf: torch.Tensor | torch.device) -> bool:
    return (leaf.device if isinstance(leaf, torch.Tensor) else leaf).type == "meta"
