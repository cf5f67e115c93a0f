"""Base class and registry of gradient compressors: what happens to a bucket between packing and unpacking.

A compressor is one file in this folder, with its options and costs; per-step averaging finds it by its name
(``allreduce.compressor``). There is one object for every bucket. In every step::

    compressor.start(values, step_context)  # when the bucket's gradients are final, mostly while backward runs
    compressor.continue_after_first_mean()  # after backward, in bucket order: start what depends on the first mean
    result = compressor.wait()              # the mean gradient: the same bits on every member
    compressor.settle()                     # accept the step; without it the state stays as it was before start

Every member calls them in the same order, so :meth:`Compressor.continue_after_first_mean` may start exchanges.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from profiles.declarations import OptionsByOwner, Section, import_all
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, MeanResult
from training.exchange.codecs import Codec
from training.lazy import torch


@dataclass(frozen=True)
class BucketContext:
    """The bucket and run that a compressor works for."""

    index: int
    """Index of the bucket; the same parameters on every member."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the bucket's tensors."""
    exchange: Exchange
    codec: Codec
    settings: StrategySettings
    total_steps: int = 0
    """Steps of the run."""
    seed: int = 0
    """Seed of the run."""
    momentum: float = 0.0
    """The optimizer's momentum, if the compressor has taken it over."""


@dataclass(frozen=True)
class StepContext:
    """One step."""

    step: int
    weight: float
    """Weight of this member's gradient; 0: it has none."""
    flags: bytes
    """One bit for each tensor with a gradient on this member, from the lowest bit; sent with the first mean."""


def unused(shapes: Sequence[Sequence[int]], flags: bytes) -> Iterator[slice]:
    """Yield the slices of a bucket's tensors that have no gradient on any member.

    Args:
        shapes: of all tensors of the bucket.
        flags: combined in a mean, see :attr:`StepContext.flags`.
    """
    bits, start = int.from_bytes(flags, "little"), 0
    for number, shape in enumerate(shapes):
        stop = start + math.prod(shape)
        if not bits >> number & 1:
            yield slice(start, stop)
        start = stop


@dataclass(frozen=True)
class Price:
    """Costs of a compressor, see :class:`~training.strategies.costs.CostModel`."""

    codecs: tuple[str, ...]
    """Codecs that it may use; its default first."""
    elements: Callable[[int], int]
    """Returns how many values are sent for a number of trainable parameters."""
    vectors: int
    """Fp32 vectors of all trainable parameters that it keeps, including the mean."""
    merge_ns: float
    """Nanoseconds of one core for each trainable parameter."""
    early: float
    """Share of the exchange that can start while backward runs."""
    source: str
    """Source of what is known about its loss, one line."""


class Compressor(ABC):
    """Base class: sends the gradients of one bucket."""

    name: ClassVar[str]
    """Name in settings."""
    summary: ClassVar[str]
    """A few words for lists."""
    options: ClassVar[type[Section]] = Section
    """Its options, which become those of ``allreduce``; so their names start with the compressor's."""
    clips: ClassVar[bool] = False
    """Whether each member's own gradient is clipped before compression, instead of the mean after it."""

    @classmethod
    @abstractmethod
    def price(cls, settings: OptionsByOwner) -> Price:
        """Return the costs with the options in ``settings``."""

    @classmethod
    def take_over(cls, optimizer: torch.optim.Optimizer) -> float:
        """Take over the optimizer's momentum before the first step, if the compressor applies it; return it.

        Raises:
            BadInput: it does not work with this optimizer.
        """
        return 0.0

    def __init__(self, context: BucketContext) -> None:
        self.context = context

    @abstractmethod
    def start(self, values: torch.Tensor, step_context: StepContext) -> None:
        """Start to send.

        Args:
            values: this member's gradients, flat fp32 without loss scale, zeros for missing ones. The compressor may
                keep and overwrite them.
        """

    def continue_after_first_mean(self) -> None:
        """Start what depends on the first mean."""

    @abstractmethod
    def wait(self) -> MeanResult:
        """Return the mean gradient, flat fp32, and the fate of this member's contribution."""

    @abstractmethod
    def settle(self) -> None:
        """Keep as residual what is not in the mean that :meth:`wait` returned."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a snapshot; their names contain the bucket's index."""
        return {}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """Return those of :meth:`tensors` that belong to the group."""
        return {}

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Restore this bucket from the :meth:`tensors` of all buckets.

        Args:
            device: of the gradients.
        """


C = TypeVar("C", bound=Compressor)
_registered: dict[str, type[Compressor]] = {}


def register(compressor: type[C]) -> type[C]:
    """Register a compressor under its name; a decorator.

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
