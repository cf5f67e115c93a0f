"""The state of a run: a pure function of its events.

``state = apply(state, event)``; the live display, ``runs show``, the trial run and the dashboard all read the same
:class:`RunState`. Members' events may be merged in any order as long as each member's own order is kept: what members
share (evaluations, warnings, the last snapshot) is chosen by rules that do not depend on the order of arrival.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from app.run_view.member_state import (
    TROUBLE,
    MemberScopedEvent,
    MemberState,
    advance,
    changed,
    stopped,
    sum_of_known,
)
from app.run_view.metrics import SplitResults, phase_text, with_result
from app.run_view.run_series import RUN, SIMULATED, Curves, MeasuredEvent, at_step, figures, with_figures
from app.run_view.run_series import newest as newest_value
from app.run_view.timeline import RunTimeline, TimelineEntry, chronological, newest, timeline_entry, with_entry
from training.records.attempts import Attempts, attempts_after, seconds_in
from training.records.events import (
    EVALUATES,
    AnswerEvent,
    ElectionEvent,
    ErrorEvent,
    EvaluationEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    TimingEvent,
    UnknownEvent,
    WarningEvent,
    WaysEvent,
)
from training.records.plan import FINAL
from training.records.run_folder import RunFolder
from training.records.runs import summarise
from training.run.outcome import newest_complete_step, progress_text

INTERRUPTED = "interrupted"
"""Status of a run whose end was never recorded."""
UNFINISHED = (INTERRUPTED, "cancelled", "failed")
"""Statuses of runs that have ended and are not completed."""
KEPT_REQUESTS = 20
_TELLING = 3
"""Steps of a member since its start from which on its pace tells when the run ends."""


class TimeLeft(NamedTuple):
    """The estimated time to the end of a run, in seconds."""

    seconds: float
    doubt: float
    """Uncertainty: the larger of the standard error of the steps that it is based on and the difference to those since
    the start."""


@dataclass(frozen=True)
class RunState:
    """The state of a run after some of its events."""

    status: str = "starting"
    message: str = ""
    started: float | None = None
    """Unix time at which the run started, or was resumed last."""
    ended: float | None = None
    """Unix time of its end; ``None`` while it goes on."""
    updated: float | None = None
    """Time of the newest event."""
    attempts: Attempts = ()
    resumed_from: int = 0
    """Step from which the newest attempt goes on."""
    unstarted: frozenset[int] = frozenset()
    """Ranks of the attempt before the newest that have not reported since."""
    total_steps: int | None = None
    phase_reports: tuple[ProgressEvent, ...] = ()
    """First and newest report of the run's own preparation, before the first step or of a machine that is added."""
    members: Mapping[int, MemberState] = field(default_factory=dict)
    evaluations: Mapping[str, SplitResults] = field(default_factory=dict)
    snapshot_step: int | None = None
    curves: Mapping[int, Curves] = field(default_factory=dict)
    """Series of every figure over the steps, by rank (:data:`app.run_view.run_series.RUN`: of the run) and name."""
    timeline: RunTimeline = field(default_factory=dict)
    """Timeline entries by kind; :func:`app.run_view.timeline.chronological` lists them in order."""
    requests: Mapping[str, RequestEvent] = field(default_factory=dict)
    """The newest answer to each of the last requests, by request id."""

    def name(self, rank: int, planned: Mapping[int, str] | None = None) -> str:
        """Return a member's name: its own, the planned one, or ``member RANK``; ``run`` for negative ranks."""
        reported = self.members[rank].name if rank in self.members else ""
        return reported or (planned or {}).get(rank) or (f"member {rank}" if rank >= 0 else "run")

    def status_of(self, member: MemberState) -> str:
        """Return a member's status; ``paused`` while the run is, ``starting`` until its worker reports again."""
        if self.status == "starting" and member.rank in self.unstarted:
            return "starting"
        return "paused" if self.status == "paused" and member.active else member.status

    def awaits_exchange(self, member: MemberState) -> bool:
        """Whether a member has come to a run that trains, and takes its first step after the others' next exchange."""
        is_new = member.status in ("joined", "ready") and member.began is None and not member.phase
        return (
            is_new
            and self.status == "running"
            and any(other.active and other.window for other in self.members.values())
        )

    @property
    def phase(self) -> str:
        """That preparation in words, with its count; empty: there is none."""
        newest = self.phase_reports[-1] if self.phase_reports else None
        return phase_text(newest.phase, newest.done, newest.total) if newest else ""

    def holds(self, entry: TimelineEntry) -> bool:
        """Whether an entry is still true: a request was accepted until its outcome is there; waiting for a machine ends
        when it joins, or when this start is over."""
        if entry.outcome == "accepted":
            return entry.request in self.requests and self.requests[entry.request].outcome == "accepted"
        if not entry.awaited:
            return True
        if self.status != "starting" or entry.time < (self.started or 0.0):
            return False
        begun = [member for rank, member in self.members.items() if rank not in self.unstarted]
        arrived = {member.label for member in begun if member.step or member.status in ("joined", "ready")}
        return entry.awaited not in arrived

    @property
    def entries(self) -> list[TimelineEntry]:
        """All entries of the timeline that hold, oldest first."""
        return [entry for entry in chronological(self.timeline) if self.holds(entry)]

    @property
    def warnings(self) -> tuple[TimelineEntry, ...]:
        """The newest warnings that hold, oldest first."""
        return tuple(entry for entry in newest(self.timeline, "warning") if self.holds(entry))

    @property
    def errors(self) -> tuple[TimelineEntry, ...]:
        return newest(self.timeline, "error")

    @property
    def resume_step(self) -> int | None:
        """Newest step of which all members that trained then have a snapshot; ``None``: there is none."""
        written = {
            r: (m.snapshot_step, m.snapshot_live) for r, m in self.members.items() if m.snapshot_step is not None
        }
        return newest_complete_step(written, self.lost)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks of the members that are lost, or have failed."""
        return tuple(rank for rank, member in self.members.items() if member.status in TROUBLE)

    @property
    def saved_progress(self) -> str:
        """Text of what an unfinished run has saved, and what is lost."""
        newest = max((member.step for member in self.members.values()), default=0)
        return progress_text(self.resume_step, newest, self.unmerged)

    @property
    def unmerged(self) -> dict[str, int]:
        """Steps of lost machines that no synchronisation holds, by name."""
        lost = [self.members[rank] for rank in self.lost]
        return {member.label: max(0, member.step - member.merged_step) for member in lost}

    def seconds(self, now: float) -> float:
        """Return how long the run has taken up to ``now``: the time in its attempts."""
        return seconds_in(self.attempts, now if self.ended is None else None)

    @property
    def step(self) -> int:
        """Steps that all active members have done.

        Members that have come while the run was under way do not count until they have caught up with the others, in
        their first exchange: so the step does not go backwards. An attempt begins at the step of its snapshot.
        """
        begun = [member for rank, member in self.members.items() if rank not in self.unstarted]
        working = [member for member in begun if member.active and member.step]
        earliest = min((member.began[1] for member in working if member.began is not None), default=0)
        counted = [member.step for member in working if member.keeps_up(earliest)]
        counted = counted or [member.step for member in working]
        return min(counted) if counted else max(self.resumed_from, *(member.step for member in begun), 0)

    @property
    def steps_text(self) -> str:
        """``420/1400``, or ``420`` where the total is unknown."""
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    @property
    def loss(self) -> float | None:
        """Mean loss of the newest step that all active members have done; ``None``: there is none."""
        return at_step(self.curves, "loss", self.step)

    @property
    def waiting_share(self) -> float | None:
        """Share of the machines' time in which they waited for exchanges, the mean over them; ``None``: none has
        worked. All displays say this one."""
        waits = [member.shares[1] for member in self.members.values() if member.has_worked]
        return statistics.fmean(waits) if waits else None

    @property
    def samples_per_second(self) -> float:
        return sum(member.samples_per_second for member in self.members.values() if member.active)

    @property
    def simulated_hours(self) -> float | None:
        """Simulated time; ``None``: the machines are real."""
        return newest_value(self.curves, SIMULATED)

    @property
    def joules(self) -> float | None:
        """Energy that the meters of all members counted; ``None``: there are no meters."""
        return sum_of_known(member.joules for member in self.members.values())

    def time_left(self, now: float) -> TimeLeft | None:
        """Return the estimated time to the end; ``None``: too few steps to tell.

        The steps go on at the pace of the slowest member in its window, and evaluations take as long as before.
        """
        if self.total_steps is None:
            return None
        steps, evaluations = max(0, self.total_steps - self.step), self._evaluation_seconds_left
        if self.simulated_hours is not None and self.step >= _TELLING:  # members take turns here
            return TimeLeft(steps * self.seconds(self.updated or now) / self.step, 0.0)
        working = [m for m in self.members.values() if m.active and m.work.steps >= _TELLING and m.seconds_to_advance]
        if not working:
            return None
        slowest = max(working, key=lambda member: member.seconds_to_advance or 0.0)
        pace = slowest.seconds_to_advance or 0.0
        since = max(0.0, now - slowest.window[-1].time)
        if not steps:
            return TimeLeft(self._last_evaluations_left(evaluations, now), 0.0)
        left = steps * pace + evaluations - min(since, pace)
        return TimeLeft(max(0.0, left), steps * pace * slowest.relative_doubt)

    @property
    def _evaluation_seconds_left(self) -> float:
        return sum(
            results.seconds_left(self.total_steps or 0)
            for split, results in self.evaluations.items()
            if ".local-" not in split  # members evaluate their own weights at the same time
        )

    def _last_evaluations_left(self, seconds: float, now: float) -> float:
        """Return the seconds that the evaluations after the last step still take: ``seconds``, as they took before, or
        more, at the pace of the one under way."""
        ended = [results.last.time for results in self.evaluations.values() if results.last.step >= self.step]
        since = now - max([*ended, *(member.window[-1].time for member in self.members.values() if member.window)])
        left = max(0.0, seconds - max(0.0, since))
        evaluating = [m for m in self.members.values() if m.active and m.phase.startswith(EVALUATES) and m.phase_total]
        for member in evaluating:
            if member.phase_done and since > 0:
                left = max(left, since * ((member.phase_total or 0) / member.phase_done - 1))
        return left

    @property
    def weights_differ(self) -> bool:
        """Whether two members report different weights after the same synchronisation."""
        syncs = [member.last_sync for member in self.members.values()]
        hashes = {(sync.step, sync.round, sync.weight_hash) for sync in syncs if sync and sync.weight_hash}
        return len(hashes) > len({(step, number) for step, number, _ in hashes})


def reduce_events(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """Apply ``events`` one after the other."""
    return reduce(apply, events, state or RunState())


def state_of(folder: RunFolder) -> RunState:
    """Return the state of the run in a folder; its end is taken from the metadata where the events lack it."""
    state, summary = reduce_events(folder.events()), summarise(folder.path)
    return state if summary.live else at_its_end(state, summary.status, folder.metadata.error_message)


def apply(state: RunState, event: Event) -> RunState:
    """Return the state after ``event``; never raises, whatever the order of events."""
    before = state.members.get(event.member) if event.member is not None else None
    state = changed(
        state,
        updated=max(event.time, state.updated or event.time),
        timeline=with_entry(state.timeline, timeline_entry(event, before)),
        attempts=attempts_after(state.attempts, event),
    )
    match event:
        case RunEvent():
            return _run(state, event)
        case EvaluationEvent():
            return _with_event_figures(_evaluation(state, event), event)
        case SnapshotEvent():
            state = changed(state, snapshot_step=max(event.step, state.snapshot_step or 0))
            return _with_event_figures(_with_member(state, event), event)
        case StepEvent() | SyncEvent() | MachineEvent():
            return _with_event_figures(_with_member(state, event), event)
        case ProgressEvent(member=None):
            begun = state.phase_reports[:1]
            begun = begun if begun and begun[0].phase == event.phase else (event,)
            return changed(state, phase_reports=(*begun, event))
        case ErrorEvent(resumable=False):
            return _with_member(_without_snapshots(state), event)
        case MemberEvent() | ProgressEvent() | ErrorEvent() | WaysEvent():
            return _with_member(state, event)
        case WarningEvent() if event.ended_by or event.unreached:
            return _with_member(state, event)
        case RequestEvent():
            return _answered(state, event)
        case WarningEvent() | ElectionEvent() | TimingEvent() | AnswerEvent() | UnknownEvent():
            return state


def _without_snapshots(state: RunState) -> RunState:
    """Forget all snapshots: the machines found none to resume from."""
    members = {r: changed(member, snapshot_step=None, snapshot_live=()) for r, member in state.members.items()}
    return changed(state, members=members, snapshot_step=None)


def _with_event_figures(state: RunState, event: MeasuredEvent) -> RunState:
    rank = RUN if event.member is None else event.member
    member = state.members.get(rank)
    event_figures = figures(event, member.step if member else 0)
    return changed(state, curves=with_figures(state.curves, rank, event_figures))


def _answered(state: RunState, event: RequestEvent) -> RunState:
    previous = state.requests.get(event.request)
    if previous is not None and previous.outcome != "accepted" and event.outcome == "accepted":
        return state
    answers = {**state.requests, event.request: event}
    return changed(state, requests=dict(sorted(answers.items())[-KEPT_REQUESTS:]))


def at_its_end(state: RunState, status: str, message: str = "") -> RunState:
    """Return the state of a run whose end is missing from its events.

    Args:
        status: the one in the metadata, or :data:`INTERRUPTED`.
    """
    if state.ended is not None:
        return state
    return _at_rest(changed(state, status=status, message=message, ended=state.updated or 0.0))


def _at_rest(state: RunState) -> RunState:
    """Mark all members as stopped in a run that has ended."""
    if state.ended is None:
        return state
    return changed(state, members={rank: stopped(member, state.ended) for rank, member in state.members.items()})


def _run(state: RunState, event: RunEvent) -> RunState:
    if event.status == "starting":
        step = state.resume_step if len(state.attempts) > 1 else None
        state = changed(state, phase_reports=(), resumed_from=step or 0, unstarted=frozenset(state.members))
    elif event.status == "running" and isinstance(step := event.details.get("step"), int):
        state = changed(state, resumed_from=step)
    now = changed(
        state,
        status=event.status,
        message=event.message,
        ended=event.time if event.status in FINAL else None,
        phase_reports=() if event.status == "running" else state.phase_reports,
        started=event.time if event.status == "starting" or state.started is None else state.started,
        total_steps=event.total_steps if event.total_steps is not None else state.total_steps,
    )
    return _at_rest(now)


def _evaluation(state: RunState, event: EvaluationEvent) -> RunState:
    results = with_result(state.evaluations.get(event.split), event)
    return changed(state, evaluations=dict(sorted({**state.evaluations, event.split: results}.items())))


def _with_member(state: RunState, event: MemberScopedEvent) -> RunState:
    if event.member is None:
        return state
    member = state.members.get(event.member, MemberState(event.member))
    after = advance(member, event)
    if event.member in state.unstarted and member.status not in TROUBLE:
        after = changed(after, is_returning=False)  # the others start anew, too
    members = {**state.members, event.member: after}
    ordered = members if event.member in state.members else dict(sorted(members.items()))
    if isinstance(event, MemberEvent | StepEvent) and event.member in state.unstarted:
        state = changed(state, unstarted=state.unstarted - {event.member})
    return _at_rest(changed(state, members=ordered))
