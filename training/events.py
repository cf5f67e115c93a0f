"""Typed events: the one language between worker, supervisor, command line, dashboard and report.

One JSON object a line. ``v`` is the version of the whole vocabulary; readers keep events of an unknown kind as
:class:`UnknownEvent`, so that an older reader can show a newer run.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

EVENTS_VERSION = 1


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = EVENTS_VERSION
    time: float = Field(default_factory=time.time)
    """Seconds since the epoch on the machine that wrote the event."""
    member: int | None = None
    """Rank of the member that wrote the event; ``None`` for the run itself."""
    seq: int | None = None
    """Position in the run's merged log, given by whoever writes ``events.jsonl``."""


class RunEvent(_Event):
    """The run changed its status."""

    kind: Literal["run"] = "run"
    status: Literal["starting", "running", "paused", "completed", "failed", "cancelled"]
    message: str = ""
    total_steps: int | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class MemberEvent(_Event):
    """A member changed its state. ``lost`` means gone without a good-bye."""

    kind: Literal["member"] = "member"
    status: Literal["started", "ready", "joined", "left", "lost", "done", "failed"]
    name: str = ""
    device: str = ""
    message: str = ""


class ProgressEvent(_Event):
    """Work before the first step (feature extraction, downloads, compilation)."""

    kind: Literal["progress"] = "progress"
    phase: str
    done: int
    total: int | None = None


class StepEvent(_Event):
    """One optimizer step of one member. Times in seconds; ``compute + wait`` is the step's wall time."""

    kind: Literal["step"] = "step"
    step: int
    epoch: float
    loss: float
    learning_rate: float
    samples: int
    weight: float
    """What the loss is averaged over: samples, or tokens for a per-token loss."""
    compute: float
    """Data, forward, backward and optimizer."""
    wait: float
    """Exposed wait: the time this step stood still for an exchange."""
    transfer: float
    """Time that exchanges were under way during the step, hidden or not."""
    grad_norm: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0


class SyncEvent(_Event):
    """One synchronisation of one member."""

    kind: Literal["sync"] = "sync"
    step: int
    round: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    """From the start of the exchange to its result."""
    wait: float
    """How much of ``seconds`` the training stood still."""
    members: list[int]
    """Ranks whose contribution is in the result."""
    weight_hash: str = ""
    """Hash of the synchronised weights: equal on all members."""
    drift: float | None = None
    """Largest absolute difference between members' weights where a strategy is partial by definition."""


class EvaluationEvent(_Event):
    """One evaluation over all members' shares."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    split: str
    loss: float | None
    metrics: dict[str, float]
    samples: int
    seconds: float


class SnapshotEvent(_Event):
    """A complete snapshot was written."""

    kind: Literal["snapshot"] = "snapshot"
    step: int
    path: str
    bytes: int
    seconds: float


class MachineEvent(_Event):
    """Load of a member's machine; what it does not tell is ``None``."""

    kind: Literal["machine"] = "machine"
    cpu_percent: float
    memory_used: int
    """Bytes resident in the member's process."""
    memory_total: int
    """Bytes of the machine."""
    device_memory_used: int | None = None
    celsius: float | None = None
    """Of what the member computes on: its GPU, or the processor."""
    throttled: bool | None = None
    """Whether heat slows its GPU down."""
    watts: float | None = None
    """Power that its meters measured since the last event."""
    joules: float | None = None
    """Energy that its meters counted since the member started."""
    meters: tuple[str, ...] | None = None
    """What they measure: ``processor`` (of members on one machine only one counts it) and ``gpu``."""
    battery_percent: float | None = None
    on_mains: bool | None = None


class TimingEvent(_Event):
    """One part of a start, when it is over: ``time`` is its end, by the clock of the machine it was measured on."""

    kind: Literal["timing"] = "timing"
    part: str
    seconds: float
    cpu: float | None = None
    """CPU seconds (user and system) of the process meanwhile."""


class WarningEvent(_Event):
    """Something a person should know; the run goes on."""

    kind: Literal["warning"] = "warning"
    message: str
    step: int | None = None


class ErrorEvent(_Event):
    """A member cannot go on."""

    kind: Literal["error"] = "error"
    message: str
    hint: str = ""
    step: int | None = None
    exit_code: int = 1


class RequestEvent(_Event):
    """What became of something that a person asked of the run; written by whoever carries it out."""

    kind: Literal["request"] = "request"
    request: str
    """Id that it was left under."""
    action: str
    machine: str = ""
    """The machine that it is about; empty: all."""
    outcome: Literal["accepted", "done", "refused"]
    """``accepted`` is followed by one of the others, unless the process that carries it out is killed."""
    message: str = ""
    """What was done, or why it is refused."""


class UnknownEvent(_Event):
    """An event of a kind this version does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: str


KnownEvent = Annotated[
    RunEvent
    | MemberEvent
    | ProgressEvent
    | StepEvent
    | SyncEvent
    | EvaluationEvent
    | SnapshotEvent
    | MachineEvent
    | TimingEvent
    | WarningEvent
    | ErrorEvent
    | RequestEvent,
    Field(discriminator="kind"),
]
Event = KnownEvent | UnknownEvent

_known: TypeAdapter[KnownEvent] = TypeAdapter(KnownEvent)


def to_line(event: _Event) -> str:
    """Return ``event`` as one JSON line without the newline."""
    return event.model_dump_json(exclude_none=True)


def from_line(line: str | bytes) -> Event:
    """Parse one JSON line.

    Raises:
        ValueError: the line is not a JSON object with a ``kind``, or a known kind with wrong fields.
    """
    try:
        data = json.loads(line)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError("an event is a JSON object with a 'kind'")
    try:
        return _known.validate_python(data)
    except ValidationError as error:
        if error.errors()[0]["type"] == "union_tag_invalid":
            return UnknownEvent(**data)
        raise ValueError(str(error)) from error


class EventSink:
    """Writes events as JSON lines to a text stream; safe to call from several threads."""

    def __init__(self, stream: TextIO, member: int | None = None) -> None:
        self._stream = stream
        self._member = member
        self._lock = threading.Lock()

    def __call__(self, event: _Event) -> None:
        if event.member is None and self._member is not None:
            event = event.model_copy(update={"member": self._member})
        with self._lock:
            self._stream.write(to_line(event) + "\n")
            self._stream.flush()
