"""Typed events: the one language between worker, supervisor, command line, dashboard and report.

One JSON object a line. ``v`` is the version of the whole vocabulary; readers keep events of an unknown kind as
:class:`UnknownEvent`, so that an older reader can show a newer run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_serializer

from profiles.errors import MusterError, NothingToResume, OthersLost
from training.records.bounded_fields import (
    MOST_RANKS,
    Count,
    Measured,
    Moment,
    Name,
    Number,
    Rank,
    Seconds,
    Step,
    Text,
    first_problem,
    parse_object,
)

EVENTS_VERSION = 1
BUSY = 0.2
"""Share of the processors from which the load of others is reported."""
_FULL = 0.9
MOST_WAYS = 256
"""Peers whose paths one member reports."""


class _Event(BaseModel):
    """Every field has bounds (see :mod:`training.records.bounded_fields`): events may come from untrusted machines."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Count = EVENTS_VERSION
    time: Moment = Field(default_factory=time.time)
    """Seconds since the epoch on the machine that wrote the event."""
    member: Rank | None = None
    """Rank of the member that wrote the event; ``None`` for the run itself. Set where events are merged."""
    seq: Count | None = None
    """Position in the run's merged log, set by the writer of ``events.jsonl``."""
    line: Count | None = None
    """Number of the line at the agent of the worker that wrote it: who goes on in the place of a killed supervisor asks
    for the lines after it. ``None``: the worker has no agent, or the event is not a worker's."""


class RunEvent(_Event):
    """The run changed its status."""

    kind: Literal["run"] = "run"
    status: Literal["starting", "running", "paused", "completed", "failed", "cancelled"]
    message: Text = ""
    total_steps: Step | None = None
    details: dict[Name, Any] = Field(default_factory=dict, max_length=64)


class MemberEvent(_Event):
    """A member changed its state. ``lost`` means that it went without leaving the group."""

    kind: Literal["member"] = "member"
    status: Literal["started", "ready", "joined", "left", "lost", "done", "failed"]
    name: Name = ""
    device: Name = ""
    message: Text = ""


EVALUATES = "evaluating "
"""Begin of the phase of an evaluation; the name of the split follows."""
SAVES_MODEL = "saving the model"
"""The phase of whoever saves the trained model."""


class ProgressEvent(_Event):
    """Work that is no step: before the first one (feature extraction, downloads), evaluations, saving the model."""

    kind: Literal["progress"] = "progress"
    phase: Name
    done: Count
    total: Count | None = None


class StepEvent(_Event):
    """One optimizer step of one member. Times in seconds."""

    kind: Literal["step"] = "step"
    step: Step
    epoch: Number
    loss: Number
    learning_rate: Number
    samples: Count
    weight: Number
    """What the loss is averaged over: samples, or tokens for a per-token loss."""
    compute: Seconds
    """Data, forward, backward and optimizer."""
    wait: Seconds
    """Exposed wait: the time that this step waited for an exchange."""
    transfer: Seconds
    """Time that exchanges were under way during the step, hidden or not."""
    data: Seconds = 0.0
    """The part of ``compute`` in which the step waited for its samples."""
    gave_way: Measured = None
    """The seconds of ``compute`` in which the member rested for the owner of its machine; ``None``: it did not."""
    grad_norm: Measured = None
    """``None`` also if it is not finite, as in a step that fp16 skips."""
    own_norm: Measured = None
    """Of this member's own gradient, where ``grad_norm`` is that of the mean of all."""
    bytes_sent: Count = 0
    bytes_received: Count = 0
    stages: Annotated[tuple[Seconds, ...], Field(max_length=64)] = ()
    """Seconds in which each device of a divided model computed; in the rest of the step it waited for the others."""
    clock: Measured = None
    """Of simulated machines, whose times the above are then: seconds since the run began, at the end of the step."""

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.compute + self.wait


class SyncEvent(_Event):
    """One synchronisation of one member."""

    kind: Literal["sync"] = "sync"
    step: Step
    round: Count
    bytes_sent: Count
    bytes_received: Count
    seconds: Seconds
    """From the start of the exchange to its result."""
    wait: Seconds
    """The part of ``seconds`` in which training waited."""
    members: list[Rank] = Field(max_length=4096)
    """Ranks whose contribution is in the result."""
    weight_hash: Name = ""
    """Hash of the synchronised weights: equal on all members."""
    drift: Measured = None
    """Largest absolute difference that was found between the members' weights, and mended; where they differ on
    purpose, of this member's from the mean. ``None``: not compared."""
    rounds: dict[Name, Count] | None = Field(default=None, max_length=64)
    """With several strategies at once: the number of rounds of each strategy whose exchange ended here."""
    correlation: Measured = None
    """Pearson correlation of this member's weights with the mean, of those that ``drift`` compares."""
    delta_norm: Measured = None
    """Euclidean norm of this member's contribution: the change since the last synchronisation or, where weights
    themselves are averaged, their difference from the mean. ``None``: gradients, whose norm the step reports."""
    compression: Measured = None
    """Bytes that an average of all weights in fp32 after each step since the last synchronisation would have taken, of
    an equal share of them to each member, over those that this member sent in these steps."""


class EvaluationEvent(_Event):
    """One evaluation over all members' shares."""

    kind: Literal["evaluation"] = "evaluation"
    step: Step
    split: Name
    loss: Measured = None
    metrics: dict[Name, float] = Field(max_length=256)
    """Only those that are finite are written."""
    samples: Count
    seconds: Seconds

    @property
    def figures(self) -> dict[str, float]:
        """All measured values by name: the metrics, then the loss."""
        return {**self.metrics, **({} if self.loss is None else {"loss": self.loss})}

    @field_serializer("metrics", when_used="json")
    def _finite(self, metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


class SnapshotEvent(_Event):
    """A complete snapshot was written."""

    kind: Literal["snapshot"] = "snapshot"
    step: Step
    path: Text
    bytes: Count
    seconds: Seconds
    live: tuple[Rank, ...] = Field((), max_length=MOST_RANKS)
    """Ranks that trained then: the run can go on from this step when all of them have it."""


class MachineEvent(_Event):
    """Load of a member's machine; ``None`` where it cannot be measured."""

    kind: Literal["machine"] = "machine"
    cpu_percent: Number
    """Of all processors, by all programs."""
    others_percent: Measured = None
    """Of all processors, by programs that do not belong to the run."""
    memory_used: Count
    """Bytes resident in the member's process."""
    memory_total: Count
    """Bytes of the machine."""
    device_memory_used: Count | None = None
    celsius: Measured = None
    """Of what the member computes on: its GPU, or the processor."""
    throttled: bool | None = None
    """Whether heat slows its GPU down."""
    watts: Measured = None
    """Power that its meters measured since the last event."""
    joules: Measured = None
    """Energy that its meters counted since the member started."""
    meters: Annotated[tuple[Name, ...], Field(max_length=16)] | None = None
    """Names of the meters: ``processor`` (counted by only one of the members on a machine) and ``gpu``."""
    battery_percent: Measured = None
    on_mains: bool | None = None
    gives_way: Text | None = None
    """Why the member computes less than it could; ``None``: it does not."""

    @property
    def slowed_by_others(self) -> bool:
        """Whether other programs slow the run: their load is high, and no processor is idle."""
        return (self.others_percent or 0.0) >= 100 * BUSY and self.cpu_percent >= 100 * _FULL


ENGINE = "engine"
"""The phase of a start on several machines after which the workers can meet."""
WAITS_FOR_ENGINE = "worker: waits for the engine"
"""The phase of a worker's start after which it dials the coordinator."""


class TimingEvent(_Event):
    """One phase of a start, written at its end, which is ``time`` by the clock of the machine it was measured on."""

    kind: Literal["timing"] = "timing"
    part: Name
    seconds: Seconds
    cpu: Seconds | None = None
    """CPU seconds (user and system) of the process meanwhile."""


class WarningEvent(_Event):
    """Something the user should know; the run goes on."""

    kind: Literal["warning"] = "warning"
    message: Text
    step: Step | None = None
    unreached: Name = ""
    """Address of the coordinator, if a member cannot reach it."""
    ended_by: Text = ""
    """Why the process of a lost member has ended: so it does not come back by itself."""
    awaited: Name = ""
    """The machine that the start of the run waits for, and that has not joined."""


class ElectionEvent(_Event):
    """This member follows a coordinator from now on that the members have elected."""

    kind: Literal["election"] = "election"
    name: Name = ""
    """Of the member."""
    carrier: Name = ""
    """Of that on whose machine the coordinator is; empty: it is this one."""
    term: Count
    """Of the coordinator; see :func:`training.exchange.group.quorum.carrier_of`."""
    port: int = Field(gt=0, lt=65536)
    """Of the coordinator, at every address of the machine."""

    @property
    def message(self) -> str:
        if self.carrier:
            return f"{self.name} follows the coordinator on {self.carrier} from now on"
        return f"{self.name} carries the coordinator from now on: that before cannot be reached, and the members go on"


class ErrorEvent(_Event):
    """A member cannot go on."""

    kind: Literal["error"] = "error"
    message: Text
    hint: Text = ""
    machine: Name = ""
    """The machine whose name begins the message; empty: none does."""
    traceback: Text = ""
    """Of a launched script."""
    step: Step | None = None
    exit_code: int = Field(1, ge=0, le=255)
    lost_others: bool = False
    """The member has only lost the others, or a device of its own, which may join again."""
    resumable: bool = True
    """Whether the run may go on from a snapshot of which its events tell."""

    @classmethod
    def of(cls, error: MusterError, member: int | None = None) -> ErrorEvent:
        """Return the event that reports an error."""
        text = {"message": error.message, "hint": error.hint, "machine": error.machine}
        lost_others, resumable = isinstance(error, OthersLost), not isinstance(error, NothingToResume)
        code = int(error.exit_code)
        return cls(member=member, **text, exit_code=code, lost_others=lost_others, resumable=resumable)


class RequestEvent(_Event):
    """The outcome of a user's request to the run; written by the process that carries it out."""

    kind: Literal["request"] = "request"
    request: Name
    """Id of the request."""
    action: Name
    machine: Name = ""
    """The machine concerned; empty: all."""
    outcome: Literal["accepted", "done", "refused"]
    """``accepted`` is followed by one of the others, unless the process that carries it out is killed."""
    message: Text = ""
    """What was done, or why it was refused."""


class AnswerEvent(_Event):
    """A member's answer to an order of the run (:mod:`training.run.orders`); not written into the run's events."""

    kind: Literal["answer"] = "answer"
    order: Count
    step: Step
    """The first step after which it can act, or after which it has acted."""
    done: bool = False
    failure: Text = ""
    """Why it could not carry the order out; empty: it could."""


class PeerPath(BaseModel):
    """The network path from one member to another."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer: Rank
    """Rank of the other member."""
    how: Literal["dialled", "came", "relayed"]
    """The sender dialled; the other dialled, as the sender could not; or both met at the relay."""
    address: Name = ""
    """Of the other member; empty: at the relay."""
    interface: Name = ""
    """Of the sender's machine."""
    loses_large: bool = False
    """Large packets are lost on the direct route, which is therefore used with small ones or not at all."""
    name: Name = ""
    """Name of the other member."""

    def __str__(self) -> str:
        return self.how if self.how == "relayed" else f"direct {self.address}"


class WaysEvent(_Event):
    """The paths from a member to others that are new or have changed; those to all other members are as before."""

    kind: Literal["ways"] = "ways"
    ways: tuple[PeerPath, ...] = Field(max_length=MOST_WAYS)


class UnknownEvent(_Event):
    """An event of a kind this version does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: Name


KnownEvent = Annotated[
    RunEvent | MemberEvent | ProgressEvent | StepEvent | SyncEvent | EvaluationEvent | SnapshotEvent | MachineEvent
    | TimingEvent | WarningEvent | ElectionEvent | ErrorEvent | RequestEvent | AnswerEvent | WaysEvent,
    Field(discriminator="kind"),
]  # fmt: skip
Event = KnownEvent | UnknownEvent
Emit = Callable[[Event], None]
"""Takes an event."""

_event_adapter: TypeAdapter[KnownEvent] = TypeAdapter(KnownEvent)


def to_line(event: _Event) -> str:
    """Return ``event`` as one JSON line without the newline."""
    return event.model_dump_json(exclude_none=True)


def from_line(line: str | bytes) -> Event:
    """Parse one JSON line.

    Raises:
        ValueError: the line is not a JSON object with a ``kind``, or a known kind with wrong fields; or a figure, a
            list or the line itself is beyond all bounds.
    """
    data = parse_object(line)
    if not isinstance(data.get("kind"), str):
        raise ValueError("an event is a JSON object with a 'kind'")
    try:
        return _event_adapter.validate_python(data)
    except ValidationError as error:
        if error.errors()[0]["type"] == "union_tag_invalid":
            return UnknownEvent.model_validate(data)
        raise ValueError(first_problem(error)) from error
