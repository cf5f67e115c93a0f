"""The state of one member: the part of :mod:`app.run_view.run_state` that depends on its own events alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.run_view.metrics import phase_progress_text
from training.records.events import (
    ErrorEvent,
    MachineEvent,
    MemberEvent,
    PeerPath,
    ProgressEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    WarningEvent,
    WaysEvent,
)
from training.run.outcome import merged_step

WINDOW_SECONDS = 30.0
"""Speeds and shares are means over this much of the past ..."""
WINDOW_STEPS = 64
"""... and over at most this many steps."""
GONE = ("left", "lost", "done", "failed", "stopped")
TROUBLE = ("lost", "failed")
AWAITS_EXCHANGE = "waits for the others' next synchronisation"
PRESENT_STATUSES = ("started", "joined", "ready")
"""Statuses of a member that takes part; only these bring back one that was gone."""
KEPT_SYNCS = 64
MIN_STEPS = 8
"""Fewest steps from which the share of waiting for data is told."""
_CARRIED_OVER = (
    *("name", "device", "since", "updated"),
    "snapshot_step",
    "snapshot_live",
    "times_lost",
    "hottest",
    "meters",
    "routes",
)
"""Fields that a member keeps when it starts again."""
MemberScopedEvent = (
    MemberEvent
    | ProgressEvent
    | StepEvent
    | SyncEvent
    | MachineEvent
    | SnapshotEvent
    | ErrorEvent
    | WarningEvent
    | WaysEvent
)
State = TypeVar("State")


def changed(state: State, /, **changes: Any) -> State:
    """``dataclasses.replace`` for states that change with every event: it copies ten times as fast.

    For frozen dataclasses without slots or ``__post_init__``.
    """
    fields = state.__dict__
    assert changes.keys() <= fields.keys(), f"no such fields: {changes.keys() - fields.keys()}"
    copy = object.__new__(type(state))
    copy.__dict__.update(fields, **changes)
    return copy


@dataclass(frozen=True)
class MemberTotals:
    """Sums over a member's steps and synchronisations, in seconds and bytes."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Wall time of the steps: compute and wait."""
    compute: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    step_sent: int = 0
    step_received: int = 0
    sync_sent: int = 0
    sync_received: int = 0
    syncs: int = 0
    sync_seconds: float = 0.0
    data: float = 0.0
    """Part of ``compute`` spent waiting for samples."""
    gave_way: float = 0.0
    """Part of ``compute`` in which it rested for the owner of its machine."""

    @property
    def bytes_sent(self) -> int:
        """Strategies count bytes by step, by synchronisation, or by both."""
        return max(self.step_sent, self.sync_sent)

    @property
    def bytes_received(self) -> int:
        return max(self.step_received, self.sync_received)

    def with_step(self, event: StepEvent) -> MemberTotals:
        """Return the totals with one more step."""
        times = (event.seconds, event.compute, event.wait, event.transfer)
        bytes_moved, parts = (event.bytes_sent, event.bytes_received), (event.data, event.gave_way or 0.0)
        return self + MemberTotals(1, event.samples, *times, *bytes_moved, 0, 0, 0, 0.0, *parts)

    def with_sync(self, event: SyncEvent) -> MemberTotals:
        """Return the totals with one more synchronisation."""
        sent, received = event.bytes_sent, event.bytes_received
        return self + MemberTotals(sync_sent=sent, sync_received=received, syncs=1, sync_seconds=event.seconds)

    def __add__(self, other: MemberTotals) -> MemberTotals:
        return MemberTotals(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class MemberState:
    """A member after some of its events."""

    rank: int
    name: str = ""
    device: str = ""
    status: str = "starting"
    message: str = ""
    """Reported reason of its status."""
    has_ended: bool = False
    """Whether it is lost and its process has ended: it comes back only if somebody adds it."""
    unreached: str = ""
    """Address of the coordinator that it could not reach since it took part last."""
    since: float | None = None
    """When it took on its status, by the clock of the event's sender."""
    updated: float | None = None
    """Time of its newest event."""
    phase: str = ""
    """Name of the work that is no step: preparing, evaluating, saving."""
    phase_done: int = 0
    phase_total: int | None = None
    phase_reports: tuple[ProgressEvent, ...] = ()
    """First and newest report of that work."""
    step: int = 0
    merged_step: int = 0
    """The newest of its steps that the others have a share of."""
    epoch: float = 0.0
    loss: float | None = None
    learning_rate: float | None = None
    work: MemberTotals = MemberTotals()
    """Since its newest start."""
    earlier: MemberTotals = MemberTotals()
    """In its earlier starts."""
    recent_syncs: tuple[SyncEvent, ...] = ()
    """The newest synchronisations since its newest start, oldest first."""
    earlier_syncs: tuple[SyncEvent, ...] = ()
    """Those of its earlier starts, of which some were repeated."""
    began: tuple[float, int] | None = None
    """Time and number of its first step since its start or return."""
    times_lost: int = 0
    is_returning: bool = False
    """Whether its process has started again after it was gone, and is not ready yet."""
    window: tuple[StepEvent, ...] = ()
    """Its newest steps, oldest first, over which speeds and shares are averaged."""
    machine: MachineEvent | None = None
    """The newest load of its machine since its start."""
    memory_peak: int = 0
    device_memory_peak: int | None = None
    hottest: float | None = None
    counted_joules: float | None = None
    """Energy since its newest start; ``None``: there is no meter."""
    earlier_joules: float | None = None
    """Energy in its earlier starts."""
    meters: tuple[str, ...] = ()
    """Names of the meters behind watts and joules."""
    snapshot_step: int | None = None
    snapshot_live: tuple[int, ...] = ()
    """Ranks that trained when it wrote that snapshot."""
    routes: Mapping[int, PeerPath] = field(default_factory=dict)
    """Routes to its peers, by rank."""

    @property
    def active(self) -> bool:
        return self.status not in GONE

    def keeps_up(self, earliest: int) -> bool:
        """Whether it takes the run's steps with the others: it began with them, or has exchanged since it came.

        Args:
            earliest: number of the first step of whoever began first.
        """
        if self.began is None:
            return False
        return self.began[1] <= earliest or (self.last_sync is not None and self.last_sync.step >= self.began[1])

    @property
    def has_worked(self) -> bool:
        """Whether its speed is meaningful: it trains, or did so until its work or the run ended."""
        return bool(self.window) and (self.active or self.status in ("done", "stopped"))

    @property
    def rate(self) -> float | None:
        """Its samples/s; ``None`` where they are not meaningful."""
        return self.samples_per_second if self.has_worked else None

    @property
    def label(self) -> str:
        """Its name, or ``member RANK`` before it has reported one."""
        return self.name or f"member {self.rank}"

    def preparing(self, now: float) -> str:
        """Return its work that is no step, with the time left: ``features 3/10, 0:40 left``; empty: there is none."""
        return phase_progress_text(self.phase_reports[0], self.phase_reports[-1], now) if self.phase else ""

    @property
    def throttled(self) -> bool:
        """Whether heat slows its GPU down."""
        return self.machine is not None and bool(self.machine.throttled)

    @property
    def gives_way(self) -> str:
        """Why it computes less than it could; empty: it does not."""
        return (self.machine.gives_way or "") if self.machine is not None and self.active else ""

    @property
    def exchanges(self) -> int:
        """Exchanges since its start; only some of many in a row are reported, with their round numbers."""
        return max(self.work.syncs, self.last_sync.round if self.last_sync else 0)

    @property
    def last_sync(self) -> SyncEvent | None:
        return self.recent_syncs[-1] if self.recent_syncs else None

    @property
    def total(self) -> MemberTotals:
        """Totals over all its starts."""
        return self.earlier + self.work

    @property
    def joules(self) -> float | None:
        """Energy that its meters counted, over all its starts; ``None``: there is no meter."""
        return sum_of_known((self.earlier_joules, self.counted_joules))

    @property
    def seconds_per_step(self) -> float | None:
        """Mean wall time of a step in the window."""
        if not self.window:
            return None
        return sum(step.seconds for step in self.window) / len(self.window)

    @property
    def seconds_to_advance(self) -> float | None:
        """Seconds in which the run advances one step: a step of this member, unless members are uneven."""
        steps = self.window[-1].step - self.window[0].step if self.window else 0
        if steps in (0, len(self.window) - 1):
            return self.seconds_per_step
        return (self.window[-1].time - self.window[0].time) / steps

    @property
    def relative_doubt(self) -> float:
        """Uncertainty of its pace over the pace: the larger of the standard error of the steps in the window and the
        difference to those since its start."""
        pace, times = self.seconds_per_step, [step.seconds for step in self.window]
        if not pace:
            return 0.0
        error = statistics.stdev(times) / math.sqrt(len(times)) if len(times) > 1 else 0.0
        return max(error, abs(self.work.seconds / self.work.steps - pace)) / pace

    @property
    def samples_per_second(self) -> float:
        """Samples over the wall time of the steps in the window, without evaluations, snapshots and pauses between
        them, as in the series."""
        seconds = sum(step.seconds for step in self.window)
        return sum(step.samples for step in self.window) / seconds if seconds > 0 else 0.0

    @property
    def data_share(self) -> float:
        """Share of the window's wall time that steps waited for their samples, without the longest wait, which is
        often that of the first step."""
        stops = sorted(step.data for step in self.window)
        seconds = sum(step.seconds for step in self.window)
        return sum(stops[:-1]) / seconds if len(stops) >= MIN_STEPS and seconds > 0 else 0.0

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of compute, exposed wait, and transfer (hidden or not) in the wall time of all its steps.

        Members that exchange every H steps wait in each H-th step alone, so a window may hold no wait, or too many.
        """
        done = self.total
        if not done.seconds > 0:
            return 0.0, 0.0, 0.0
        return done.compute / done.seconds, done.wait / done.seconds, min(1.0, done.transfer / done.seconds)


def stopped(member: MemberState, moment: float) -> MemberState:
    """Return a member whose run has ended: an active one becomes ``stopped``."""
    return changed(member, status="stopped", message="", phase="", since=moment) if member.active else member


def advance(member: MemberState, event: MemberScopedEvent) -> MemberState:
    """Return the member after one of its events."""
    after = _advanced(member, event)
    since = member.since if after.status == member.status and member.since is not None else event.time
    updated = event.time if member.updated is None else max(event.time, member.updated)
    return changed(after, since=since, updated=updated)


def _advanced(member: MemberState, event: MemberScopedEvent) -> MemberState:
    match event:
        case MemberEvent():
            return _status(member, event)
        case ProgressEvent():
            works = not member.active or member.status in ("joined", "ready", "training")
            status = member.status if works else "preparing"  # a machine that is brought back is not back yet
            begun = member.phase_reports[:1] if member.phase == event.phase else (event,)
            member = changed(member, status=status, phase_reports=(*begun, event))
            return changed(member, phase=event.phase, phase_done=event.done, phase_total=event.total)
        case StepEvent():
            return _step(member, event)
        case SyncEvent():
            recent = (*member.recent_syncs, event)[-KEPT_SYNCS:]
            return changed(member, recent_syncs=recent, work=member.work.with_sync(event), merged_step=event.step)
        case MachineEvent():
            return changed(
                member,
                machine=event,
                memory_peak=max(event.memory_used, member.memory_peak),
                device_memory_peak=_highest(member.device_memory_peak, event.device_memory_used),
                hottest=_highest(member.hottest, event.celsius),
                counted_joules=event.joules if event.joules is not None else member.counted_joules,
                meters=event.meters or member.meters,
            )
        case SnapshotEvent():
            return changed(member, snapshot_step=event.step, snapshot_live=event.live)
        case ErrorEvent():
            return _gone(member, "failed", event.message)
        case WarningEvent() if event.unreached:
            return changed(member, unreached=event.unreached)
        case WarningEvent():
            lost = member.status in TROUBLE
            return changed(member, message=event.ended_by, has_ended=True) if lost and event.ended_by else member
        case WaysEvent():
            return changed(member, routes={**member.routes, **{route.peer: route for route in event.ways}})


def _status(member: MemberState, event: MemberEvent) -> MemberState:
    """Take on a new status; a member that starts (also after a resume) has an empty window and new counts."""
    if event.status == "started":
        carried_over = {name: getattr(member, name) for name in _CARRIED_OVER}
        carried_over["is_returning"] = member.is_returning or not member.active
        carried_over["earlier_syncs"] = (*member.earlier_syncs, *member.recent_syncs)[-KEPT_SYNCS:]
        member = changed(MemberState(member.rank), **carried_over, earlier=member.total, earlier_joules=member.joules)
    elif event.status == "ready":
        member = changed(member, is_returning=False)
    named = changed(member, phase="", name=event.name or member.name, device=event.device or member.device)
    if event.status in (*TROUBLE, "left"):
        return _gone(named, event.status, event.message)
    if event.status in PRESENT_STATUSES and not member.active:
        named = changed(named, began=None, window=(), unreached="")  # its pace was that before it was gone
    return changed(named, status=event.status, message=event.message)


def _gone(member: MemberState, status: str, why: str) -> MemberState:
    """Mark a member as gone. One in trouble keeps its status and first cause: later ones follow from it."""
    if member.status in TROUBLE:
        return changed(member, message=member.message or why)
    return changed(member, status=status, message=why, phase="", times_lost=member.times_lost + (status == "lost"))


def _step(member: MemberState, event: StepEvent) -> MemberState:
    """Count a step. Late steps of a machine that was cut off do not bring it back."""
    window = [old for old in member.window if old.time > event.time - WINDOW_SECONDS]
    return changed(
        member,
        status="training" if member.active else member.status,
        message="" if member.active else member.message,
        began=member.began or (event.time, event.step),
        phase="",
        step=event.step,
        merged_step=merged_step(event, member.merged_step),
        epoch=event.epoch,
        loss=event.loss if event.weight else member.loss,
        learning_rate=event.learning_rate,
        work=member.work.with_step(event),
        window=(*window, event)[-WINDOW_STEPS:],
    )


_Number = TypeVar("_Number", int, float)


def _highest(current: _Number | None, new: _Number | None) -> _Number | None:
    return max((value for value in (current, new) if value is not None), default=None)


def sum_of_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are not ``None``; ``None`` where all are."""
    known_values = [value for value in values if value is not None]
    return sum(known_values) if known_values else None
