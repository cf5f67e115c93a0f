"""DiLoCo: many local steps, then one averaged pseudo-gradient for an outer Nesterov step.

Douillard et al. 2023 (arXiv 2311.08105), algorithm 1: every ``H`` inner steps each member sends
``delta_i = anchor - theta_i``; the weighted mean ``d`` feeds an outer SGD with Nesterov momentum, and all members go on
from the new anchor. With ``sync_delay`` the exchange overlaps with training, and the steps made meanwhile are kept:
``theta = anchor' + (theta - theta_sent)`` (delay-corrected merge, LOSCAR-SGD, arXiv 2605.20866).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from profiles.schema import StrategySettings
from training.exchange.base import Exchange, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec, ErrorFeedback, codec_by_name, roundtrip
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


class DiLoCo(Strategy):
    """Average weights every ``H`` steps through an outer optimizer."""

    name: ClassVar[str] = "diloco"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._codec: Codec = codec_by_name("mxfp4" if settings.codec == "auto" else settings.codec)
        self._rate, self._mu = outer_settings(settings, context.total_steps)
        self._delay = min(settings.sync_delay, settings.sync_interval - 1)
        self._feedback = ErrorFeedback() if settings.error_feedback else None
        self._round = 0
        self._inner = 0
        self._weight = 0.0
        self._members: tuple[int, ...] = ()
        self._carry: torch.Tensor | None = None
        self._pending: Pending[MeanResult] | None = None
        self._sent: torch.Tensor | None = None
        self._sent_weight = 0.0
        self._sent_from: torch.Tensor | None = None
        self._before = Traffic()

    @classmethod
    def summary(cls, settings: StrategySettings) -> str:
        codec = "mxfp4" if settings.codec == "auto" else settings.codec
        return f"weights merged every {settings.sync_interval} steps by an outer Nesterov step ({codec} deltas)"

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parameters = trainable(model)
        self._members = exchange.members
        self._anchor = flatten(self._parameters, _CPU).clone()
        self._momentum = torch.zeros_like(self._anchor)

    def begin_step(self, step: int, weight: float) -> None:
        self._weight += weight

    def end_step(self) -> SyncReport | None:
        self._inner += 1
        if self._pending is not None and self._inner >= self._delay:
            return self._collect()
        if self._inner < self.context.settings.sync_interval:
            return None
        self._start()
        return None if self._delay else self._collect()

    def finish(self) -> SyncReport | None:
        """Merge what is left; after it all members hold the anchor."""
        report = self._collect() if self._pending is not None else None
        if self._inner:
            self._start()
            report = self._collect()
        return report

    def _start(self) -> None:
        current = flatten(self._parameters, _CPU)
        delta = self._anchor - current
        if self._carry is not None:
            delta.add_(self._carry)
        if self._feedback is not None:
            delta = self._feedback.compensate(delta)
            self._feedback.record(delta, roundtrip(self._codec, delta))
        self._sent, self._sent_from, self._sent_weight = delta, current, self._weight
        self._inner, self._weight = 0, 0.0
        self._send()

    def _send(self) -> None:
        assert self._sent is not None
        self._before = self._exchange.traffic.copy()
        name = f"diloco/{self._round}"
        self._pending = self._exchange.start_mean(name, self._sent, self._sent_weight, self._codec)

    def _collect(self) -> SyncReport:
        assert self._pending is not None
        result = self._pending.wait()
        self._members = result.members
        # A delta that came too late is not lost: it travels with the next one.
        self._carry = None if result.included else self._sent
        nesterov_step(self._anchor, self._momentum, result.mean, self._rate, self._mu)
        self._adopt_anchor()
        self._pending = self._sent = self._sent_from = None
        self._round += 1
        return self._report(result)

    def _adopt_anchor(self) -> None:
        target = self._anchor
        if self._inner:  # steps made while the exchange was under way
            assert self._sent_from is not None
            target = flatten(self._parameters, _CPU).sub_(self._sent_from).add_(self._anchor)
        unflatten_into(self._parameters, target.to(self._parameters[0].device))

    def _report(self, result: MeanResult) -> SyncReport:
        traffic = self._exchange.traffic.since(self._before)
        late = () if result.included else (f"round {self._round}: this machine's delta was late and is carried over",)
        return SyncReport(
            round=self._round,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds=traffic.transfer_seconds,
            wait=traffic.wait_seconds,
            members=result.members,
            weight_hash=weight_hash(self._anchor),
            warnings=late,
        )

    @property
    def synchronised(self) -> bool:
        return self._inner == 0 and self._pending is None

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"anchor": self._anchor, "momentum": self._momentum}
        optional = {"carry": self._carry, "sent": self._sent, "sent_from": self._sent_from}
        if self._feedback is not None:
            optional["residual"] = self._feedback.residual
        return found | {name: tensor for name, tensor in optional.items() if tensor is not None}

    def state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "inner": self._inner,
            "weight": self._weight,
            "sent_weight": self._sent_weight,
            "members": list(self._members),
        }

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {"anchor": self._anchor, "momentum": self._momentum}

    def newcomer_state(self) -> dict[str, Any]:
        return self.state() | {"weight": 0.0, "sent_weight": 0.0}

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
        """Take the state back; an exchange that was under way is started again with the same contribution."""
        self._anchor.copy_(tensors["anchor"])
        self._momentum.copy_(tensors["momentum"])
        self._carry = tensors.get("carry")
        self._sent, self._sent_from = tensors.get("sent"), tensors.get("sent_from")
        if self._feedback is not None:
            self._feedback.residual = tensors.get("residual")
        self._round, self._inner = int(state["round"]), int(state["inner"])
        self._weight, self._sent_weight = float(state["weight"]), float(state["sent_weight"])
        if self._sent is not None:
            self._send()
