"""Figures of a run as texts and JSON documents; every display shares them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from app.run_view.member_state import MIN_STEPS, MemberState
from app.run_view.run_series import RUN, of_member, of_run, series_names
from app.run_view.run_state import RunState
from app.run_view.tables.evaluations import evaluations_document
from app.run_view.timeline import chronological
from profiles.quantities import duration_text, share_text, throughput_text, time_text
from training.records.attempts import RunAttempt
from training.records.events import Event, RunEvent, TimingEvent

DATA_BRAKE = 0.1
"""Share of waiting for samples in a step from which on the data is the bottleneck."""
MORE_DATA = "set data_workers higher, or put the data on a faster disk"
"""Advice against it."""


def data_text(state: RunState, whole_run: bool = False) -> str:
    """Return the largest share of a step that a machine waits for samples, as text; empty where it is small.

    Args:
        whole_run: over all steps of a run that has ended; else over the members' windows.
    """
    if whole_run:
        done = {rank: member.total for rank, member in state.members.items() if member.total.steps >= MIN_STEPS}
        shares = {rank: total.data / total.seconds for rank, total in done.items() if total.seconds > 0}
    else:
        shares = {rank: member.data_share for rank, member in state.members.items() if member.active}
    rank = max(shares, key=lambda r: shares[r], default=-1)
    if shares.get(rank, 0.0) < DATA_BRAKE:
        return ""
    on_machine = f" on {state.members[rank].label}" if len(state.members) > 1 else ""
    return f"{share_text(shares[rank])} of each step {'waited' if whole_run else 'waits'} for data{on_machine}"


def waiting_text(state: RunState) -> str:
    """Return the share of the machines' time in which they waited for exchanges, as text; empty where none worked."""
    if state.waiting_share is None:
        return ""
    tense = "is" if state.ended is None else "was"
    return f"{share_text(state.waiting_share)} of the time {tense} waiting for exchanges"


def stages_times_text(state: RunState) -> str:
    """Return for how long each stage of a divided model computes in a step, and the share of a step in which a stage
    has no work, as text; empty where no model is divided."""
    steps = [step for member in state.members.values() for step in member.window if step.stages]
    if not steps or len({len(step.stages) for step in steps}) > 1:
        return ""
    seconds = [statistics.fmean(times) for times in zip(*(step.stages for step in steps))]
    whole = statistics.fmean(step.seconds for step in steps)
    idle = max(0.0, 1 - statistics.fmean(seconds) / whole) if whole else 0.0
    return f"stages compute {', '.join(map(time_text, seconds))} of {time_text(whole)} a step, {share_text(idle)} idle"


def rate_text(state: RunState) -> str:
    """Return ``152.3 samples/s``; empty while no machine trains."""
    return throughput_text(state.samples_per_second) if state.samples_per_second else ""


_STAGES_OF_START = {
    "machine: connected": "connecting",
    "machine: code and data": "sending code and data",
    "worker: imports": "loading the program",
    "worker: data": "reading the data",
}
"""What all members wait for until the last of them has done it, by the phase that each of them measures; what follows
is the loading of the model."""


def start_line(events: Iterable[Event], attempt: RunAttempt) -> str:
    """Return how long the newest start took, and its stages: ``1:14 (connecting 0:02, loading the program 1:12)``.

    A stage lasts from the end of the one before until it has ended on the last machine, so the stages add up to the
    whole; those below a second are left out. Empty: no start was measured.
    """
    if attempt.begun is None or attempt.trains_since is None:
        return ""
    ends: dict[str, float] = {}
    is_start = True
    for event in events:
        if isinstance(event, RunEvent) and event.status == "starting":
            ends, is_start = {}, True
        elif isinstance(event, RunEvent) and event.status == "running":
            is_start = False  # the phases of a machine that comes later are of no start of the run
        elif is_start and isinstance(event, TimingEvent) and (stage := _STAGES_OF_START.get(event.part)):
            ends[stage] = max(ends.get(stage, 0.0), event.time)
    whole = round(attempt.trains_since - attempt.begun)
    stages, since = [], 0
    for stage in _STAGES_OF_START.values():
        if stage in ends and (until := min(round(ends[stage] - attempt.begun), whole)) > since:
            stages.append(f"{stage} {duration_text(until - since)}")
            since = until
    if stages and whole > since:
        stages.append(f"loading the model {duration_text(whole - since)}")
    return duration_text(whole) + (f" ({', '.join(stages)})" if stages else "")


_OF_STATE = (
    "status", "step", "total_steps", "loss", "samples_per_second", "snapshot_step", "weights_differ", "joules",
    "message", "resume_step", "started", "updated",
)  # fmt: skip
_OF_MEMBER = (
    "rank", "name", "device", "status", "step", "loss", "learning_rate", "samples_per_second", "message", "epoch",
    "snapshot_step", "memory_peak", "device_memory_peak", "joules", "meters", "throttled",
)  # fmt: skip
_OF_MACHINE = ("cpu_percent", "celsius", "watts", "battery_percent", "on_mains")
_OF_SYNC = {"round", "step", "bytes_sent", "bytes_received", "seconds", "wait", "weight_hash", "time"}


def state_document(state: RunState) -> dict[str, object]:
    """Return the state as a JSON document, for ``--json``."""
    left = state.time_left(state.updated or 0.0)
    return {
        **{name: getattr(state, name) for name in _OF_STATE},
        "seconds_left": left.seconds if left else None,
        "members": [_member_document(member) for member in state.members.values()],
        "evaluations": evaluations_document(state),
        "series": series_document(state),
        "happenings": [entry._asdict() for entry in chronological(state.timeline)],
        "warnings": [{"member": w.member, "message": w.text, "time": w.time} for w in state.warnings],
        "errors": [{"member": e.member, "message": e.text, "hint": e.hint} for e in state.errors],
    }


def series_document(state: RunState) -> dict[str, Mapping[str, object]]:
    """Return the final figures of every series: of the run, and the newest of each member."""
    document: dict[str, Mapping[str, object]] = {}
    for name in series_names(state.curves):
        points = of_run(state.curves, name).points()
        newest = {rank: of_member(state.curves, rank, name).newest for rank in state.curves}
        document[name] = {
            "newest": points[-1].mean if points else None,
            "lowest": min((point.low for point in points), default=None),
            "highest": max((point.high for point in points), default=None),
            "step": points[-1].step if points else None,
            "members": {str(rank): value for rank, value in newest.items() if value is not None and rank != RUN},
        }
    return document


def _member_document(member: MemberState) -> dict[str, object]:
    compute, wait, transfer = member.shares
    sync = member.last_sync
    return {
        **{name: getattr(member, name) for name in _OF_MEMBER},
        **{name: getattr(member.machine, name, None) for name in _OF_MACHINE},
        "compute_share": compute,
        "wait_share": wait,
        "transfer_share": transfer,
        "bytes_sent": member.total.bytes_sent,
        "bytes_received": member.total.bytes_received,
        "synchronisations": member.work.syncs,
        "weight_hash": sync.weight_hash if sync else "",
        "last_synchronisation": {**sync.model_dump(include=_OF_SYNC), "members": len(sync.members)} if sync else None,
        "hottest_celsius": member.hottest,
        "ways": [route.model_dump() for route in member.routes.values()],
    }
