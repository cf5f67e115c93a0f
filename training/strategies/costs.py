"""Cost models of strategies: pure functions of sizes, seconds and settings, which the planner combines with links and
machines (:mod:`distributed.planning.prediction`).

A strategy states its costs next to its algorithm. Loss tables hold measured or published values; they are interpolated
over the logarithm of their variable and are never better than their best entry, and tables by interval keep rising
beyond the longest one. They come from small models and few seeds: good for ranking strategies, not for predicting loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from profiles.declarations import OptionsByOwner, Section
from training.exchange.codecs import codec_by_name

if TYPE_CHECKING:
    from profiles.schema import Profile

Start = Literal["pretrained", "scratch"]
Options = TypeVar("Options", bound=Section)


def start_of(profile: Profile) -> Start:
    """Return whether a profile's model is pretrained or new when training begins.

    For a custom model only the user knows: it counts as new, which leads to more frequent exchanges.
    """
    if profile.strategy.planned_as != "auto":
        return profile.strategy.planned_as
    return "scratch" if profile.model.from_scratch or profile.model.trait == "own code" else "pretrained"


BATCH_SOURCE = {"batch": "larger batch by the learning-rate rule: own check, 0.87 M parameters, one seed, batch x 4"}
_BATCH_GAIN = {"off": 0.37, "sqrt": 0.80, "linear": 1.0, "auto": 0.80}
"""Effective share of a batch four times as large, by steps of one machine to the same loss: 635, 1023 and over 1200
to 300. Own check, a fine-tune at 1, 2 and 4 times the learning rate."""


@dataclass(frozen=True)
class SyncSchedule:
    """How often members exchange."""

    interval: int = 1
    """Steps between exchanges, H."""
    delay: int = 0
    """Steps that an exchange overlaps with."""


@dataclass(frozen=True)
class RunSpec:
    """What a cost model needs to know about the run."""

    steps: int
    """Optimizer steps."""
    start: Start = "pretrained"
    """Whether the model is pretrained or new when training begins."""
    lora: bool = False
    codec: str = "fp32"
    texts: bool = False
    """Whether it is a language model."""

    @property
    def trains_texts(self) -> bool:
        """Whether it is a fine-tune of a language model."""
        return self.texts and self.start == "pretrained"

    def rounds(self, schedule: SyncSchedule) -> int:
        """Return the number of exchanges, at least 1."""
        return max(1, self.steps // schedule.interval)


@dataclass(frozen=True)
class Compute:
    """One member's step without any exchange."""

    seconds: float
    passes: int
    """Forward and backward passes a step (gradient accumulation)."""
    trainable: int
    """Trainable parameters."""


@dataclass(frozen=True)
class Learning:
    """How well a strategy learns from the group's samples."""

    share: float = 1.0
    """Effective share of the samples: 1 as with per-step averaging."""
    loss: float = 0.0
    """Expected increase of the final loss over per-step averaging, as a share."""
    sources: tuple[str, ...] = ()
    """Keys of :attr:`CostModel.sources` and of the codecs'."""


class CostModel:
    """Base class of cost models. By default: all trainable parameters in every step, exact, nothing hidden."""

    codecs: tuple[str, ...] = ("fp32", "bf16")
    """Codecs that it may use; its default first."""
    exact: ClassVar[bool] = True
    """Whether it equals one machine with the joint batch, except for the codec's loss."""
    vectors: int = 1
    """Fp32 vectors of all trainable parameters that it keeps, besides the optimizer's."""
    on_device: ClassVar[bool] = True
    """Whether these vectors are in the memory of the training device, or of the host."""
    gathers: ClassVar[bool] = False
    """Whether every member sends its values to all others, instead of to the owners of shards."""
    waits: ClassVar[bool] = True
    """Whether a member waits for slower ones; if not, a step of the group takes the mean of their step times."""
    uneven: bool = False
    """Whether its exchanges differ in size: then a step costs the average."""
    group: int = 0
    """Size of the changing groups in which members exchange; 0: all members together."""
    interval_option: str = ""
    """Option with the number of steps between exchanges; empty: there is none."""
    merge_ns: ClassVar[float] = 0.0
    """Nanoseconds of one core for each trainable parameter of an exchange, not hidden behind compute."""
    sources: ClassVar[Mapping[str, str]] = {}
    """Sources of the figures of :meth:`learning`, one line each."""

    def device_vectors(self, error_feedback: bool) -> float:
        """Return how many fp32 vectors it keeps in the memory of a CUDA device between the steps of a run."""
        return self.vectors if self.on_device else 0

    def with_options(self, settings: OptionsByOwner) -> CostModel:
        """Return the cost model for these options of the strategy."""
        return self

    def why_not_ranked(self, run: RunSpec) -> str:
        """Return why ``strategy = auto`` leaves it out for such a run, as words after its name.

        Empty: it is ranked, because its loss in such runs was measured (:meth:`learning`). A strategy that the user
        asks for is predicted in any case."""
        return ""

    def why_unsupported(self, run: RunSpec, schedule: SyncSchedule) -> str:
        """Return why the strategy does not work with this schedule, as words after its name; empty: it works."""
        return ""

    def elements(self, trainable: int) -> int:
        """Return how many values one exchange carries."""
        return trainable

    def carried(self, trainable: int, codec: str) -> int:
        """Return how many values in this codec have the size of one exchange.

        Differs from :meth:`elements` if part of the exchange uses another codec.
        """
        return self.elements(trainable)

    def longest(self, trainable: int) -> int:
        """Return the number of elements of the longest vector of one operation."""
        return self.elements(trainable)

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        """Yield the schedules that the planner may choose from; none: the strategy makes no sense in this run."""
        yield SyncSchedule()

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        """Return how many seconds of an exchange a member's compute hides.

        Args:
            exchange: seconds of one exchange.
            settings: hold the strategy's options.
        """
        return 0.0

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        """Return how well the strategy learns.

        Args:
            effective_members: speed of the group in units of its fastest machine.
        """
        return Learning()

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        """Return the options that a plan with this schedule sets, by name."""
        return {}


class OptionCosts(CostModel, Generic[Options]):
    """Base class of cost models that depend on the strategy's options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def with_options(self, settings: OptionsByOwner) -> CostModel:
        return type(self)(settings.of(type(self._options)))


INTERVALS = (5, 10, 20, 30, 50, 100, 200, 500)
"""Steps between two exchanges of weights, from which a plan chooses."""
LOSS_UNKNOWN = "what it costs in loss is not known"
ONLY_TEXTS = "what it costs in loss was measured for trained language models only"
FEWEST_ROUNDS = 3
"""Fewer were not measured."""
LORA_INTERVAL = 20
"""Longest interval for LoRA: the mean of two adapters is not the adapter of the mean weights, and the difference grows
with the interval."""


def intervals(run: RunSpec) -> Iterator[int]:
    """Yield the :data:`INTERVALS` that leave enough rounds for a run that merges weights."""
    fewest = max(FEWEST_ROUNDS, codec_by_name(run.codec).fewest_rounds)
    for interval in INTERVALS:
        if run.steps // interval >= fewest and not (run.lora and interval > LORA_INTERVAL):
            yield interval


def interpolate(table: Mapping[int, float], x: float, extended: bool = False) -> float:
    """Return a table's value at ``x``, linear in log x; extrapolated below its start, constant beyond its end.

    Args:
        extended: extrapolate beyond the end as well.
    """
    points = sorted(table.items())
    if x >= points[-1][0] and not extended:
        return points[-1][1]
    above = next((index for index, (at, _) in enumerate(points) if at > x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, above - 1)], points[max(1, above)]
    return y0 + (y1 - y0) * math.log(max(x, 0.5) / x0) / math.log(x1 / x0)


def merge_efficiency(members: float, gain: float) -> float:
    """Return the effective share of the group's samples: ``(1 + (m - 1) g) / m``.

    Args:
        members: speed of the group in units of its fastest machine, ``m``.
        gain: effective share of the others' work, ``g``: 1 as with per-step averaging, 0 as on one machine alone.
    """
    return (1.0 + (members - 1.0) * gain) / members


def batch_efficiency(ratio: float, rule: str) -> float:
    """Return the effective share of a larger batch's samples: ``(1 + (k - 1) g) / k``; 1 if it is not larger.

    Args:
        ratio: global batch over the batch of one member alone, ``k``.
        rule: how the learning rate is scaled (``lr_scaling``): off, sqrt or linear.
    """
    k = max(1.0, ratio)
    return (1.0 + (k - 1.0) * _BATCH_GAIN[rule]) / k
