"""The exchange of the devices that hold the same part of each member's model: a column.

A strategy is given the part as if it were the model, and a column as if it were the members. Each has a mesh and a
coordinator of its own, so parts may differ in size, and in the operations that they need.

A trained weight that several devices of a member hold, as a tied embedding, is in several columns. Where a member is
lost in the middle of an exchange, one column may have its contribution and another not: :func:`align_ties` keeps the
copies from being different from then on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.exchange.base import (
    JOINING_DEADLINE,
    Contribution,
    Exchange,
    Group,
    JoiningState,
    MeanResult,
    Pending,
)
from training.exchange.codecs import CastCodec, codec_by_name
from training.exchange.residuals import Residual
from training.layouts.base import Layout
from training.layouts.carrier import Carrier, gather_among
from training.layouts.messages import as_bytes
from training.records.plan import RunPlan
from training.strategies.base import Strategy
from training.strategies.registry import strategy_class
from training.strategies.user_strategy import load_user_strategy
from training.strategies.weights import trainable

T = TypeVar("T")


class ColumnExchange(Exchange):
    """One member's endpoint of a column, in which members have their own ranks.

    Args:
        mesh: of the column, where this process has its rank among all processes of the run.
        processes: ranks of the column's processes, by member.
    """

    def __init__(self, mesh: Exchange, processes: Sequence[int]) -> None:
        self._mesh, self._processes = mesh, processes
        self._members = {process: member for member, process in enumerate(processes)}
        self._agreed = self._of(process for process in mesh.members if process in self._members)
        self.engine, self.rank, self.traffic = mesh.engine, self._members[mesh.rank], mesh.traffic

    @property
    def members(self) -> tuple[int, ...]:
        return self._agreed

    def note_agreed(self, members: tuple[int, ...]) -> None:
        self._agreed = members

    @property
    def is_newcomer(self) -> bool:
        return self._mesh.is_newcomer

    @property
    def must_publish_state(self) -> bool:
        return self._mesh.must_publish_state

    def expect_model(self, elements: int) -> None:
        self._mesh.expect_model(elements)

    def residual(self, stream: str) -> Residual | None:
        return self._mesh.residual(stream)

    def restore_residual(self, stream: str, residual: Residual) -> None:
        self._mesh.restore_residual(stream, residual)

    def publish_state(self, joining: JoiningState) -> None:
        self._mesh.publish_state(joining)

    def fetch_state(self, timeout: float = JOINING_DEADLINE) -> JoiningState:
        return self._mesh.fetch_state(timeout)

    def give_up(self, why: str) -> None:
        self._mesh.give_up(why)

    def close(self) -> None:
        self._mesh.close()

    def _of(self, processes: Iterable[int]) -> tuple[int, ...]:
        """Return the members of some processes."""
        return tuple(self._members[process] for process in processes)

    def _next_operation(self, name: str, members: Collection[int] | None) -> tuple[str, Group]:
        processes = None if members is None else [self._processes[member] for member in members]
        operation = self._mesh._next_operation(name, processes)
        self.operations = self._mesh.operations
        return operation

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        return _Translated(self._mesh._start_mean(contribution, waits), self._mean)

    def _mean(self, result: MeanResult) -> MeanResult:
        return replace(result, members=self._of(result.members), refused=self._of(result.refused))

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        pending = self._mesh._start_gather(name, payload, group, waits)
        return _Translated(pending, lambda gathered: {self._members[rank]: data for rank, data in gathered.items()})


class _Translated(Generic[T]):
    """An operation of the mesh, whose result names members instead of processes."""

    def __init__(self, pending: Pending[T], translate: Callable[[T], T]) -> None:
        self._pending, self._translate = pending, translate

    def wait(self, timeout: float | None = None) -> T:
        return self._translate(self._pending.wait(timeout))


def strategy_of(plan: RunPlan, layout: Layout) -> tuple[type[Strategy], StrategySettings]:
    """Return the class and the settings of a run's strategy.

    Raises:
        BadInput: it does not work with this layout.
    """
    settings = load_user_strategy(plan.profile.strategy)
    kind = strategy_class(settings.strategy)
    settings = kind.settings_for_resume(settings) if plan.resume else settings
    if layout.is_part and plan.world_size > 1:
        check_in_parts(kind, settings, layout.ties_trained_weights())
    return kind, settings


def check_in_parts(kind: type[Strategy], settings: StrategySettings, ties: bool) -> None:
    """Check that a strategy works column by column.

    Args:
        ties: whether two columns have the same weight.

    Raises:
        BadInput: it does not.
    """
    if reason := kind.why_not_in_parts(settings):
        raise BadInput(f"members of several devices do not work with {kind.name}, which {reason}", _INSTEAD)
    codec = kind.codec(settings)
    if ties and not (kind.is_elementwise and isinstance(codec_by_name(codec), CastCodec)):
        message = (
            f"two devices of a member hold one weight, which {kind.name} with codec = {codec} would not keep alike"
        )
        raise BadInput(message, f"{_INSTEAD}, with codec = fp32 or bf16")


_INSTEAD = "set strategy = allreduce or diloco"


# -------------------------------------------------------------------------------------------------- tied weights


def align_ties(
    carrier: Carrier, tied: Mapping[str, nn.Parameter], states: Callable[[nn.Parameter], Sequence[torch.Tensor]]
) -> list[str]:
    """Give all devices of a member the first one's state of each weight whose copies differ; all devices call it.

    Args:
        tied: weights of this device that others hold too, by their names in the model.
        states: returns all tensors that belong to a weight, itself first.

    Returns:
        The names of the weights whose copies differed.

    Raises:
        ExchangeError: a device is lost.
    """
    mine = {name: _digest(weight) for name, weight in tied.items()}
    digests = [json.loads(answer) for answer in gather_among(carrier, json.dumps(mine).encode())]
    different: list[str] = []
    for name in sorted({name for held in digests for name in held}):
        holders = {stage: held[name] for stage, held in enumerate(digests) if name in held}
        if len({*holders.values()}) > 1:
            different.append(name)
            if carrier.stage in holders:
                _spread(carrier, [*holders], states(tied[name]))
    return different


def states_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> Callable[[nn.Parameter], list[torch.Tensor]]:
    """Return what returns all that a training keeps of a weight: itself, the optimizer's state, and its place in what
    a strategy keeps as flat vectors of all weights (an anchor, an outer momentum)."""

    def states(weight: nn.Parameter) -> list[torch.Tensor]:
        weights = trainable(model)
        sizes = [each.numel() for each in weights]
        start = sum(sizes[: next(number for number, each in enumerate(weights) if each is weight)])
        moments = [value for _, value in sorted(optimizer.state[weight].items()) if isinstance(value, torch.Tensor)]
        vectors = [vector for _, vector in sorted(strategy.tensors().items()) if vector.shape == (sum(sizes),)]
        return [weight.detach(), *moments, *(vector[start : start + weight.numel()] for vector in vectors)]

    return states


def _digest(weight: torch.Tensor) -> str:
    data = as_bytes(weight.detach().cpu()).numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


@torch.no_grad()
def _spread(carrier: Carrier, holders: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Send tensors from the first of the holders to the others."""
    source, *others = holders
    for tensor in tensors:
        if carrier.stage == source:
            data = as_bytes(tensor.cpu())
            for send in [carrier.send(stage, data) for stage in others]:
                send.wait()
        else:
            data = carrier.receive(source, tensor.numel() * tensor.element_size())
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
