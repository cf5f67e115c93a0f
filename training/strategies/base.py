"""What a strategy gives to the trainer.

The trainer calls, for every optimizer step::

    strategy.begin_step(step, weight, scale)  # before the first backward
    strategy.last_backward()              # before the backward of the last micro-batch
    strategy.gradients()                  # after it: gradients are final (exchanged or local)
    optimizer.step()
    report = strategy.end_step()          # weights may be exchanged here
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from profiles.declarations import Section
from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.events import SyncEvent
from training.exchange.base import Exchange, Traffic
from training.lazy import nn, torch
from training.strategies.costs import CostModel, Rhythm, Start
from training.strategies.weights import Refusals, trainable

if TYPE_CHECKING:
    from training.strategies.arrivals import WorkUnit


def sync_event(
    traffic: Traffic,
    round_: int,
    members: Sequence[int],
    weight_hash: str,
    drift: float | None,
    delta_norm: float | None = None,
    correlation: float | None = None,
) -> SyncEvent:
    """Return what a synchronisation that took this traffic tells; the trainer adds step and compression.

    Args:
        drift: see :class:`~training.events.SyncEvent`.
        delta_norm: likewise.
        correlation: likewise; of weights that do not differ it is 1.
    """
    return SyncEvent(
        step=0,
        round=round_,
        bytes_sent=traffic.bytes_sent,
        bytes_received=traffic.bytes_received,
        seconds=traffic.transfer_seconds,
        wait=traffic.wait_seconds,
        members=list(members),
        weight_hash=weight_hash,
        drift=drift,
        delta_norm=delta_norm,
        correlation=1.0 if drift == 0.0 else correlation,
    )


FOR_DIFFERENCES = "is made for differences; what is sent here are weights, which it would spoil"
FED_BACK = "which feeds its errors back by itself"


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy needs to know of the run."""

    settings: StrategySettings
    total_steps: int
    seed: int
    warn: Callable[[str], None] = field(default=lambda message: None)
    """Takes one line for the person who watches."""
    start: Start = "scratch"
    """What the model is when training begins."""
    max_grad_norm: float = 0.0
    """What gradients are clipped to; 0: they are not. For strategies that do it themselves (:attr:`Strategy.clips`)."""


class Strategy(ABC):
    """When members exchange gradients or weights, and how they merge them.

    A strategy is one file of this folder, with everything that others know of it: they find it through the registry.
    """

    name: ClassVar[str]
    """In settings."""
    summary: ClassVar[str]
    """What it does, in one line for lists."""
    options: ClassVar[type[Section]] = Section
    """Options of its own, called ``name.option`` in settings; ``context.settings.of(options)`` gives their values."""
    costs: ClassVar[CostModel | None] = None
    """What it costs; ``None``: not known, so that it is only taken where a person asks for it."""
    merges: ClassVar[Literal["gradients", "weights"]] = "weights"
    """What members exchange: gradients, which are final after :meth:`gradients`, or weights between two steps."""
    raises_rate: ClassVar[tuple[Start, ...]] = ("pretrained",)
    """Which models ``lr_scaling = auto`` trains at a rate that follows the batch of all members: both, where a step
    sees that batch. Where it sees a member's own, that helped trained models whose weights were merged often; models
    from scratch ended worse than on one machine alone (docs/reference/strategies.md)."""
    equal: ClassVar[Literal["always", "synchronised", "never"]] = "synchronised"
    """When all members hold the same weights, bit for bit: after every step, where :attr:`synchronised` is true, or
    nowhere but in :meth:`consensus`."""

    @classmethod
    def alike(cls, settings: StrategySettings) -> bool:
        """Whether the snapshots of all members after a step hold the same, so that any of them serves all."""
        return False

    anchored: ClassVar[bool] = False
    """Whether members go on from weights that it keeps by itself, and not from those that it finds: another strategy
    beside it that does so, too, would undo what it did, or do it again."""
    updates: ClassVar[bool] = False
    """Whether it is the optimizer as well: :meth:`gradients` leaves the step itself, which is made by the learning
    rate, with decoupled weight decay. What it finds in ``p.grad`` is clipped already."""
    ends_whole: ClassVar[bool] = True
    """Whether a member whose exchange in :meth:`end_step` fails can go on from what it holds, as after a step without
    that exchange. A member that loses its group writes its snapshot there."""
    is_usual: ClassVar[bool] = False
    """Whether it is the one for workers between whom links cost nothing, and for one machine alone."""

    @classmethod
    def only_own_codecs(cls, settings: StrategySettings) -> str:
        """Return why no codec but those of its costs goes with these settings, as words after ``codec = NAME``; empty:
        others do too."""
        return ""

    @classmethod
    def no_feedback(cls, settings: StrategySettings) -> str:
        """Return why ``error_feedback`` has no effect with these settings, as words after it; empty: it has one."""
        return ""

    @classmethod
    def codec(cls, settings: StrategySettings) -> str:
        """Return the name of the codec: the one that is set, or its own.

        Raises:
            BadInput: see :meth:`only_own_codecs` and :meth:`no_feedback`.
        """
        if settings.error_feedback and (why := cls.no_feedback(settings)):
            hint = "set error_feedback = false"
            raise BadInput(f"has no effect {why}", hint, option="error_feedback", place="error_feedback")
        supported_codecs = cls.costs.with_options(settings).codecs if cls.costs is not None else ("fp32",)
        name = supported_codecs[0] if settings.codec == "auto" else settings.codec
        if name not in supported_codecs and (why := cls.only_own_codecs(settings)):
            raise BadInput(f"codec = {name} {why}", f"one of {', '.join(supported_codecs)}, or auto", option="codec")
        return name

    @classmethod
    def check(cls, settings: StrategySettings) -> None:
        """Refuse settings with which no group can train.

        Raises:
            BadInput: see :meth:`codec`; names the option.
        """
        cls.codec(settings)

    @classmethod
    def resumed(cls, settings: StrategySettings) -> StrategySettings:
        """Return the settings with which a run goes on that may be older than :meth:`no_feedback`: without what had no
        effect."""
        idle = settings.error_feedback and cls.no_feedback(settings)
        return settings.model_copy(update={"error_feedback": False}) if idle else settings

    @classmethod
    def rhythm(cls, settings: StrategySettings) -> Rhythm:
        """Return when members synchronise with these settings."""
        return Rhythm()

    @classmethod
    def rehearsed(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        """Return settings with which synchronisations are at most ``interval`` steps apart, to try them out."""
        return settings

    @classmethod
    def stretch(cls, settings: StrategySettings) -> int:
        """Return how many steps of the run members make at their own pace until they meet, at most; 0: all make the
        same steps, one after another."""
        return 0

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self._members: tuple[int, ...] = ()
        self._refusals = Refusals(context.warn)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Get to know the optimizer that makes the steps, before :meth:`attach`: a strategy may take away the state of
        weights that this member does not step, and bring it from where it is."""

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        """Take hold of the trainable parameters. They are equal on all members where a run begins; a partial strategy
        may be attached to others after a resume, or as a newcomer."""
        self._exchange, self._members, self._alone = exchange, exchange.members, exchange.engine == "solo"
        self._parameters = trainable(model)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def begin_stretch(
        self, begin: int, end: int, owners: Sequence[int], asked: Callable[[int], bool], ends: Callable[[int], None]
    ) -> None:
        """Members begin to train at their own pace, all together, with a :meth:`stretch`: each makes the steps that
        :attr:`places` names, and where it names none all have met, and :attr:`synchronised` is true.

        Args:
            begin: steps of the run before it.
            end: steps of the run after it, unless one of them is asked for something.
            owners: ranks among whom the samples of a step are divided.
            asked: returns whether this member is to meet the others if that can be after so many steps of the run; any
                thread may call it.
            ends: takes the steps of the run after which they meet sooner than planned, likewise.
        """

    @property
    def places(self) -> Sequence[WorkUnit]:
        """What this member trains on in the next steps of a stretch, as far as it is known."""
        return ()

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        """A step begins.

        Args:
            weight: what this member's loss is a mean over in this step.
            scale: what its loss is multiplied by; ``None`` without loss scaling.
        """

    def last_backward(self) -> None:
        """The next backward completes the step's gradients."""

    def backward_again(self) -> None:
        """The step's backward passes begin anew, from gradients of zero: one of them ran out of memory.

        What was exchanged already holds whole gradients of this step, and stays.
        """

    def gradients(self) -> None:
        """Make ``p.grad`` final: before clipping, but for :attr:`updates`, and before the optimizer."""

    @property
    def clips(self) -> bool:
        """Whether :meth:`gradients` clips, each member's own gradient; the caller does not, then."""
        return False

    @property
    def gradient_norm(self) -> float | None:
        """The norm of this step's whole gradient, after :meth:`gradients`, without the loss scale.

        ``None``: this member holds all of it, and everybody can see. Where the strategy clips it is that of this
        member's own gradient before that, ``None`` if nothing is clipped.
        """
        return None

    @property
    def steps_to_average(self) -> int | None:
        """How many steps after the one that ends next all hold the average of what this member holds now.

        ``None``: its weights are not averaged then.
        """
        return 0

    @abstractmethod
    def end_step(self) -> SyncEvent | None:
        """Called after the optimizer step; a report if a synchronisation ended here (without its step)."""

    def finish(self) -> SyncEvent | None:
        """Synchronise what is left at the end of the training; the result is what :meth:`consensus` holds after it."""
        return None

    @property
    @abstractmethod
    def synchronised(self) -> bool:
        """Whether members stand at a synchronisation point: all after the same step, with no exchange under way and no
        step of their own since the last one. The answer is the same on all; the weights need not be."""

    def meets(self, report: SyncEvent | None) -> bool:
        """Whether members meet after the step that ended with this report: they evaluate, and newcomers begin."""
        return self.synchronised or report is not None

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks whose contributions the last synchronisation of this strategy held, ascending."""
        return self._members

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the strategy's own state for a snapshot (outer momentum, error feedback, anchor)."""
        return {}

    def state(self) -> dict[str, Any]:
        """JSON-able state for a snapshot (round, steps since the last synchronisation)."""
        return {}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """The part of :meth:`tensors` that belongs to the group, not to this member."""
        return {}

    def newcomer_state(self) -> dict[str, Any]:
        """The part of :meth:`state` that belongs to the group, not to this member."""
        return {}

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold in the model the weights that stand for the group: they are evaluated, and saved at the end.

        Entered at a synchronisation point by all members or by none, so it may exchange. All hold the same weights in
        it, and their own again after it.
        """
        yield

    @contextmanager
    def for_newcomer(self) -> Iterator[None]:
        """Hold in the model the weights that a newcomer starts from, at a synchronisation point.

        Entered by one member alone, so it exchanges nothing.
        """
        yield

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Take back what :meth:`tensors` and :meth:`state` gave."""
