"""A fragment of the weights that members synchronise by an outer step: its anchor, its rounds, its residual.

In a round every member sends the pseudo-gradient ``delta = anchor - weights`` of the fragment. The outer optimizer
moves the anchor by the mean of the deltas, with the same bits on all members. What a lossy codec dropped of a delta, or
what arrived too late, is carried into the next one. A delta that is not finite is left out of the mean, and that
member's weights are replaced by the anchor. The anchor's hash travels with every delta: if the members' anchors differ,
all take that of the majority."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec, EncodedVector
from training.exchange.error_feedback import ErrorFeedback
from training.exchange.staging import common_async_device, fetch, is_asynchronous, moved, to_device
from training.lazy import torch
from training.strategies.parts.outer_optimizers import OuterOptimizer
from training.strategies.weights import (
    NonFiniteCounter,
    agreement_flags,
    broadcast_from,
    difference_warning,
    flatten,
    hashes_differ,
    majority,
    non_finite_parameter,
    unflatten_into,
    weight_hash,
)


class PseudoGradientMean:
    """The weighted mean of the members' pseudo-gradients, with error feedback.

    Args:
        codec: of the deltas.
        stream: stream of means for which the loss of their encoding is kept; empty: it is not kept.
    """

    means_on_device: ClassVar[bool] = True
    """Whether a mean that is wanted on a device is decoded there."""

    def __init__(self, exchange: Exchange, codec: Codec, stream: str) -> None:
        self.exchange, self.codec = exchange, codec
        self.feedback = ErrorFeedback(codec, exchange, stream)
        self.mean_device = torch.device("cpu")
        """Where the mean of deltas that a device has encoded is wanted."""
        self._pending: Pending[MeanResult] | None = None
        self._sent: torch.Tensor | EncodedVector | None = None
        self._weight = 0.0

    @property
    def accepts_device(self) -> bool:
        """Whether a delta may lie on an asynchronous device: then only what is sent comes to the host."""
        return self.exchange.engine != "solo" and (self.codec.works_on_devices or not self.feedback.stream)

    def start(self, name: str, delta: torch.Tensor, weight: float, flags: bytes) -> None:
        """Start to average this member's ``delta``, flat fp32, which may be overwritten."""
        self._sent, self._weight = self.feedback.compensate(delta), weight
        contribution: torch.Tensor | EncodedVector = delta
        if is_asynchronous(delta.device):
            contribution = fetch(delta, self.codec, self.mean_device if self.means_on_device else torch.device("cpu"))
            if weight and not self.feedback.stream:  # nothing is carried but what comes too late, as it was sent
                self._sent = contribution
        self._pending = self.exchange.start_mean(name, contribution, weight, self.codec, flags, self.feedback.stream)

    def wait(self) -> tuple[MeanResult, torch.Tensor | EncodedVector]:
        """Return the mean and this member's contribution, which is not encoded if it was refused; keep as residual what
        of it is not in the mean."""
        assert self._pending is not None and self._sent is not None
        result, sent = self._pending.wait(), self._sent
        self.feedback.settle(sent, self._weight, result)
        self._pending = self._sent = None
        return result, sent


@dataclass(frozen=True)
class RoundResult:
    """The result of a round that is not merged yet."""

    mean: torch.Tensor
    members: tuple[int, ...]
    is_late: bool
    """Part of this member's delta is not in the mean."""
    anchors_differ: bool
    """The members' anchors were not equal before the round."""
    non_finite: str
    """Parameter of this member that is not finite, so that its delta was refused; empty: all are finite."""

    def state(self) -> dict[str, Any]:
        """Return all but the mean, JSON-able."""
        return {
            "members": list(self.members),
            "late": self.is_late,
            "differ": self.anchors_differ,
            "unfit": self.non_finite,
        }

    @classmethod
    def of(cls, mean: torch.Tensor, state: Mapping[str, Any]) -> RoundResult:
        """Restore what :meth:`state` returned."""
        return cls(mean, tuple(state["members"]), state["late"], state["differ"], state["unfit"])


@dataclass(frozen=True)
class FragmentSpec:
    """Which weights a fragment consists of, and its names."""

    name: str
    """Name of its operations on the wire."""
    label: str
    """Prefix of the round number in messages."""
    names: Sequence[str]
    """Names of the tensors."""
    tensors: Callable[[], Sequence[torch.Tensor]]
    """Returns the weights: parameters, or views of them."""


class OuterFragment:
    """One fragment of a member's weights.

    Args:
        mean: averages the deltas.
        interval: steps from round to round.
        compares: whether the members' anchors are compared.
        warn: called with a line to show to the user.
        counter: counts this member's deltas that were not finite.
    """

    weigh: Callable[[float, int], float] = staticmethod(lambda tokens, steps: tokens)
    """Weight of this member's delta, from the samples (or tokens) and the number of steps since the last one."""
    keeps_sent_weights = True
    """Whether :attr:`sent_weights` is kept until the round is merged."""
    before_round: Callable[[], None] = staticmethod(lambda: None)
    """Called before a round begins."""
    carries_idle_delta = True
    """Whether the delta of a member without samples is carried into its next one. Off if a merge leaves a share of the
    local weights in place: that share would add up from round to round."""

    def __init__(
        self,
        spec: FragmentSpec,
        mean: PseudoGradientMean,
        outer: OuterOptimizer,
        interval: int,
        compares: bool,
        warn: Callable[[str], None],
        counter: NonFiniteCounter,
    ) -> None:
        self.spec, self._mean, self._outer, self._interval = spec, mean, outer, interval
        self._compares, self._warn, self._non_finite_counter = compares, warn, counter
        self.anchor = self.weights()
        """Flat fp32; equal on all members."""
        self.sent_weights: torch.Tensor | None = None
        """This member's weights when the delta in flight was computed, where that was."""
        self.round, self.inner_steps = 0, 0
        """Rounds that were merged; inner steps since the last one began."""
        self.members: tuple[int, ...] = mean.exchange.members
        self.traffic_at_start = Traffic()
        """The exchange's traffic when the round began."""
        self.delta_norm: float | None = None
        """Norm of this member's delta in the last merged round; ``None``: not known after a resume."""
        self.correlation: float | None = None
        """Correlation of this member's weights with the anchor after that round; ``None``: not compared."""
        self._pending_norm: float | None = None
        self._tokens, self._steps = 0.0, 0
        self._sent_work = (0.0, 0)
        """Tokens and steps of the delta in flight."""
        self._is_sent = False
        self._result: RoundResult | None = None
        self._digest = ""
        outer.attach(self.anchor)

    def weights(self) -> torch.Tensor:
        """Return this member's weights as a new flat fp32 vector on the host."""
        return flatten(self.spec.tensors(), torch.device("cpu"))

    @property
    def state_bytes(self) -> int:
        """Bytes of the anchor and the outer optimizer's state; 0: they stay on the host."""
        is_movable = self._mean.accepts_device and self._outer.works_on_devices
        return is_movable * 4 * self.anchor.numel() * (1 + len(self._outer.names))

    def keep_on(self, device: torch.device) -> None:
        """Keep the anchor and the outer optimizer's state on a device, or on the host, from now on."""
        self.anchor = moved(self.anchor, device)
        self._outer.keep_on(device)
        self._mean.mean_device = device

    def weights_and_anchor(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this member's weights as a new flat fp32 vector, and the anchor on the same device.

        That is the device of all weights if it works asynchronously, else the host.
        """
        tensors = self.spec.tensors()
        device = common_async_device(tensors)
        return (self.weights(), self.anchor) if device is None else (flatten(tensors), to_device(self.anchor, device))

    def set_weights(self, values: torch.Tensor) -> None:
        """Copy a flat vector into the weights."""
        unflatten_into(self.spec.tensors(), values)

    def begin_step(self, weight: float) -> None:
        """Count the samples (or tokens) of an inner step."""
        self._tokens += weight
        self._steps += weight > 0

    # ---------------------------------------------------------------------------------------------------- a round

    @property
    def in_flight(self) -> bool:
        """Whether a round began that is not merged."""
        return self._is_sent or self._result is not None

    def start_round(self) -> None:
        """Send this member's pseudo-gradient."""
        self.before_round()
        delta, current = self._pseudo_gradient()
        norm = torch.linalg.vector_norm(delta)  # a device may still be computing it
        work, traffic = (self._tokens, self._steps), self._mean.exchange.traffic.copy()
        weight = self.weigh(*work) if work[0] else 0.0
        if not weight and not self.carries_idle_delta:
            delta.zero_()
        flags = agreement_flags(self.digest) if self._compares else b""
        self._mean.start(f"{self.spec.name}/{self.round}", delta, weight, flags)
        self._pending_norm = float(norm)
        # Only after start, which raises if the group is lost: then no round has begun.
        self._sent_work, self._tokens, self._steps, self.inner_steps = work, 0.0, 0, 0
        self.sent_weights, self.traffic_at_start, self._is_sent = current, traffic, True

    def _pseudo_gradient(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``anchor - weights``, flat, and the weights if they are kept.

        A device that works asynchronously computes the difference, and both stay there, so that little is copied to the
        host; else both are on the host.
        """
        tensors = self.spec.tensors()
        device = common_async_device(tensors) if self._mean.accepts_device else None
        if device is None:
            current = self.weights()
            delta = self.anchor - current
        else:
            delta = self.anchor.clone() if self.anchor.device == device else to_device(self.anchor, device)
            views = torch.split(delta, [tensor.numel() for tensor in tensors])
            torch._foreach_sub_(list(views), [tensor.detach().reshape(-1) for tensor in tensors])
            current = flatten(tensors) if self.keeps_sent_weights else delta
        return delta, current if self.keeps_sent_weights else None

    @property
    def digest(self) -> str:
        """Hash of the anchor."""
        self._digest = self._digest or weight_hash(self.anchor)
        return self._digest

    def wait(self) -> RoundResult:
        """Wait for the mean of the round in flight."""
        if self._result is None:
            mean, contribution = self._mean.wait()
            non_finite = ""
            if not mean.is_finite and isinstance(contribution, torch.Tensor):
                non_finite = non_finite_parameter(self.spec.names, self.spec.tensors(), contribution, self._mean.codec)
            self._result = RoundResult(
                mean.mean, mean.members, not mean.included, hashes_differ(mean.flags), non_finite
            )
            self._is_sent = False
        return self._result

    def merge(
        self, local_after_merge: Callable[[OuterFragment], torch.Tensor], moves_by_mean: bool = False
    ) -> float | None:
        """Wait for the round in flight, move the anchor, and set this member's weights.

        Args:
            local_after_merge: returns the flat weights with which this member continues.
            moves_by_mean: the anchor moves by the mean alone, without an outer step.

        Returns:
            the largest difference between the members' anchors before the round; ``None``: not compared.

        Raises:
            RunFailed: this member's weights were not finite too often.
        """
        result = self.wait()
        before = self._anchor_state() if result.anchors_differ else None
        self.round += 1
        mean = moved(result.mean, self.anchor.device)
        if moves_by_mean:
            self.anchor.sub_(mean)
        else:
            self._outer.step(self.anchor, mean, self.round)
        try:
            drift = self._restore_agreement(result)
        except ExchangeError:  # the round stays one that is not merged yet, for a snapshot too
            self._roll_back(before)
            raise
        self.members = result.members
        self.delta_norm, self._pending_norm, self.correlation = self._pending_norm, None, None
        self._warn_of(result)
        self.set_weights(self.anchor if result.non_finite else local_after_merge(self))
        self._result = self.sent_weights = None
        self._digest = ""
        return drift

    def _anchor_state(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.anchor.clone(), {name: vector.clone() for name, vector in self._outer.tensors().items()}

    def _roll_back(self, before: tuple[torch.Tensor, dict[str, torch.Tensor]] | None) -> None:
        assert before is not None  # only members whose anchors differ exchange anything here
        self.anchor.copy_(before[0])
        self._outer.load(before[1])
        self.round -= 1

    def _restore_agreement(self, result: RoundResult) -> float | None:
        """Take the state of the majority if the anchors differed before this round."""
        exchange = self._mean.exchange
        if not result.anchors_differ:
            return 0.0 if self._compares and exchange.engine != "solo" else None
        name, vectors = self.spec.name, self._outer.tensors()
        digest = "".join(map(weight_hash, (self.anchor, *vectors.values())))
        source = majority(exchange.gather(f"{name}/held", digest.encode()))
        anchor, drift = broadcast_from(source, self.anchor, exchange, f"{name}/mend")
        self.anchor.copy_(anchor)
        self._outer.load(
            {key: broadcast_from(source, v, exchange, f"{name}/mend-{key}")[0] for key, v in vectors.items()}
        )
        self._warn(f"{self._round_label}: {difference_warning(drift, source)}")
        return drift

    @property
    def _round_label(self) -> str:
        return f"{self.spec.label}round {self.round}"

    def _warn_of(self, result: RoundResult) -> None:
        self._non_finite_counter.count(result.non_finite and f"{self._round_label}: the weight {result.non_finite}")
        if result.is_late and not result.non_finite:
            self._warn(f"{self._round_label}: what this machine learned came too late and counts in the next one")

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _has_result(self) -> bool:
        """Wait for the round in flight, and return whether it has a result.

        If the group is lost it has none: the snapshot then holds a state in which the round did not begin.
        """
        if not self.in_flight:
            return False
        try:
            self.wait()
        except ExchangeError:
            return False
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a snapshot."""
        return self.newcomer_tensors() | self._mean.feedback.tensors()

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """Return those of them that belong to the group."""
        tensors = {"anchor": self.anchor, **self._outer.tensors()}
        if self._has_result():
            tensors |= {"mean": self.wait().mean}
            tensors |= {"sent_from": self.sent_weights} if self.sent_weights is not None else {}
        return tensors

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state of a snapshot."""
        state = {"round": self.round, "inner": self.inner_steps, "weight": self._tokens, "members": list(self.members)}
        steps = self._steps
        if self._has_result():
            state |= {"outcome": self.wait().state()}
        elif self.in_flight:
            steps += self._sent_work[1]
            state |= {"inner": self._interval + self.inner_steps, "weight": self._tokens + self._sent_work[0]}
        return state | {"steps": steps}

    def newcomer_state(self) -> dict[str, Any]:
        """Return :meth:`state` with only what belongs to the group."""
        state = self.state() | {"weight": 0.0, "steps": 0}
        if "outcome" in state:
            state["outcome"] |= {"late": False, "unfit": ""}
        return state

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Restore what :meth:`tensors` and :meth:`state` returned."""
        self.anchor.copy_(tensors["anchor"])
        self._outer.load(tensors)
        self.sent_weights, self._digest = tensors.get("sent_from"), ""
        self._mean.feedback.load(tensors)
        self.round, self.inner_steps = int(state["round"]), int(state["inner"])
        self._tokens, self._steps = float(state["weight"]), int(state["steps"])
        if "outcome" in state:
            self._result = RoundResult.of(tensors["mean"], state["outcome"])
