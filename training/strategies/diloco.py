"""DiLoCo: many local steps, then one averaged pseudo-gradient for an outer Nesterov step.

Douillard et al. 2023 (arXiv 2311.08105), algorithm 1: every ``H`` inner steps each member sends
``delta_i = anchor - theta_i``; the weighted mean ``d`` feeds an outer SGD with Nesterov momentum, and all members go on
from the new anchor. With ``sync_delay`` the exchange overlaps with training, and the steps made meanwhile are kept:
``theta = anchor' + (theta - theta_sent)`` (delay-corrected merge, LOSCAR-SGD, arXiv 2605.20866).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from profiles.schema import StrategySettings
from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec, codec_by_name
from training.exchange.error_feedback import ErrorFeedback
from training.strategies.agreement import (
    Refusals,
    agreement_flags,
    difference_mended,
    disagree,
    taken_from,
    unfit_parameter,
    usual,
)
from training.strategies.base import Strategy, StrategyContext, SyncReport
from training.strategies.flat import flatten, trainable, unflatten_into, weight_hash

MANY_ROUNDS = 30
_CPU = torch.device("cpu")


def outer_settings(settings: StrategySettings, total_steps: int) -> tuple[float, float]:
    """Return outer learning rate and momentum.

    The paper's 0.7 / 0.9 needs tens of rounds for its momentum to pay; below :data:`MANY_ROUNDS` rounds 1.0 / 0.5
    kept 81 % of the gain of per-step averaging where 0.7 / 0.9 kept 64 % (see docs/performance.md).
    """
    many = total_steps // settings.sync_interval >= MANY_ROUNDS
    rate = settings.outer_lr or (0.7 if many else 1.0)
    momentum = settings.outer_momentum if settings.outer_momentum >= 0 else (0.9 if many else 0.5)
    return rate, momentum


def nesterov_step(anchor: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, rate: float, mu: float) -> None:
    """One outer step in place: ``m = mu m + d``, ``anchor -= rate (d + mu m)`` (Sutskever et al. 2013, eq. 4).

    Products and sums stay separate operations, so that every processor rounds alike and members on different
    hardware keep the same bits.
    """
    momentum.mul_(mu).add_(mean)
    update = momentum * mu
    update.add_(mean)
    update.mul_(rate)
    anchor.sub_(update)


@dataclass(frozen=True)
class _Outcome:
    """What came of a round, until its result is merged."""

    mean: torch.Tensor
    members: tuple[int, ...]
    late: bool
    """Part of this member's delta is not in the mean."""
    differ: bool
    """The members' anchors were not equal before the round."""
    unfit: str
    """A parameter of this member that is not finite, for which its delta was refused."""

    def to_state(self) -> dict[str, Any]:
        return {"members": list(self.members), "late": self.late, "differ": self.differ, "unfit": self.unfit}

    @classmethod
    def from_state(cls, mean: torch.Tensor, state: Mapping[str, Any]) -> _Outcome:
        return cls(mean, tuple(state["members"]), state["late"], state["differ"], state["unfit"])


class DiLoCo(Strategy):
    """Average weights every ``H`` steps through an outer optimizer."""

    name: ClassVar[str] = "diloco"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._codec: Codec = codec_by_name("mxfp4" if settings.codec == "auto" else settings.codec)
        self._rate, self._mu = outer_settings(settings, context.total_steps)
        self._delay = min(settings.sync_delay, settings.sync_interval - 1)
        self._refusals = Refusals(context.warn)
        self._round = 0
        self._inner = 0
        self._weight = 0.0
        self._members: tuple[int, ...] = ()
        self._pending: Pending[MeanResult] | None = None
        self._sent: torch.Tensor | None = None
        self._sent_weight = 0.0
        self._sent_from: torch.Tensor | None = None
        self._outcome: _Outcome | None = None
        self._digest = ""
        self._before = Traffic()

    @classmethod
    def summary(cls, settings: StrategySettings) -> str:
        codec = "mxfp4" if settings.codec == "auto" else settings.codec
        return f"weights merged every {settings.sync_interval} steps by an outer Nesterov step ({codec} deltas)"

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parameters = trainable(model)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._members = exchange.members
        self._anchor = flatten(self._parameters, _CPU).clone()
        self._momentum = torch.zeros_like(self._anchor)
        # A delta that came too late always travels with the next one; alone, nothing is encoded.
        lossy = exchange.engine != "solo" and self._codec.name != "fp32"
        keeps_loss = self.context.settings.error_feedback and lossy
        self._feedback = ErrorFeedback(self._codec, keeps_loss)
        self._stream = "diloco" if keeps_loss else ""

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._weight += weight

    @property
    def steps_to_average(self) -> int | None:
        return self._delay if self._inner + 1 >= self.context.settings.sync_interval else None

    def end_step(self) -> SyncReport | None:
        self._inner += 1
        if self._under_way and self._inner >= self._delay:
            return self._collect()
        if self._inner < self.context.settings.sync_interval:
            return None
        self._start()
        return None if self._delay else self._collect()

    def finish(self) -> SyncReport | None:
        """Merge what is left; after it all members hold the anchor."""
        report = self._collect() if self._under_way else None
        if self._inner:
            self._start()
            report = self._collect()
        return report

    @property
    def _under_way(self) -> bool:
        return self._pending is not None or self._outcome is not None

    def _start(self) -> None:
        current = flatten(self._parameters, _CPU)
        self._sent = self._feedback.compensate(self._anchor - current)
        self._sent_from, self._sent_weight = current, self._weight
        self._inner, self._weight = 0, 0.0
        self._before = self._exchange.traffic.copy()
        self._pending = self._exchange.start_mean(
            f"diloco/{self._round}", self._sent, self._sent_weight, self._codec, self._agreement(), self._stream
        )

    def _agreement(self) -> bytes:
        """The anchor's hash travels with every delta, so that a difference between members does not stay unseen."""
        if not self.context.settings.verify_interval:
            return b""
        self._digest = self._digest or weight_hash(self._anchor)
        return agreement_flags(self._digest)

    def _settle(self) -> _Outcome:
        """Wait for the exchange under way and keep what is not in its mean."""
        if self._outcome is not None:
            return self._outcome
        assert self._pending is not None and self._sent is not None
        result = self._pending.wait()
        self._feedback.settle(self._sent, self._sent_weight, result)
        unfit = "" if result.fit else unfit_parameter(self._names, self._parameters, self._sent, self._codec)
        self._outcome = _Outcome(result.mean, result.members, not result.included, disagree(result.flags), unfit)
        self._pending = self._sent = None
        return self._outcome

    def _collect(self) -> SyncReport:
        outcome = self._settle()
        self._members = outcome.members
        nesterov_step(self._anchor, self._momentum, outcome.mean, self._rate, self._mu)
        self._round += 1
        drift = self._agree(outcome)
        self._tell(outcome)
        self._adopt_anchor(keep_steps=not outcome.unfit)
        self._outcome = self._sent_from = None
        self._digest = weight_hash(self._anchor)
        return self._report(drift)

    def _agree(self, outcome: _Outcome) -> float | None:
        """Set anchor and momentum to those that most members hold where the anchors differed before this round.

        Returns:
            by how much they differ after it; ``None`` if nobody compared them.
        """
        if outcome.differ:
            held = weight_hash(self._anchor) + weight_hash(self._momentum)
            source = usual(self._exchange.gather("diloco/held", held.encode()))
            self._anchor, drift = taken_from(source, self._anchor, self._exchange, "diloco/mend")
            self._momentum, _ = taken_from(source, self._momentum, self._exchange, "diloco/mend-momentum")
            self.context.warn(f"round {self._round}: {difference_mended(drift, source)}")
            return drift
        compared = self.context.settings.verify_interval and self._exchange.engine != "solo"
        return 0.0 if compared else None

    def _tell(self, outcome: _Outcome) -> None:
        self._refusals.note(outcome.unfit and f"round {self._round}: the weight {outcome.unfit}")
        if outcome.late and not outcome.unfit:
            self.context.warn(f"round {self._round}: this machine's delta was late and is carried over")

    def _adopt_anchor(self, keep_steps: bool) -> None:
        target = self._anchor
        if self._inner and keep_steps:  # steps made while the exchange was under way
            assert self._sent_from is not None
            target = flatten(self._parameters, _CPU).sub_(self._sent_from).add_(self._anchor)
        unflatten_into(self._parameters, target.to(self._parameters[0].device))

    def _report(self, drift: float | None) -> SyncReport:
        traffic = self._exchange.traffic.since(self._before)
        return SyncReport(
            round=self._round,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds=traffic.transfer_seconds,
            wait=traffic.wait_seconds,
            members=self._members,
            weight_hash=self._digest,
            drift=drift,
        )

    @property
    def synchronised(self) -> bool:
        return self._inner == 0 and not self._under_way

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def _came_to_something(self) -> bool:
        """Wait for the exchange under way, for a snapshot; return whether there is one with a result.

        Where the group is gone there is none: the snapshot is then of a state in which that exchange did not begin.
        """
        if not self._under_way:
            return False
        try:
            self._settle()
        except ExchangeError:
            return False
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        found = self.newcomer_tensors()
        owed = self._exchange.residual(self._stream, self._anchor.numel()) if self._stream else None
        optional = {"residual": self._feedback.residual, "mean_residual": owed}
        return found | {name: tensor for name, tensor in optional.items() if tensor is not None}

    def state(self) -> dict[str, Any]:
        found = {"round": self._round, "inner": self._inner, "weight": self._weight, "members": list(self._members)}
        if self._came_to_something():
            return found | {"outcome": self._settle().to_state()}
        if self._under_way:
            steps = self.context.settings.sync_interval + self._inner
            return found | {"inner": steps, "weight": self._weight + self._sent_weight}
        return found

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        found = {"anchor": self._anchor, "momentum": self._momentum}
        if self._came_to_something():
            assert self._sent_from is not None
            found |= {"mean": self._settle().mean, "sent_from": self._sent_from}
        return found

    def newcomer_state(self) -> dict[str, Any]:
        found = self.state() | {"weight": 0.0}
        if "outcome" in found:
            found["outcome"] |= {"late": False, "unfit": ""}
        return found

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The anchor; differs from the model only where an exchange overlaps with training."""
        if not self._inner:
            yield
            return
        current = flatten(self._parameters)
        unflatten_into(self._parameters, self._anchor.to(current.device))
        try:
            yield
        finally:
            unflatten_into(self._parameters, current)

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._anchor.copy_(tensors["anchor"])
        self._momentum.copy_(tensors["momentum"])
        self._sent_from, self._digest = tensors.get("sent_from"), ""
        self._feedback.residual = tensors.get("residual")
        self._round, self._inner, self._weight = int(state["round"]), int(state["inner"]), float(state["weight"])
        if self._stream and "mean_residual" in tensors:
            self._exchange.restore_residual(self._stream, tensors["mean_residual"])
        if "outcome" in state:
            self._outcome = _Outcome.from_state(tensors["mean"], state["outcome"])
