"""What a strategy costs: pure functions of sizes, seconds and settings, which the planner puts together with links and
machines (:mod:`distributed.planning.prediction`).

A strategy states its costs beside its algorithm. Loss tables hold what was measured or published, are interpolated over
the logarithm of their variable, and are never better than their best entry; those by interval go on rising beyond the
longest one. They come from small models and few seeds: they order strategies, they promise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from profiles.declarations import Owning, Section
from training.exchange.codecs import codec_by_name

if TYPE_CHECKING:
    from profiles.schema import Profile

Start = Literal["pretrained", "scratch"]
Options = TypeVar("Options", bound=Section)


def start_of(profile: Profile) -> Start:
    """Return what a profile's model is when training begins. Nobody but the person knows it of a custom one: it counts
    as new, which asks for more frequent exchanges than a trained one needs."""
    if profile.strategy.planned_as != "auto":
        return profile.strategy.planned_as
    return "scratch" if profile.model.from_scratch or profile.model.trait == "own code" else "pretrained"


BATCH_SOURCE = {"batch": "larger batch by the learning-rate rule: own check, 0.87 M parameters, one seed, batch x 4"}
_BATCH_GAIN = {"off": 0.37, "sqrt": 0.80, "linear": 1.0, "auto": 0.80}
"""Share of four times the batch that counts, in steps of one machine to the same loss: 635, 1023 and over 1200 to 300.
Own check, a fine-tune at 1, 2 and 4 times the learning rate."""


@dataclass(frozen=True)
class Rhythm:
    """When members exchange."""

    interval: int = 1
    """Steps between exchanges, H."""
    delay: int = 0
    """Steps that an exchange overlaps with."""


@dataclass(frozen=True)
class Course:
    """The run in which a strategy is to work."""

    steps: int
    """Optimizer steps."""
    start: Start = "pretrained"
    """What the model is when training begins."""
    lora: bool = False
    codec: str = "fp32"
    texts: bool = False
    """Whether it is a language model."""

    @property
    def trains_texts(self) -> bool:
        """Whether it is a fine-tune of a language model."""
        return self.texts and self.start == "pretrained"

    def rounds(self, rhythm: Rhythm) -> int:
        """Return how many exchanges there will be, one at least."""
        return max(1, self.steps // rhythm.interval)


@dataclass(frozen=True)
class Compute:
    """One member's step without any exchange."""

    seconds: float
    passes: int
    """Forward and backward passes that it is made of (gradient accumulation)."""
    trainable: int
    """Parameters."""


@dataclass(frozen=True)
class Learning:
    """What a strategy learns from the group's samples."""

    share: float = 1.0
    """Share of them that counts: 1 as with per-step averaging."""
    loss: float = 0.0
    """How much higher than with per-step averaging the loss may be expected to end, as a share."""
    sources: tuple[str, ...] = ()
    """Keys of :attr:`CostModel.sources` and of the codecs'."""


class CostModel:
    """What a strategy costs. As it stands: all trainable parameters in every step, exact, and nothing hides it."""

    codecs: tuple[str, ...] = ("fp32", "bf16")
    """What it may send; its own first."""
    exact: ClassVar[bool] = True
    """Whether it equals one machine with the joint batch, but for what the codec loses."""
    vectors: int = 1
    """Vectors of all trainable parameters in fp32 that it keeps beside the optimizer."""
    on_device: ClassVar[bool] = True
    """Whether they are in the memory of the device that trains, or in the processor's."""
    gathers: ClassVar[bool] = False
    """Whether every member sends what it has to every other one, and not to those who average it."""
    waits: ClassVar[bool] = True
    """Whether a member waits for slower ones; if not, a step of the group takes the mean of their paces."""
    uneven: bool = False
    """Whether some of its exchanges carry more than others: a step costs what it does on average then."""
    group: int = 0
    """How many members exchange with each other at once, each time others; 0: all do."""
    interval_option: str = ""
    """The option that holds the steps between exchanges, where a person may choose them."""
    merge_ns: ClassVar[float] = 0.0
    """Nanoseconds of one core for a trainable parameter at an exchange, that nothing hides."""
    sources: ClassVar[Mapping[str, str]] = {}
    """Where the figures of :meth:`learning` are from, in a line each."""

    def with_options(self, settings: Owning) -> CostModel:
        """Return the costs with these options of the strategy; as they stand, whatever the options are."""
        return self

    def unsound(self, course: Course) -> str:
        """Return why ``strategy = auto`` does not rank it in such a run, as words after its name; empty: it does, for
        what it costs in loss there is known from measurements (:meth:`learning`). It is predicted where a person asks.
        """
        return ""

    def refused(self, course: Course, rhythm: Rhythm) -> str:
        """Return why the strategy does not train in this rhythm, as words after its name; empty: it does."""
        return ""

    def elements(self, trainable: int) -> int:
        """Return how many parameters one exchange carries."""
        return trainable

    def carried(self, trainable: int, codec: str) -> int:
        """Return how many parameters in this codec have the size of one exchange: as :meth:`elements`, unless part of
        it goes in another codec."""
        return self.elements(trainable)

    def longest(self, trainable: int) -> int:
        """Return the elements of the longest vector that is exchanged at once."""
        return self.elements(trainable)

    def rhythms(self, course: Course) -> Iterator[Rhythm]:
        """Yield the rhythms to choose from; none where the strategy makes no sense in this run."""
        yield Rhythm()

    def hidden(self, exchange: float, compute: Compute, rhythm: Rhythm, settings: Owning) -> float:
        """Return how many seconds of an exchange of so many a member's compute hides.

        Args:
            settings: with the strategy's own options.
        """
        return 0.0

    def learning(self, course: Course, rhythm: Rhythm, worth: float) -> Learning:
        """Return what is learnt.

        Args:
            worth: how many of its fastest machine the group is worth.
        """
        return Learning()

    def settings(self, course: Course, rhythm: Rhythm) -> dict[str, str | int | float | bool]:
        """Return the options that a plan with this rhythm sets, by name."""
        return {}


class OwnCosts(CostModel, Generic[Options]):
    """Costs that follow from the strategy's own options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def with_options(self, settings: Owning) -> CostModel:
        return type(self)(settings.of(type(self._options)))


INTERVALS = (5, 10, 20, 30, 50, 100, 200, 500)
"""Steps between two exchanges of weights that a plan chooses from."""
LOSS_UNKNOWN = "what it costs in loss is not known"
ONLY_TEXTS = "what it costs in loss was measured for trained language models only"
FEWEST_ROUNDS = 3
"""With fewer nothing was measured."""
LORA_INTERVAL = 20
"""The mean of two adapters is not the adapter of the mean, and the difference grows with the interval."""


def intervals(course: Course) -> Iterator[int]:
    """Yield the :data:`INTERVALS` with which a run that merges weights has rounds enough."""
    fewest = max(FEWEST_ROUNDS, codec_by_name(course.codec).fewest_rounds)
    for interval in INTERVALS:
        if course.steps // interval >= fewest and not (course.lora and interval > LORA_INTERVAL):
            yield interval


def interpolate(table: Mapping[int, float], x: float, extended: bool = False) -> float:
    """Return a table's value at ``x``, linear in log x; extended below its begin, and its last entry beyond its end.

    Args:
        extended: beyond its end, too: what is rarer than anything that was measured is no better than that.
    """
    points = sorted(table.items())
    if x >= points[-1][0] and not extended:
        return points[-1][1]
    above = next((index for index, (at, _) in enumerate(points) if at > x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, above - 1)], points[max(1, above)]
    return y0 + (y1 - y0) * math.log(max(x, 0.5) / x0) / math.log(x1 / x0)


def merge_efficiency(members: float, gain: float) -> float:
    """Return the share of the group's samples that count: ``(1 + (m - 1) g) / m``.

    Args:
        members: how many of its fastest machine the group is worth, ``m``.
        kept: share of the others' work that counts, ``g``: 1 as with per-step averaging, 0 as with one machine alone.
    """
    return (1.0 + (members - 1.0) * gain) / members


def batch_efficiency(ratio: float, rule: str) -> float:
    """Return the share of a larger batch's samples that count: ``(1 + (k - 1) g) / k``; 1 for no larger batch.

    Args:
        ratio: global batch over the batch of one member alone, ``k``.
        rule: how the learning rate follows it (``lr_scaling``): off, sqrt or linear.
    """
    k = max(1.0, ratio)
    return (1.0 + (k - 1.0) * _BATCH_GAIN[rule]) / k
