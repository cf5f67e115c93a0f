"""A part of the weights that members merge now and then by an outer step: its anchor, its round, and what is owed.

In a round every member sends ``delta = anchor - weights`` of the part. The merged delta moves the anchor by the outer
optimizer, in the same way on all members. A delta that came too late, or what a lossy codec dropped of it, travels with
the next one. Weights that are not finite are left out, and replaced by the anchor. The anchor's hash travels with every
delta, so that a difference between members does not stay unseen: all take what most hold then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec
from training.exchange.error_feedback import ErrorFeedback
from training.exchange.staging import common_queue, fetched, to_device
from training.lazy import torch
from training.strategies.outer import OuterOptimizer
from training.strategies.weights import (
    Refusals,
    agreement_flags,
    difference_mended,
    disagree,
    flatten,
    taken_from,
    unfit_parameter,
    unflatten_into,
    usual,
    weight_hash,
)


class MeanOfDeltas:
    """Merges deltas by their weighted mean.

    Args:
        codec: of the deltas.
        stream: of the means, where what their encoding loses is kept; empty: it is lost.
    """

    def __init__(self, exchange: Exchange, codec: Codec, stream: str) -> None:
        self.exchange, self.codec = exchange, codec
        self.feedback = ErrorFeedback(codec, exchange, stream)
        self._pending: Pending[MeanResult] | None = None
        self._sent: torch.Tensor | None = None
        self._weight = 0.0

    @property
    def takes_coded(self) -> bool:
        """Whether a delta may come as the others will decode it: nothing of what its codec drops is kept."""
        return not self.feedback.stream and self.feedback.residual is None and self.exchange.engine != "solo"

    def start(self, name: str, delta: torch.Tensor, weight: float, flags: bytes) -> None:
        """Start to merge this member's ``delta``, flat fp32, which is given away."""
        self._sent, self._weight = self.feedback.compensate(delta), weight
        self._pending = self.exchange.start_mean(name, self._sent, weight, self.codec, flags, self.feedback.stream)

    def wait(self) -> tuple[MeanResult, torch.Tensor]:
        """Return the result and what this member gave to it, and keep what of that is not in it."""
        assert self._pending is not None and self._sent is not None
        result, sent = self._pending.wait(), self._sent
        self.feedback.settle(sent, self._weight, result)
        self._pending = self._sent = None
        return result, sent


@dataclass(frozen=True)
class RoundResult:
    """What came of a round, until its result is merged."""

    mean: torch.Tensor
    members: tuple[int, ...]
    late: bool
    """Part of this member's delta is not in the mean."""
    differ: bool
    """The members' anchors were not equal before the round."""
    unfit: str
    """A parameter of this member that is not finite, for which its delta was refused."""


@dataclass(frozen=True)
class PartSpec:
    """Which weights a part consists of, and what it is called."""

    name: str
    """On the wire."""
    label: str
    """Before the number of a round, where a person reads it."""
    names: Sequence[str]
    """Of the tensors."""
    tensors: Callable[[], Sequence[torch.Tensor]]
    """The weights: parameters, or views of them."""


class MergedPart:
    """One part of a member's weights.

    Args:
        merge: how the deltas become one.
        interval: steps from round to round.
        compares: whether anchors are compared.
        warn: takes one line for the person who watches.
        refusals: counts this member's deltas that were not finite.
    """

    weigh: Callable[[float, int], float] = staticmethod(lambda tokens, steps: tokens)
    """Weight of this member's delta by what its losses were means over since the last one, and in how many steps."""
    keeps_start = True
    """Whether :attr:`sent_from` is kept until the result is merged."""
    carries_idle = True
    """Whether the delta of a member that had no sample is carried into its next one. Not where a merge leaves part of
    the weights as they are: what is left over would add up from round to round."""

    def __init__(
        self,
        spec: PartSpec,
        merge: MeanOfDeltas,
        outer: OuterOptimizer,
        interval: int,
        compares: bool,
        warn: Callable[[str], None],
        refusals: Refusals,
    ) -> None:
        self.spec, self._merge, self._outer, self._interval = spec, merge, outer, interval
        self._compares, self._warn, self._refusals = compares, warn, refusals
        self.anchor = self.flat()
        self.sent_from: torch.Tensor | None = None
        """The weights from which the delta under way was taken."""
        self.round, self.inner = 0, 0
        """Rounds that are merged; steps since the last one began."""
        self.members: tuple[int, ...] = merge.exchange.members
        self.before = Traffic()
        """When the round began."""
        self.delta_norm: float | None = None
        """Of this member's delta in the last round that was merged; ``None``: not known after a resume."""
        self.correlation: float | None = None
        """Of this member's weights with the anchor after that round; ``None``: not compared."""
        self._given_norm: float | None = None
        self._tokens, self._steps = 0.0, 0
        self._sent = (0.0, 0)
        self._waits = False
        self._outcome: RoundResult | None = None
        self._digest = ""
        outer.attach(self.anchor)

    def flat(self) -> torch.Tensor:
        """Return this member's weights as a new flat fp32 vector of the host."""
        return flatten(self.spec.tensors(), torch.device("cpu"))

    def flat_with_anchor(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this member's weights as a new flat fp32 vector, and the anchor beside it: on the device of all
        weights, if there is one that works by itself, else on the host."""
        tensors = self.spec.tensors()
        device = common_queue(tensors)
        return (self.flat(), self.anchor) if device is None else (flatten(tensors), to_device(self.anchor, device))

    def hold(self, values: torch.Tensor) -> None:
        """Give the weights these values, flat."""
        unflatten_into(self.spec.tensors(), values)

    def begin_step(self, weight: float) -> None:
        """A step begins whose loss is a mean over ``weight``."""
        self._tokens += weight
        self._steps += weight > 0

    @property
    def under_way(self) -> bool:
        """Whether a round began whose result is not merged."""
        return self._waits or self._outcome is not None

    def start(self) -> None:
        """Begin a round."""
        delta, current = self._difference()
        sent, before = (self._tokens, self._steps), self._merge.exchange.traffic.copy()
        weight = self.weigh(*sent) if sent[0] else 0.0
        if not weight and not self.carries_idle:
            delta.zero_()
        self._merge.start(f"{self.spec.name}/{self.round}", delta, weight, self._agreement())
        # Only now: where the group is gone, no round has begun.
        self._sent, self._tokens, self._steps, self.inner = sent, 0.0, 0, 0
        self.sent_from, self.before, self._waits = current, before, True

    def _difference(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the delta, flat on the host, and the weights that it was taken from, where they are kept.

        A device that works by itself takes the difference and encodes it, so that little has to come from it.
        """
        tensors = self.spec.tensors()
        device = common_queue(tensors)
        if self.keeps_start or not self._merge.takes_coded or device is None:
            current = self.flat()
            delta = self.anchor - current
            self._given_norm = float(torch.linalg.vector_norm(delta))
            return delta, current if self.keeps_start else None
        difference = to_device(self.anchor, device)
        views = torch.split(difference, [tensor.numel() for tensor in tensors])
        torch._foreach_sub_(list(views), [tensor.detach().reshape(-1) for tensor in tensors])
        norm, delta = torch.linalg.vector_norm(difference), fetched(difference, self._merge.codec)
        self._given_norm = float(norm)
        return delta, None

    def _agreement(self) -> bytes:
        return agreement_flags(self.digest) if self._compares else b""

    @property
    def digest(self) -> str:
        """Hash of the anchor."""
        self._digest = self._digest or weight_hash(self.anchor)
        return self._digest

    def settle(self) -> RoundResult:
        """Wait for the exchange under way and keep what is not in its mean."""
        if self._outcome is None:
            result, contribution = self._merge.wait()
            unfit = ""
            if not result.fit:
                unfit = unfit_parameter(self.spec.names, self.spec.tensors(), contribution, self._merge.codec)
            self._outcome = RoundResult(result.mean, result.members, not result.included, disagree(result.flags), unfit)
            self._waits = False
        return self._outcome

    def collect(self, local_after_merge: Callable[[MergedPart], torch.Tensor], is_final: bool = False) -> float | None:
        """Merge the result of the round under way, after waiting for it.

        Args:
            kept: returns the weights with which this member goes on.
            last: no round follows: the anchor moves by the merged delta alone.

        Returns:
            by how much the members' anchors differ after it; ``None`` if nobody compared them.

        Raises:
            RunFailed: this member's weights were not finite too often.
        """
        outcome = self.settle()
        self.members = outcome.members
        self.delta_norm, self._given_norm, self.correlation = self._given_norm, None, None
        self.round += 1
        if is_final:
            self.anchor.sub_(outcome.mean)
        else:
            self._outer.step(self.anchor, outcome.mean, self.round)
        drift = self._agree(outcome)
        self._tell(outcome)
        self.hold(self.anchor if outcome.unfit else local_after_merge(self))
        self._outcome = self.sent_from = None
        self._digest = ""
        return drift

    def _agree(self, outcome: RoundResult) -> float | None:
        """Take what most members hold, where the anchors differed before this round."""
        exchange = self._merge.exchange
        if not outcome.differ:
            return 0.0 if self._compares and exchange.engine != "solo" else None
        name, vectors = self.spec.name, self._outer.tensors()
        held = "".join(map(weight_hash, (self.anchor, *vectors.values())))
        source = usual(exchange.gather(f"{name}/held", held.encode()))
        anchor, drift = taken_from(source, self.anchor, exchange, f"{name}/mend")
        self.anchor.copy_(anchor)
        self._outer.load({key: taken_from(source, v, exchange, f"{name}/mend-{key}")[0] for key, v in vectors.items()})
        self._warn(f"{self._this_round}: {difference_mended(drift, source)}")
        return drift

    @property
    def _this_round(self) -> str:
        return f"{self.spec.label}round {self.round}"

    def _tell(self, outcome: RoundResult) -> None:
        self._refusals.note(outcome.unfit and f"{self._this_round}: the weight {outcome.unfit}")
        if outcome.late and not outcome.unfit:
            self._warn(f"{self._this_round}: this machine's delta was late and is carried over")

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _came_to_something(self) -> bool:
        """Wait for the exchange under way, for a snapshot; return whether there is one with a result.

        Where the group is gone there is none: the snapshot is then of a state in which that exchange did not begin.
        """
        if not self.under_way:
            return False
        try:
            self.settle()
        except ExchangeError:
            return False
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a snapshot."""
        return self.newcomer_tensors() | self._merge.feedback.tensors()

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """Return those of them that belong to the group."""
        tensors = {"anchor": self.anchor, **self._outer.tensors()}
        if self._came_to_something():
            tensors |= {"mean": self.settle().mean}
            tensors |= {"sent_from": self.sent_from} if self.sent_from is not None else {}
        return tensors

    def state(self) -> dict[str, Any]:
        """Return the rest of a snapshot."""
        state = {"round": self.round, "inner": self.inner, "weight": self._tokens, "members": list(self.members)}
        steps = self._steps
        if self._came_to_something():
            outcome = {name: value for name, value in vars(self.settle()).items() if name != "mean"}
            state |= {"outcome": {**outcome, "members": list(outcome["members"])}}
        elif self.under_way:
            steps += self._sent[1]
            state |= {"inner": self._interval + self.inner, "weight": self._tokens + self._sent[0]}
        return state | {"steps": steps}

    def newcomer_state(self) -> dict[str, Any]:
        """Return what of it belongs to the group."""
        state = self.state() | {"weight": 0.0, "steps": 0}
        if "outcome" in state:
            state["outcome"] |= {"late": False, "unfit": ""}
        return state

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Take back what :meth:`tensors` and :meth:`state` gave."""
        self.anchor.copy_(tensors["anchor"])
        self._outer.load(tensors)
        self.sent_from, self._digest = tensors.get("sent_from"), ""
        self._merge.feedback.load(tensors)
        self.round, self.inner = int(state["round"]), int(state["inner"])
        self._tokens, self._steps = float(state["weight"]), int(state["steps"])
        if "outcome" in state:
            outcome = state["outcome"]
            self._outcome = RoundResult(tensors["mean"], **{**outcome, "members": tuple(outcome["members"])})
