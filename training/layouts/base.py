"""The seam between the trainer and how one member's model lies on its devices, seen from the process of one device."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from profiles.schema import Profile
from training.data.batches import StepBatches
from training.exchange.base import Exchange, ExchangeError, JoiningState, Traffic
from training.hardware.device import Precision
from training.layouts.carrier import Carrier
from training.optimization.backward import MakeBatches
from training.snapshots.pieces import Rows
from training.strategies.base import Strategy
from training.tasks.base import Answer, Batch, Task
from training.tasks.outputs.showcase import SampleOutput


class StepBackward(Protocol):
    """Computes the gradients of a step."""

    max_micro_batch: int
    """Largest micro-batch in samples; 0: the member's batch size."""

    def run(
        self, batches: StepBatches, strategy: Strategy, make_batches: MakeBatches, warn: Callable[[str], None]
    ) -> tuple[StepBatches, list[torch.Tensor]]:
        """Return the batches as they were computed, and the share of the loss that each contributes.

        Raises:
            RunFailed: a single sample does not fit into memory.
        """


class Layout(ABC):
    """What a process holds of its member's model, and what it does together with the member's other devices.

    All devices of a member call the same methods in the same order, with the same batches.
    """

    model: nn.Module
    """What this device holds, under the names of the whole model: plain parameters, which the optimizer, strategies and
    snapshots see; set by :meth:`build`."""
    names: Sequence[str]
    """Of the member's processes, for messages."""
    part: tuple[int, int] = (0, 1)
    """Number of what this device holds among the parts of the model, from 0, and how many parts there are."""
    carrier: Carrier | None = None
    """To the member's other devices; ``None``: there are none."""
    background: Carrier | None = None
    """Likewise, for what is sent beside the training; ``None``: all are on one machine."""
    traffic: Traffic
    """Of the member's devices among one another."""
    optimizer: torch.optim.Optimizer
    """Of :attr:`model`; set by the trainer."""
    _agreed_members: tuple[int, ...] = ()

    @property
    def module(self) -> nn.Module:
        """What computes: :attr:`model`, or modules whose weights are gathered from all devices."""
        return self.model

    @property
    def rows(self) -> Mapping[str, Rows]:
        """The rows of each weight that :attr:`model` has; without an entry it has all."""
        return {}

    @property
    def place(self) -> dict[str, Any]:
        """What a snapshot of :attr:`model` says of it."""
        return {"part": self.part, "rows": self.rows}

    def weights(self, values: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the weights of which this device has a part, whole, by name; all devices do so together.

        Args:
            values: whether trained ones need their values; without, they are told by ``requires_grad``.

        Raises:
            ExchangeError: a device is lost.
        """
        return self.model.named_parameters()

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds for which each of the member's devices computed in the last step; empty: there is only one."""
        return ()

    @abstractmethod
    def build(self, task: Task, profile: Profile, precision: Precision) -> nn.Module:
        """Make :attr:`model`, on its device, and :attr:`module` in training mode; return the model.

        Raises:
            BadInput: it cannot be read, or not be held so.
        """

    @abstractmethod
    def backward(self, release: Callable[[], None], total_steps: int) -> StepBackward:
        """Return what computes the gradients of all steps.

        Args:
            release: frees memory that is not strictly needed.
        """

    @abstractmethod
    def trained_weights(self) -> int:
        """Return the number of weights of the whole model that are trained."""

    def ties_trained_weights(self) -> bool:
        """Whether several devices of the member hold the same trained weight."""
        return False

    def align_ties(self, strategy: Strategy) -> None:
        """Make trained weights alike of which several devices of the member have a copy.

        Raises:
            ExchangeError: a device is lost.
        """

    @abstractmethod
    def norm(self) -> float | None:
        """Return the norm of the member's whole gradient; ``None``: this device holds all of it.

        Raises:
            ExchangeError: a device is lost.
        """

    @abstractmethod
    def answer(self, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        """Return the sums and texts of :meth:`training.tasks.base.Task.answer`, the same on all devices.

        Raises:
            ExchangeError: a device is lost.
        """

    @abstractmethod
    def sample_output(self, batch: Batch) -> SampleOutput:
        """Return the result of :meth:`training.tasks.base.Task.sample_output`, the same on all devices.

        Raises:
            ExchangeError: a device is lost.
        """

    @abstractmethod
    def gather(self, payload: bytes) -> list[bytes]:
        """Return a small payload of every device, in their order; it is the same list on all.

        Raises:
            ExchangeError: a device is lost.
        """

    @property
    def is_part(self) -> bool:
        """Whether this device holds a part of the model, and others of the member the rest."""
        return len(self.names) > 1

    def traffic_with(self, exchange: Exchange) -> Traffic:
        """Return a copy of what this device has exchanged with those of its member and, by ``exchange``, others."""
        return exchange.traffic.plus(self.traffic)

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that the member's devices give."""
        return max(map(int, self.gather(str(number).encode())))

    def agreed(self, members: Collection[int]) -> tuple[int, ...]:
        """Return the ranks among ``members`` that are so on all devices: each sees members come and go on its own."""
        views = (set(json.loads(payload)) for payload in self.gather(json.dumps([*members]).encode()))
        return tuple(sorted(set.intersection(*views)))

    def members(self, strategy: Strategy, exchange: Exchange, step: int | None = None) -> tuple[int, ...]:
        """Return the members of the last synchronisation as all devices of this one see them; these are the members of
        the exchange from here on.

        Copies of a trained weight are compared where the members have changed, and every ``verify_interval`` steps or
        at every rarer synchronisation: a contribution may have been late for one of them.

        Args:
            step: after which the members have met; ``None``: they were asked for since.
        """
        members = self.agreed(strategy.members)
        exchange.note_agreed(members)
        if members != self._agreed_members or (step is not None and _compares_ties(strategy, step)):
            self._agreed_members = members
            self.align_ties(strategy)
        return members

    def fetch_state(self, exchange: Exchange) -> JoiningState | None:
        """Return the state with which this member joins others that train; ``None``: they begin together. Each device
        gets that of its part from another member's. They join when all have that of the same step: a device that has
        joined would keep the others waiting for those that have not.

        Raises:
            ExchangeError: a device is lost.
        """
        if len({*self.gather(b"joins" if exchange.is_newcomer else b"begins")}) > 1:
            raise ExchangeError("the other members train already with some of its devices, and not with all")
        if not exchange.is_newcomer:
            return None

        def all_have_it(joining: JoiningState | None) -> bool:
            steps = {*self.gather(str(joining.state["step"]).encode() if joining is not None else b"")}
            return len(steps) == 1 and b"" not in steps

        return exchange.fetch_state(confirm=all_have_it if self.is_part else None)

    def agree(self, exchange: Exchange, is_dropped: bool) -> tuple[bool, bool]:
        """Return whether this member has to publish its state for newcomers, and whether it may leave if it is to, at a
        synchronisation: both only where all its devices can."""
        publishes = exchange.must_publish_state
        if not self.is_part or exchange.engine == "solo":
            return publishes, True
        views = [json.loads(payload) for payload in self.gather(json.dumps([publishes, is_dropped]).encode())]
        return all(publishes for publishes, _ in views), all(is_dropped for _, is_dropped in views)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any device."""
        return b"set" in self.gather(b"set" if flag else b"")

    @abstractmethod
    def save(self, run_dir: Path) -> None:
        """Save the trained model into a run folder.

        Raises:
            MusterError, OSError: it cannot be written.
        """

    def save_copy(self, run_dir: Path) -> str:
        """Save the model in case that the machine that delivers it is lost; return the error, empty if it was saved, or
        each device has a part only."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Leave the other devices, at the end of a training that did not fail."""


def _compares_ties(strategy: Strategy, step: int) -> bool:
    """Whether copies of a weight are compared at the synchronisation after a step: by the step alone, so that all
    members do so together, newcomers too."""
    settings = strategy.context.settings
    interval, before = settings.verify_interval, step - strategy.sync_schedule(settings).interval
    return interval > 0 and step // interval > before // interval
