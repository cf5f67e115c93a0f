"""What happens to the gradients of one bucket between packing and unpacking.

A compressor is one file of this folder, with its options and what it costs; per-step averaging finds it by its name
(``allreduce.compressor``). There is an object for every bucket, which is called in every step::

    compressor.start(values, turn)    # as soon as the bucket's gradients are final, mostly while backward runs
    compressor.go_on()                # after backward, in the order of the buckets: start what follows the first mean
    result = compressor.wait()        # the mean gradient: the same bits on every member
    compressor.settle()               # the step counts; without it everything stays as it was before start

Every member calls them in the same order, so :meth:`Compressor.go_on` may start exchanges.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from profiles.declarations import Owning, Section, import_all
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, MeanResult
from training.exchange.codecs import Codec
from training.lazy import torch


@dataclass(frozen=True)
class BucketContext:
    """Where a compressor works."""

    index: int
    """Of its bucket; the same parameters on every member."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the bucket's tensors."""
    exchange: Exchange
    codec: Codec
    settings: StrategySettings
    total_steps: int = 0
    """Of the run."""
    seed: int = 0
    """The run's."""
    momentum: float = 0.0
    """Of the optimizer, where the compressor has taken that over."""


@dataclass(frozen=True)
class StepContext:
    """One step."""

    step: int
    weight: float
    """Of this member's gradient; 0: it has none."""
    flags: bytes
    """Which of the tensors have a gradient here, a bit each from the lowest one on; they go with the first mean."""


def unused(shapes: Sequence[Sequence[int]], flags: bytes) -> Iterator[slice]:
    """Yield where in a bucket those of its tensors are that have no gradient on any member: so nobody gets one.

    Args:
        shapes: of all its tensors.
        flags: of a mean, see :attr:`StepContext.flags`.
    """
    bits, start = int.from_bytes(flags, "little"), 0
    for number, shape in enumerate(shapes):
        stop = start + math.prod(shape)
        if not bits >> number & 1:
            yield slice(start, stop)
        start = stop


@dataclass(frozen=True)
class Price:
    """What a compressor costs, as :class:`~training.strategies.costs.CostModel` has it."""

    codecs: tuple[str, ...]
    """What may carry it; its own first."""
    elements: Callable[[int], int]
    """How many values of a codec travel, by the trainable parameters."""
    vectors: int
    """Vectors of all trainable parameters in fp32 that it keeps, the mean among them."""
    merge_ns: float
    """Nanoseconds of one core for a trainable parameter."""
    early: float
    """Share of the exchange that can begin while backward runs."""
    source: str
    """What is known of its loss, in a line."""


class Compressor(ABC):
    """How the gradients of one bucket travel."""

    name: ClassVar[str]
    """In settings."""
    summary: ClassVar[str]
    """What it does, in a few words."""
    options: ClassVar[type[Section]] = Section
    """Options of its own, which are ``allreduce``'s; so their names begin with its name."""
    clips: ClassVar[bool] = False
    """Whether each member's own gradient is clipped before it, and not the mean after it."""

    @classmethod
    @abstractmethod
    def price(cls, settings: Owning) -> Price:
        """Return what it costs with its options in ``settings``."""

    @classmethod
    def take_over(cls, optimizer: torch.optim.Optimizer) -> float:
        """Take from the optimizer what the compressor does itself, before the first step; return the momentum.

        Raises:
            BadInput: it does not go with this optimizer.
        """
        return 0.0

    def __init__(self, context: BucketContext) -> None:
        self.context = context

    @abstractmethod
    def start(self, values: torch.Tensor, step_context: StepContext) -> None:
        """Start to send.

        Args:
            values: this member's gradients, flat fp32 without a loss scale, zeros where it has none. The compressor may
                keep and overwrite them.
        """

    def go_on(self) -> None:
        """Start what follows from the first mean."""

    @abstractmethod
    def wait(self) -> MeanResult:
        """Return the mean gradient, flat fp32, and what became of this member's contribution."""

    @abstractmethod
    def settle(self) -> None:
        """Keep what is not in the mean that :meth:`wait` gave."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of a member's snapshot; their names tell buckets apart."""
        return {}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """Those of them that belong to the group."""
        return {}

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Take back what :meth:`tensors` of all buckets gave.

        Args:
            device: of the gradients.
        """


C = TypeVar("C", bound=Compressor)
_registered: dict[str, type[Compressor]] = {}


def register(compressor: type[C]) -> type[C]:
    """Make a compressor known under its name: a decorator.

    Raises:
        ValueError: the name is taken.
    """
    if compressor.name in _registered:
        raise ValueError(f"compressor '{compressor.name}': the name is taken")
    _registered[compressor.name] = compressor
    return compressor


@functools.cache
def _load() -> None:
    import_all(Path(__file__).parent, __package__)


def compressors() -> dict[str, type[Compressor]]:
    """Return all compressors by name."""
    _load()
    return dict(sorted(_registered.items(), key=lambda item: (item[0] != "none", item[0])))


def sections() -> Sequence[type[Section]]:
    """Return the options of all compressors that have some."""
    return [compressor.options for compressor in compressors().values() if compressor.options is not Section]
