"""The exchange of the devices that hold the same part of each member's model: a column.

A strategy is given the part as if it were the model, and a column as if it were the members. Each has a mesh and a
coordinator of its own, so parts may differ in size, and in the operations that they need.

A trained weight that several devices of a member hold, as a tied embedding, is in several columns. Where a member is
lost in the middle of an exchange, or late, one column may have its contribution and another not: :func:`align_ties`
gives all holders the first one's copy then, with the contribution that it still owes. So copies are those of the first
holder's column, which all members see alike.
"""

from __future__ import annotations

import hashlib
import itertools
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
    Confirm,
    Contribution,
    Exchange,
    Group,
    JoiningState,
    MeanResult,
    Pending,
)
from training.exchange.residuals import Residual
from training.layouts.base import Layout
from training.layouts.carrier import Carrier, gather_among, receive_payload, send_payload
from training.layouts.messages import as_bytes
from training.records.plan import RunPlan
from training.strategies.base import Strategy
from training.strategies.registry import keeps_copies_alike, strategy_class
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
        self.sends_encoded = mesh.sends_encoded

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

    def fetch_state(self, timeout: float = JOINING_DEADLINE, confirm: Confirm | None = None) -> JoiningState:
        joining = self._mesh.fetch_state(timeout, confirm)
        self.operations = self._mesh.operations
        self._agreed = self._of(process for process in self._mesh.members if process in self._members)
        return joining

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
    if not ties:
        return
    codec, tie = kind.codec(settings), "two devices of a member hold one weight"
    if not keeps_copies_alike(settings):
        message = f"{tie}, which {kind.name} with codec = {codec} would not keep alike"
        raise BadInput(message, f"{_INSTEAD}, with codec = fp32 or bf16 and no compressor")
    if settings.error_feedback and codec != "fp32":  # members keep errors of means, each of another range of a column
        message = f"{tie}, whose copies error_feedback would not keep alike after a late contribution"
        raise BadInput(message, "set error_feedback = false")


_INSTEAD = "set strategy = allreduce or diloco"


# -------------------------------------------------------------------------------------------------- tied weights


class WeightStates:
    """All that a training keeps of a weight: itself, the optimizer's state, and its range of what a strategy keeps as
    flat vectors of all weights (an anchor, an outer momentum, a contribution that was late)."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        self._weights, self._optimizer, self._strategy = trainable(model), optimizer, strategy
        self._elements = sum(weight.numel() for weight in self._weights)

    def of(self, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the tensors that belong to a weight, by name, in the memory of their owners."""
        moments, vectors = self._optimizer.state[weight].items(), self._strategy.tensors().items()
        return {
            "weight": weight.detach(),
            **{f"optimizer/{name}": moment for name, moment in moments if isinstance(moment, torch.Tensor)},
            **{_KEPT + name: v[self._range(weight)] for name, v in vectors if v.shape == (self._elements,)},
        }

    def settle(self, weight: nn.Parameter, missing: Mapping[str, torch.Tensor]) -> None:
        """Let the strategy take over what was written into the tensors of :meth:`of`, and flat tensors of the weight
        that it did not have."""
        tensors = self._strategy.tensors()
        for name, values in missing.items():
            vector = tensors[name.removeprefix(_KEPT)] = torch.zeros(self._elements)
            vector[self._range(weight)] = values
        self._strategy.load(tensors, self._strategy.state())

    def _range(self, weight: nn.Parameter) -> slice:
        """Return where a weight lies in the vectors."""
        before = itertools.takewhile(lambda each: each is not weight, self._weights)
        start = sum(each.numel() for each in before)
        return slice(start, start + weight.numel())


_KEPT = "strategy/"


def align_ties(carrier: Carrier, tied: Mapping[str, nn.Parameter], states: WeightStates) -> list[str]:
    """Give all devices of a member the first one's state of each weight whose copies differ; all devices call it.

    Args:
        tied: weights of this device that others hold too, by their names in the model.

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
                _spread(carrier, [*holders], tied[name], states)
    return different


def _digest(weight: torch.Tensor) -> str:
    data = as_bytes(weight.detach().cpu()).numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


@torch.no_grad()
def _spread(carrier: Carrier, holders: Sequence[int], weight: nn.Parameter, states: WeightStates) -> None:
    """Send all that the first of a weight's holders keeps of it to the others, tensor by tensor."""
    source, *others = holders
    tensors = states.of(weight)
    if carrier.stage == source:
        names = json.dumps([*tensors]).encode()
        sends = [send for stage in others for send in send_payload(carrier, stage, names)]
        for tensor in tensors.values():
            data = as_bytes(tensor.cpu())
            for send in [*sends, *(carrier.send(stage, data) for stage in others)]:
                send.wait()
            sends = []
        return
    names_sent = json.loads(receive_payload(carrier, source))
    missing = {name: torch.empty(weight.numel()) for name in names_sent if name not in tensors}
    for name in names_sent:
        tensor = missing[name] if name in missing else tensors[name]
        data = carrier.receive(source, tensor.numel() * tensor.element_size())
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
    for name in tensors.keys() - {*names_sent}:
        tensors[name].zero_()
    states.settle(weight, missing)
