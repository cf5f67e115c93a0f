"""Base class of strategies: the calls between trainer and strategy.

For every optimizer step the trainer calls::

    strategy.begin_step(step, weight, scale)  # before the first backward
    strategy.last_backward()              # before the backward of the last micro-batch
    strategy.gradients()                  # after it: makes gradients final (exchanged or local)
    optimizer.step()
    report = strategy.end_step()          # weights may be exchanged here
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from profiles.declarations import Section
from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, Traffic
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.costs import CostModel, Start, SyncSchedule
from training.strategies.weights import NonFiniteCounter, trainable

if TYPE_CHECKING:
    from training.strategies.async_work import WorkUnit


def sync_event(
    traffic: Traffic,
    round_: int,
    members: Sequence[int],
    weight_hash: str,
    drift: float | None,
    delta_norm: float | None = None,
    correlation: float | None = None,
) -> SyncEvent:
    """Return the event of a synchronisation with this traffic; the trainer adds step and compression.

    Args:
        drift: see :class:`~training.records.events.SyncEvent`.
        delta_norm: see there.
        correlation: see there; 1 if the weights do not differ.
    """
    return SyncEvent(
        step=0,
        round=round_,
        bytes_sent=traffic.bytes_sent,
        bytes_received=traffic.bytes_received,
        seconds=max(traffic.transfer_seconds, traffic.wait_seconds),  # a waiting thread is woken after the result
        wait=traffic.wait_seconds,
        members=list(members),
        weight_hash=weight_hash,
        drift=drift,
        delta_norm=delta_norm,
        correlation=1.0 if drift == 0.0 else correlation,
    )


CODEC_FOR_DIFFERENCES = "is made for differences; what is sent here are weights, which it would spoil"
FEEDS_BACK_ITSELF = "which feeds its errors back by itself"


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy knows about the run."""

    settings: StrategySettings
    total_steps: int
    seed: int
    warn: Callable[[str], None] = field(default=lambda message: None)
    """Called with a line to show to the user."""
    start: Start = "scratch"
    """Whether the model is pretrained or new when training begins."""
    max_grad_norm: float = 0.0
    """Norm to which gradients are clipped, for strategies that clip (:attr:`Strategy.clips`); 0: no clipping."""


@dataclass(frozen=True)
class ChosenStrategy:
    """A strategy and its options as a script gives them: ``DiLoCo(sync_interval=50)``."""

    kind: type[Strategy]
    options: Mapping[str, Any]
    """Of the strategy, by the names of its fields, and those that all strategies have."""


class _StrategyType(ABCMeta):
    """Without a context, as workers have it, a call of the class makes a choice of it."""

    def __call__(cls, *context: Any, **options: Any) -> Any:
        if context or "context" in options:
            return super().__call__(*context, **options)
        return ChosenStrategy(cast("type[Strategy]", cls), options)


class Strategy(metaclass=_StrategyType):
    """Base class: when members exchange gradients or weights, and how they merge them.

    A strategy is one file in this folder; the rest of the program finds it through the registry.
    """

    name: ClassVar[str]
    """Name in settings."""
    summary: ClassVar[str]
    """One line for lists."""
    options: ClassVar[type[Section]] = Section
    """Its options, ``name.option`` in settings; ``context.settings.of(options)`` returns their values."""
    costs: ClassVar[CostModel | None] = None
    """Its cost model; ``None``: unknown, so that the planner never chooses it by itself."""
    merges: ClassVar[Literal["gradients", "weights"]] = "weights"
    """What members exchange: gradients (final after :meth:`gradients`), or weights between two steps."""
    scales_learning_rate: ClassVar[tuple[Start, ...]] = ("pretrained",)
    """For which models ``lr_scaling = auto`` scales the learning rate with the global batch: for both if a step sees
    that batch. If it sees a member's own batch, scaling helped pretrained models whose weights were merged often;
    models from scratch ended worse than on one machine (docs/reference/strategies.md)."""
    equal: ClassVar[Literal["always", "synchronised", "never"]] = "synchronised"
    """When all members hold the same weights, bit for bit: after every step, when :attr:`synchronised` is true, or only
    inside :meth:`consensus`."""

    @classmethod
    def has_equal_snapshots(cls, settings: StrategySettings) -> bool:
        """Return whether the snapshots of all members after a step are equal, so that one of them is enough."""
        return False

    anchored: ClassVar[bool] = False
    """Whether members continue from an anchor that the strategy keeps, and not from the weights it finds in the model:
    two such strategies in a composition would undo each other's merges."""
    replaces_optimizer: ClassVar[bool] = False
    """Whether it replaces the optimizer: :meth:`gradients` leaves the update direction in ``p.grad``, applied with the
    learning rate and decoupled weight decay. The gradients it gets are clipped already."""
    is_elementwise: ClassVar[bool] = False
    """Whether what becomes of a tensor depends on its own values alone, with a codec that rounds each number alone. Two
    devices of a member that hold the same tensor among different others then keep it alike."""

    @classmethod
    def acts_elementwise(cls, settings: StrategySettings) -> bool:
        """Return whether it :attr:`is_elementwise` with these settings."""
        return cls.is_elementwise

    @classmethod
    def why_not_in_parts(cls, settings: StrategySettings) -> str:
        """Return why it does not work on parts of a model, each given to a process as if it were the whole, as words
        after its name; empty: it does."""
        if cls.replaces_optimizer:
            return "limits gradients by the norm of all weights, of which each device has a part"
        if cls.segment_steps(settings):
            return "lets each member make steps of its own, on which its devices would have to agree"
        return ""

    survives_failed_exchange: ClassVar[bool] = True
    """Whether a member whose exchange in :meth:`end_step` fails still holds a valid state, as after a step without that
    exchange. A member that loses its group writes its snapshot then."""
    is_default: ClassVar[bool] = False
    """Whether it is the default if links cost nothing, and for a single machine."""

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        """Return why only the codecs of its cost model work with these settings, as words after ``codec = NAME``;
        empty: all codecs work."""
        return ""

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        """Return why ``error_feedback`` has no effect with these settings, as words after it; empty: it has one."""
        return ""

    @classmethod
    def codec(cls, settings: StrategySettings) -> str:
        """Return the name of the codec: the configured one, or the first of the cost model.

        Raises:
            BadInput: see :meth:`why_only_own_codecs` and :meth:`why_no_feedback`.
        """
        if settings.error_feedback and (why := cls.why_no_feedback(settings)):
            hint = "set error_feedback = false"
            raise BadInput(f"has no effect {why}", hint, option="error_feedback", place="error_feedback")
        supported_codecs = cls.costs.with_options(settings).codecs if cls.costs is not None else ("fp32",)
        name = supported_codecs[0] if settings.codec == "auto" else settings.codec
        if name not in supported_codecs and (why := cls.why_only_own_codecs(settings)):
            raise BadInput(f"codec = {name} {why}", f"one of {', '.join(supported_codecs)}, or auto", option="codec")
        return name

    @classmethod
    def check(cls, settings: StrategySettings) -> None:
        """Reject settings with which a group cannot train.

        Raises:
            BadInput: see :meth:`codec`; names the option.
        """
        cls.codec(settings)

    @classmethod
    def settings_for_resume(cls, settings: StrategySettings) -> StrategySettings:
        """Return the settings for resuming a run: without ``error_feedback`` if it has no effect."""
        idle = settings.error_feedback and cls.why_no_feedback(settings)
        return settings.model_copy(update={"error_feedback": False}) if idle else settings

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        """Return how often members synchronise with these settings."""
        return SyncSchedule()

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        """Return settings for a short trial, with synchronisations at most ``interval`` steps apart."""
        return settings

    @classmethod
    def segment_steps(cls, settings: StrategySettings) -> int:
        """Return the most steps of a segment in which members train at their own pace; 0: all make the same steps."""
        return 0

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self._members: tuple[int, ...] = ()
        self._non_finite_counter = NonFiniteCounter(context.warn)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Receive the optimizer, before :meth:`attach`: a strategy may drop the state of weights that this member does
        not update, and fetch it from another member."""

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        """Bind to a model's trainable parameters and an exchange.

        The weights are equal on all members when a run begins; after a resume, and on a newcomer, strategies with
        ``equal != "always"`` may find different ones.
        """
        self._exchange, self._members, self._alone = exchange, exchange.members, exchange.engine == "solo"
        self._parameters = trainable(model)
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def begin_segment(
        self,
        begin: int,
        end: int,
        owners: Sequence[int],
        meeting_requested: Callable[[int], bool],
        set_end: Callable[[int], None],
    ) -> None:
        """Begin a segment in which members train at their own pace (see :meth:`segment_steps`); all members call it
        together.

        Each makes the steps of :attr:`work_units`. If it is empty, all have met, and :attr:`synchronised` is true.

        Args:
            begin: steps of the run before the segment.
            end: steps of the run after it, unless a member requests an earlier meeting.
            owners: ranks among which the samples of a step are divided.
            meeting_requested: returns whether this member requests a meeting after so many steps of the run; called by
                any thread.
            set_end: called with the steps of the run after which they meet earlier than planned; called by any thread.
        """

    @property
    def work_units(self) -> Sequence[WorkUnit]:
        """Work units that this member trains on in its next steps of the segment, as far as they are known."""
        return ()

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        """Begin a step.

        Args:
            step: number of the step, from 0.
            weight: samples (or tokens) that this member's loss is a mean over.
            scale: factor of the loss; ``None``: no loss scaling.
        """

    def last_backward(self) -> None:
        """Called before the backward that completes the step's gradients."""

    def restart_backward(self) -> None:
        """Called if the step's backward passes are repeated from zero gradients, after one ran out of memory.

        What was sent already holds complete gradients of this step, and stays valid.
        """

    def release_memory(self) -> bool:
        """Move to the host what does not have to be on the device, as a pass ran out of memory there; return whether
        there was anything."""
        return False

    def gradients(self) -> None:
        """Make ``p.grad`` final; called before the optimizer, and before clipping unless :attr:`replaces_optimizer`."""

    @property
    def clips(self) -> bool:
        """Whether :meth:`gradients` clips each member's own gradient; the caller does not clip then."""
        return False

    @property
    def gradient_norm(self) -> float | None:
        """Norm of this step's complete gradient, after :meth:`gradients`, without the loss scale.

        ``None``: this member holds all of the gradient, and the caller computes the norm. If the strategy clips, the
        norm of this member's own gradient before clipping; ``None`` if clipping is off.
        """
        return None

    @property
    def steps_to_average(self) -> int | None:
        """After how many steps all members hold the average of what this member holds at the end of the next step.

        ``None``: the weights of that step are not averaged.
        """
        return 0

    @abstractmethod
    def end_step(self) -> SyncEvent | None:
        """Called after the optimizer step; return an event if a synchronisation ended here (its ``step`` is unset)."""

    def finish(self) -> SyncEvent | None:
        """Synchronise what is left at the end of training; afterwards the result is in :meth:`consensus`."""
        return None

    @property
    def is_alone(self) -> bool:
        """Whether there are no other members."""
        return self._alone

    @property
    @abstractmethod
    def synchronised(self) -> bool:
        """Whether members are at a synchronisation point: all after the same step, no exchange in flight and no local
        step since the last one. The answer is equal on all members; the weights need not be."""

    def meets(self, report: SyncEvent | None) -> bool:
        """Return whether members meet after the step with this report: they evaluate there, and newcomers join."""
        return self.synchronised or report is not None

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that contributed to the last synchronisation, ascending."""
        return self._members

    @property
    def unsent_steps(self) -> int:
        """The last steps, which the last synchronisation does not hold, as it began before them."""
        return 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the strategy's tensors for a snapshot (outer momentum, residual, anchor)."""
        return {}

    def rounds_held(self, state: Mapping[str, Any]) -> int:
        """Return how many rounds' results a snapshot holds, from what :meth:`state` returned for it.

        Members that lost one another in mid-exchange may differ in it at the same step.
        """
        return 0

    def state(self) -> dict[str, Any]:
        """Return JSON-able state for a snapshot (round, steps since the last synchronisation)."""
        return {}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        """Return the subset of :meth:`tensors` that belongs to the group, not to this member."""
        return {}

    def newcomer_state(self) -> dict[str, Any]:
        """Return :meth:`state` with only what belongs to the group, not to this member."""
        return {}

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the group's weights in the model: those that are evaluated, and saved at the end.

        Entered at a synchronisation point by all members or by none, so it may exchange. Inside, all members hold the
        same weights; afterwards each holds its own again.
        """
        yield

    @contextmanager
    def for_newcomer(self) -> Iterator[None]:
        """Hold in the model the weights that a newcomer starts from, at a synchronisation point.

        Entered by one member alone, so it must not exchange.
        """
        yield

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Restore what :meth:`tensors` and :meth:`state` returned."""
