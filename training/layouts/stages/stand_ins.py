"""What takes the place of modules that other stages compute: no parameters, and none of the model's rules.

A stage runs the model's own forward from top to bottom. Blocks before its own give back their input; the last of them
gives back what arrived instead, so whatever the model computed before it (embedding, positions, dropout, scales) does
not matter. The block after its own ends the forward, so neither does what follows (norm, soft-capping, head).

These are modules beside the stage's blocks and not hooks on them: hooks may run again when a checkpointed block is
recomputed, while another micro-batch is under way.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from profiles.errors import RunFailed
from training.layouts.stages.stage import TensorSpec
from training.numerics.randomness import preserved_generators, seed_with


class StageEnd(Exception):
    """Ends the forward of a stage with what departs."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.tensors = tensors


class UnexpectedArrival(Exception):
    """What arrived has another shape, or is another number of tensors, than the model has there."""

    def __init__(self, arrived: Sequence[Any], expected: Sequence[Any]) -> None:
        super().__init__()
        self.arrived, self.expected = arrived, expected


class Crossing:
    """What crosses a stage's ends in the micro-batch under way; its stand-ins share it."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        """The hidden state that arrived and has not been taken."""
        self.memory: torch.Tensor | None = None
        """The encoder's output: arrived, or computed here."""
        self.device: torch.device | None = None
        """Where the stage computes; ``None`` between two forwards."""
        self.measured: list[TensorSpec] | None = None
        """While shapes are measured: those of what arrives."""
        self._seed: int | None = None

    @contextmanager
    def under_way(self, device: torch.device, seed: int | None) -> Iterator[None]:
        """Prepare for one forward; afterwards the generators are as before if there was a ``seed``."""
        self.device, self._seed = device, seed
        try:
            if seed is None:
                yield
            else:
                with preserved_generators(device):
                    self.reseed("")
                    yield
        finally:
            self.hidden = self.memory = self.measured = self.device = self._seed = None

    def reseed(self, name: str) -> None:
        """Give what follows the module ``name`` random numbers of its own, the same on every stage."""
        if self._seed is not None and self.device is not None:
            seed_with((self._seed, zlib.crc32(name.encode())), self.device)


def hidden_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden state among a block's arguments: the first."""
    return args[0] if args else next(iter(kwargs.values()))


def _shape_or_value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, int | float | str) else type(leaf)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return the shape and precision of a tensor that crosses."""
    return TensorSpec(tensor.shape, tensor.dtype)


def _check_shape(arrived: torch.Tensor, computed: torch.Tensor) -> None:
    """Raise :class:`UnexpectedArrival` unless what arrived has the shape of what the model computed in its place."""
    if arrived.shape != computed.shape:
        raise UnexpectedArrival([list(arrived.shape)], [list(computed.shape)])


class StandIn(nn.Module):
    """Has the attributes of the module whose place it takes: a model may ask a block for its kind, a convolution for
    its stride. Weights among them are zeros, which take no memory."""

    def __init__(self, module: nn.Module, crossing: Crossing) -> None:
        super().__init__()
        # beside torch's registries: stays on the meta device, and out of parameters() and state_dict()
        object.__setattr__(self, "_module", module.to("meta"))
        self._crossing = crossing

    def __getattr__(self, name: str) -> Any:
        if "_module" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return tree_map_only(torch.Tensor, self._as_zeros, getattr(self.__dict__["_module"], name))

    def _as_zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        # between two forwards a model may initialise what it takes for its weights: those on the meta device
        device = self._crossing.device
        return tensor if device is None else torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class Passed(StandIn):
    """A block of a stage before: gives its input back.

    Args:
        gives_pairs: blocks give ``(hidden state, None)`` instead of a tensor.
    """

    def __init__(self, module: nn.Module, crossing: Crossing, gives_pairs: bool) -> None:
        super().__init__(module, crossing)
        self._gives_pairs = gives_pairs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output(hidden_state(args, kwargs))

    def _output(self, hidden: Any) -> Any:
        return (hidden, None) if self._gives_pairs else hidden


class Arrived(Passed):
    """The block before the stage's own ones: gives what arrived."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        crossing = self._crossing
        if crossing.measured is not None:
            crossing.measured.insert(0, spec_of(hidden_state(args, kwargs)))
            raise StageEnd
        hidden, crossing.hidden = crossing.hidden, None
        if hidden is None:
            raise RunFailed("a stage began a forward for which nothing has arrived", "run it once for each micro-batch")
        _check_shape(hidden, hidden_state(args, kwargs))
        return self._output(hidden)


class Departed(StandIn):
    """A block or another module after the stage's own blocks: ends the forward with what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        hidden, memory = hidden_state(args, kwargs), self._crossing.memory
        raise StageEnd(hidden) if memory is None else StageEnd(hidden, memory)


class Shape(StandIn):
    """A module before the blocks: gives zeros of the shape that it would give."""

    def __init__(self, module: nn.Module, crossing: Crossing) -> None:
        super().__init__(module, crossing)
        object.__setattr__(self, "_outputs", {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = self._crossing.device
        # dense, unlike those of weights: the model may write into them
        zeros = partial(torch.zeros_like, device=device)
        return tree_map_only(torch.Tensor, zeros, self._on_meta(*args, **kwargs))

    @torch.no_grad()
    def _on_meta(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module gives, without numbers."""
        module, outputs = self.__dict__["_module"], self.__dict__["_outputs"]
        key = tuple(map(_shape_or_value, tree_leaves((args, kwargs))))
        if key not in outputs:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
            outputs[key] = module(*args, **kwargs)
        return outputs[key]


class EncoderOutput(Shape):
    """What ends the encoder, on the stages behind it: gives the encoder's output, which arrived."""

    def __init__(self, module: nn.Module, crossing: Crossing, ends_arrival: bool) -> None:
        super().__init__(module, crossing)
        self._ends_arrival = ends_arrival
        """Whether nothing else arrives."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        crossing = self._crossing
        shape = self._on_meta(*args, **kwargs)
        if crossing.measured is None:
            if crossing.memory is not None:
                _check_shape(crossing.memory, shape)
            return crossing.memory
        crossing.measured.append(spec_of(shape))
        if self._ends_arrival:
            raise StageEnd
        return super().forward(*args, **kwargs)
