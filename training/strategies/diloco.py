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
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from profiles.declarations import OptionError, Owning, Section, option
from profiles.schema import StrategySettings
from training.events import SyncEvent
from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec, codec_by_name
from training.exchange.error_feedback import ErrorFeedback
from training.lazy import lazy
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import Compute, CostModel, Course, Learning, Rhythm, Start, interpolate, merge_efficiency
from training.strategies.registry import register
from training.strategies.weights import (
    Refusals,
    agreement_flags,
    difference_mended,
    disagree,
    flatten,
    taken_from,
    trainable,
    unfit_parameter,
    unflatten_into,
    usual,
    weight_hash,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy("torch")

MANY_ROUNDS = 30
FEWEST_ROUNDS = 3
"""With fewer nothing was measured."""
_AT_ONCE = 1 << 18
"""Elements of an outer step whose four vectors stay in a processor's cache until the step is done."""
LORA_INTERVAL = 20
"""The mean of two adapters is not the adapter of the mean, and the difference grows with the interval."""
INTERVALS = (5, 10, 20, 30, 50, 100, 200, 500)
OVERLAPS_FROM, OVERLAP = 20, 5
"""The overlap is offered where it is short beside the interval: the paper's intervals were 30 and more."""

_LOSS_BY_ROUNDS = {"pretrained": {3: 0.0, 10: 0.0}, "scratch": {3: 0.067, 10: 0.032, 30: 0.0}}
"""Loss over per-step averaging, by rounds of the run. Trained: ``benchmarks/fine_tune_worth.py``, validation loss 0.081
and 0.080 against 0.097, means of three seeds. From scratch, own check: 2.676, 2.588 against 2.508; there the interval
decides with more rounds."""
_LOSS_BY_INTERVAL = {1: 0.0, 25: 0.028, 50: 0.047, 100: 0.063, 200: 0.074, 500: 0.094}
"""From scratch: ft-diloco, TinyStories, outer rate untuned."""
_GAIN_BY_ROUNDS = {"pretrained": {3: 1.0, 10: 1.0}, "scratch": {3: 0.04, 10: 0.55}}
"""Share of the gain of per-step averaging over one machine (0.119 to 0.097 in the fine-tune) that is kept."""
_LOSS_OF_OVERLAP = 0.002


class DiLoCoOptions(Section):
    """Options of :class:`DiLoCo`."""

    sync_interval: int = option(50, "steps between synchronisations", unit="steps", ge=1, alias="sync_interval")
    sync_delay: int = option(
        0, "steps an exchange may overlap with training", unit="steps", ge=0, advanced=True, alias="sync_delay"
    )
    outer_lr: float = option(0.0, "outer learning rate; 0: by model and rounds", ge=0, advanced=True, alias="outer_lr")
    outer_momentum: float = option(
        -1.0, "outer Nesterov momentum; -1: by model and rounds", ge=-1, lt=1, advanced=True, alias="outer_momentum"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DiLoCoOptions:
        if self.sync_delay >= self.sync_interval:
            raise OptionError("sync_delay", f"must be below sync_interval ({self.sync_interval})")
        return self

    def outer_optimizer(self, total_steps: int, start: Start) -> tuple[float, float]:
        """Return outer learning rate and momentum.

        A trained model takes the plain mean (1.0 / 0): momentum adds to a learning rate that is right already, and a
        published Whisper ended worse with it than on one machine (see docs/planning.md). From scratch the paper's
        0.7 / 0.9 needs tens of rounds for its momentum to pay; below :data:`MANY_ROUNDS` rounds 1.0 / 0.5 kept 55 % of
        the gain of per-step averaging where 0.7 / 0.9 kept 30 %.
        """
        if start == "pretrained":
            rate, momentum = 1.0, 0.0
        else:
            rate, momentum = (0.7, 0.9) if total_steps // self.sync_interval >= MANY_ROUNDS else (1.0, 0.5)
        return self.outer_lr or rate, self.outer_momentum if self.outer_momentum >= 0 else momentum


class DiLoCoCosts(CostModel):
    """One exchange of all trainable parameters every H steps, at a loss that depends on rounds and interval."""

    codecs = ("mxfp4", "bf16")
    exact = False
    vectors = 6  # anchor, momentum, delta, the weights it was taken from, mean and outer update
    on_device = False
    interval_option = "diloco.sync_interval"
    merge_ns = 5.3  # copies, hash and outer step of 37.7 M parameters (docs/performance.md)
    sources: ClassVar[Mapping[str, str]] = {
        "diloco-pretrained": "DiLoCo in a fine-tune by rounds: own check, Whisper tiny.en, three seeds, 2 members",
        "diloco-scratch": "DiLoCo from scratch by H: ft-diloco, 51 M, 2 members; by rounds: own check, one seed",
        "overlap": "overlap of up to 10 steps: below 0.2 % (Streaming DiLoCo, arXiv 2501.18512)",
    }

    def rhythms(self, course: Course) -> Iterator[Rhythm]:
        fewest = max(FEWEST_ROUNDS, codec_by_name(course.codec).fewest_rounds)
        for interval in INTERVALS:
            if course.steps // interval < fewest or (course.lora and interval > LORA_INTERVAL):
                continue
            for delay in (0, OVERLAP) if interval >= OVERLAPS_FROM else (0,):
                yield Rhythm(interval, delay)

    def hidden(self, exchange: float, compute: Compute, rhythm: Rhythm, settings: Owning) -> float:
        return min(exchange, rhythm.delay * compute.seconds)

    def learning(self, course: Course, rhythm: Rhythm, worth: float) -> Learning:
        rounds = course.rounds(rhythm)
        share = merge_efficiency(worth, interpolate(_GAIN_BY_ROUNDS[course.start], rounds))
        loss = interpolate(_LOSS_BY_ROUNDS[course.start], rounds)
        if course.start == "scratch":
            loss = max(loss, interpolate(_LOSS_BY_INTERVAL, rhythm.interval))
        overlap = ("overlap",) if rhythm.delay else ()
        sources = (f"diloco-{course.start}", *codec_by_name(course.codec).sources, *overlap)
        return Learning(share, max(0.0, loss) + (_LOSS_OF_OVERLAP if rhythm.delay else 0.0), sources)

    def settings(self, course: Course, rhythm: Rhythm) -> dict[str, str | int | float | bool]:
        rate, momentum = DiLoCoOptions(sync_interval=rhythm.interval).outer_optimizer(course.steps, course.start)
        return {
            self.interval_option: rhythm.interval,
            "diloco.sync_delay": rhythm.delay,
            "diloco.outer_lr": rate,
            "diloco.outer_momentum": momentum,
            "error_feedback": codec_by_name(course.codec).wants_feedback,
        }


def nesterov_step(anchor: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, rate: float, mu: float) -> None:
    """One outer step in place: ``m = mu m + d``, ``anchor -= rate (d + mu m)`` (Sutskever et al. 2013, eq. 4).

    Products and sums stay separate operations, so that every processor rounds alike and members on different
    hardware keep the same bits.
    """
    scratch = torch.empty_like(anchor[:_AT_ONCE])
    for start in range(0, anchor.numel(), _AT_ONCE):
        part, speed, by = (vector[start : start + _AT_ONCE] for vector in (anchor, momentum, mean))
        speed.mul_(mu).add_(by)
        part.sub_(torch.mul(speed, mu, out=scratch[: part.numel()]).add_(by).mul_(rate))


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


@register
class DiLoCo(Strategy):
    """Average weights every ``H`` steps through an outer optimizer."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "weights merged every so many steps by an outer Nesterov step; sends little"
    options = DiLoCoOptions
    costs = DiLoCoCosts()

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        options = context.settings.of(DiLoCoOptions)
        self._codec: Codec = codec_by_name(self.codec(context.settings))
        self._rate, self._mu = options.outer_optimizer(context.total_steps, context.start)
        self._interval, self._delay = options.sync_interval, min(options.sync_delay, options.sync_interval - 1)
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
    def rhythm(cls, settings: StrategySettings) -> Rhythm:
        options = settings.of(DiLoCoOptions)
        return Rhythm(options.sync_interval, options.sync_delay)

    @classmethod
    def rehearsed(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return settings.with_own("diloco", sync_interval=min(interval, cls.rhythm(settings).interval))

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parameters = trainable(model)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._members = exchange.members
        self._anchor = flatten(self._parameters, torch.device("cpu"))
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
        return self._delay if self._inner + 1 >= self._interval else None

    def end_step(self) -> SyncEvent | None:
        self._inner += 1
        if self._under_way and self._inner >= self._delay:
            return self._collect()
        if self._inner < self._interval:
            return None
        self._start()
        return None if self._delay else self._collect()

    def finish(self) -> SyncEvent | None:
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
        current = flatten(self._parameters, torch.device("cpu"))
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

    def _collect(self) -> SyncEvent:
        outcome = self._settle()
        self._members = outcome.members
        nesterov_step(self._anchor, self._momentum, outcome.mean, self._rate, self._mu)
        self._round += 1
        drift = self._agree(outcome)
        self._tell(outcome)
        self._adopt_anchor(keep_steps=not outcome.unfit)
        self._outcome = self._sent_from = None
        self._digest = weight_hash(self._anchor)
        traffic = self._exchange.traffic.since(self._before)
        return sync_event(traffic, self._round, self._members, self._digest, drift)

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
            target = flatten(self._parameters, self._anchor.device).sub_(self._sent_from).add_(self._anchor)
        unflatten_into(self._parameters, target.to(self._parameters[0].device))

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
            told = {name: value for name, value in vars(self._settle()).items() if name != "mean"}
            return found | {"outcome": {**told, "members": list(told["members"])}}
        if self._under_way:
            steps = self._interval + self._inner
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

    for_newcomer = consensus

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._anchor.copy_(tensors["anchor"])
        self._momentum.copy_(tensors["momentum"])
        self._sent_from, self._digest = tensors.get("sent_from"), ""
        self._feedback.residual = tensors.get("residual")
        self._round, self._inner, self._weight = int(state["round"]), int(state["inner"]), float(state["weight"])
        if self._stream and "mean_residual" in tensors:
            self._exchange.restore_residual(self._stream, tensors["mean_residual"])
        if "outcome" in state:
            said = state["outcome"]
            self._outcome = _Outcome(tensors["mean"], **{**said, "members": tuple(said["members"])})
