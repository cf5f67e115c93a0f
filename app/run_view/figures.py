"""Figures of a run, and the stages of its start and end, as texts and JSON documents; every display shares them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from app.run_view.member_state import MIN_STEPS, TROUBLE, MemberState
from app.run_view.metrics import amount_text, phase_label, phase_left_text, phase_text, phase_time_text
from app.run_view.run_series import RUN, of_member, of_run, series_names
from app.run_view.run_state import RunState
from app.run_view.tables.evaluations import evaluations_document
from app.run_view.timeline import chronological
from profiles.errors import counted
from profiles.quantities import duration_text, share_text, throughput_text, time_text
from training.records.attempts import RunAttempt
from training.records.events import EVALUATES, SAVES_MODEL, Event, ProgressEvent, RunEvent, TimingEvent

DATA_BRAKE = 0.1
"""Share of waiting for samples in a step from which on the data is the bottleneck."""
MORE_DATA = "set data_workers higher, or put the data on a faster disk"
"""Advice against it."""
LAST_EVALUATION = "last evaluation"
FIRST_EVALUATION = "evaluating the model before training"
_STAGES = {
    "starting": "loading the program",
    "started": "reading the data",
    "joined": "loading the model",
    "ready": "taking the first step",
}
"""Work before the first step, by the status that a member has meanwhile; the first comes first."""


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


def start_stages(state: RunState, now: float) -> Sequence[str]:
    """Return what is under way in a start: the preparation that is furthest behind, with its progress."""
    if evaluation := first_evaluation(state, now):
        return (evaluation,)
    busy = [member for member in state.members.values() if member.phase]
    if not busy:
        done, _, total = state.phase.rpartition(" ")[2].partition("/")
        stage = state.phase if done != total else _loading(state) or state.phase
        return (stage,) if stage else ()
    return (min(busy, key=lambda member: member.phase_done / (member.phase_total or 1)).preparing(now),)


def first_evaluation(state: RunState, now: float) -> str:
    """Return how far the evaluation before the first step is: ``evaluating the model before training, 12 of 96 samples,
    about 0:20 left``; of all members together, in the split that is furthest behind. Empty: there is none.

    Args:
        now: Unix time.
    """
    members = [member for member in state.members.values() if member.active]
    evaluating = [member for member in members if member.phase.startswith(EVALUATES)]
    if not evaluating or state.status not in ("starting", "running") or any(member.step for member in members):
        return ""
    split, same = _furthest_behind(evaluating)
    done, total = sum(member.phase_done for member in same), sum(member.phase_total or 0 for member in same)
    if done >= total and split in state.evaluations:
        return _STAGES["ready"]
    slowest = min(same, key=lambda member: member.phase_done / (member.phase_total or 1))
    time = phase_time_text(slowest.phase_reports[0], slowest.phase_reports[-1], now)
    samples = "samples" if split == "validation" else f"{split} samples"
    count = f"{FIRST_EVALUATION}, {done} of {counted(total, samples.removesuffix('s'))}"
    return f"{count}, {'about ' if time.endswith('left') else ''}{time}" if time else count


def progress_line(state: RunState, event: ProgressEvent) -> str:
    """Return the line of a report, after which the run is in ``state``: ``features: 3/10, 0:40 left``."""
    if event.phase.startswith(EVALUATES) and (stage := first_evaluation(state, event.time)):
        return stage
    member = state.members.get(-1 if event.member is None else event.member)
    amount = amount_text(event.phase, event.done, event.total)
    left = phase_left_text(member.phase_reports[0], event) if member else ""
    progress = ", ".join(filter(None, (amount, left)))
    return ": ".join(filter(None, (phase_label(event.phase), progress)))


def _furthest_behind(evaluating: Sequence[MemberState]) -> tuple[str, list[MemberState]]:
    """Return the split of which the smallest share is evaluated, and the members that evaluate it."""
    phase = min(evaluating, key=lambda member: member.phase_done / (member.phase_total or 1)).phase
    return phase.removeprefix(EVALUATES), [member for member in evaluating if member.phase == phase]


def _loading(state: RunState) -> str:
    """Return the work of the machines that are furthest behind: ``loading the model on larder, garage``."""
    for status, work in _STAGES.items():
        if names := [member.label for member in state.members.values() if state.status_of(member) == status]:
            return f"{work} on {', '.join(names)}"
    return ""


def end_stage(state: RunState, far: bool = False) -> str:
    """Return what is under way between the last step and the end of a run; empty: it still takes steps.

    Args:
        far: whether the model is fetched from other machines.
    """
    members = list(state.members.values())
    phases = [member for member in members if member.active and member.phase]
    is_last = state.total_steps is not None and state.step >= state.total_steps > 0
    is_saved = any(member.phase == SAVES_MODEL for member in phases)
    are_done = bool(members) and all(member.status in ("done", *TROUBLE, "left") for member in members)
    if state.status != "running" or not (
        is_last or is_saved or (are_done and any(m.status == "done" for m in members))
    ):
        return ""
    evaluating = [member for member in phases if member.phase.startswith(EVALUATES)]
    if evaluating and not (is_saved and all(m.phase_done == m.phase_total for m in evaluating)):
        split, same = _furthest_behind(evaluating)
        done, total = sum(m.phase_done for m in same), sum(m.phase_total or 0 for m in same)
        return f"{LAST_EVALUATION}: {phase_text(split, done, total)}"
    if is_saved:
        return "writing the model"
    if not are_done:
        return "the last synchronisation"
    return "fetching the model from the machines" if far else "ending the processes"


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
