"""What a strategy gives to the trainer.

The trainer calls, for every optimizer step::

    strategy.begin_step(step, weight, scale)  # before the first backward
    strategy.last_backward()              # before the backward of the last micro-batch
    strategy.gradients()                  # after it: gradients are final (exchanged or local)
    optimizer.step()
    report = strategy.end_step()          # weights may be exchanged here
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from profiles.declarations import Section
from profiles.schema import StrategySettings
from training.events import SyncEvent
from training.exchange.base import Exchange, Traffic
from training.strategies.costs import CostModel, Rhythm, Start

if TYPE_CHECKING:
    import torch
    from torch import nn


def sync_event(
    traffic: Traffic, round_: int, members: Sequence[int], weight_hash: str, drift: float | None
) -> SyncEvent:
    """Return what a synchronisation that took this traffic tells; the trainer adds the step.

    Args:
        drift: see :class:`~training.events.SyncEvent`.
    """
    return SyncEvent(
        step=0,
        round=round_,
        bytes_sent=traffic.bytes_sent,
        bytes_received=traffic.bytes_received,
        seconds=traffic.transfer_seconds,
        wait=traffic.wait_seconds,
        members=list(members),
        weight_hash=weight_hash,
        drift=drift,
    )


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy needs to know of the run."""

    settings: StrategySettings
    total_steps: int
    seed: int
    warn: Callable[[str], None] = field(default=lambda message: None)
    """Takes one line for the person who watches."""
    start: Start = "scratch"
    """What the model is when training begins."""


class Strategy(ABC):
    """When members exchange gradients or weights, and how they merge them.

    A strategy is one file of this folder, with everything that others know of it: they find it through the registry.
    """

    name: ClassVar[str]
    """In settings."""
    summary: ClassVar[str]
    """What it does, in one line for lists."""
    options: ClassVar[type[Section]] = Section
    """Options of its own, called ``name.option`` in settings; ``context.settings.of(options)`` gives their values."""
    costs: ClassVar[CostModel | None] = None
    """What it costs; ``None``: not known, so that it is only taken where a person asks for it."""
    is_usual: ClassVar[bool] = False
    """Whether it is the one for workers between whom links cost nothing, and for one machine alone."""

    @classmethod
    def codec(cls, settings: StrategySettings) -> str:
        """Return the name of the codec: the one that is set, or its own."""
        own = cls.costs.codecs[0] if cls.costs is not None else "fp32"
        return own if settings.codec == "auto" else settings.codec

    @classmethod
    def rhythm(cls, settings: StrategySettings) -> Rhythm:
        """Return when members synchronise with these settings."""
        return Rhythm()

    @classmethod
    def rehearsed(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        """Return settings with which synchronisations are at most ``interval`` steps apart, to try them out."""
        return settings

    def __init__(self, context: StrategyContext) -> None:
        self.context = context

    @abstractmethod
    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        """Take hold of the trainable parameters. They are equal on all members where a run begins; a partial strategy
        may be attached to others after a resume, or as a newcomer."""

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        """A step begins.

        Args:
            weight: what this member's loss is a mean over in this step.
            scale: what its loss is multiplied by; ``None`` without loss scaling.
        """

    def last_backward(self) -> None:
        """The next backward completes the step's gradients."""

    def backward_again(self) -> None:
        """The step's backward passes begin anew, from gradients of zero: one of them ran out of memory.

        What was exchanged already holds whole gradients of this step, and stays.
        """

    def gradients(self) -> None:
        """Make ``p.grad`` final before clipping and the optimizer."""

    @property
    def steps_to_average(self) -> int | None:
        """How many steps after the one that ends next all hold the average of what this member holds now.

        ``None``: its weights are not averaged then.
        """
        return 0

    @abstractmethod
    def end_step(self) -> SyncEvent | None:
        """Called after the optimizer step; a report if a synchronisation ended here (without its step)."""

    def finish(self) -> SyncEvent | None:
        """Synchronise what is left at the end of the training; the result is what :meth:`consensus` holds after it."""
        return None

    @property
    @abstractmethod
    def synchronised(self) -> bool:
        """Whether members stand at a synchronisation point: all after the same step, with no exchange under way and no
        step of their own since the last one. The answer is the same on all; the weights need not be."""

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Ranks whose contributions the last synchronisation of this strategy held, ascending."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the strategy's own state for a snapshot (outer momentum, error feedback, anchor)."""
        return {}

    def state(self) -> dict[str, Any]:
        """JSON-able state for a snapshot (round, steps since the last synchronisation)."""
        return {}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """The part of :meth:`tensors` that belongs to the group, not to this member."""
        return {}

    def newcomer_state(self) -> dict[str, Any]:
        """The part of :meth:`state` that belongs to the group, not to this member."""
        return {}

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold in the model the weights that stand for the group: they are evaluated, and saved at the end.

        Entered at a synchronisation point by all members or by none, so it may exchange. All hold the same weights in
        it, and their own again after it.
        """
        yield

    @contextmanager
    def for_newcomer(self) -> Iterator[None]:
        """Hold in the model the weights that a newcomer starts from, at a synchronisation point.

        Entered by one member alone, so it exchanges nothing.
        """
        yield

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Take back what :meth:`tensors` and :meth:`state` gave."""
