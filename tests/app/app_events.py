"""Events as short calls, for tests of what is shown."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from training.records.events import (
    ElectionEvent,
    ErrorEvent,
    EvaluationEvent,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    UnknownEvent,
    WarningEvent,
)


def step(number: int, *, member: int = 0, time: float | None = None, **fields: Any) -> StepEvent:
    learnt = {"epoch": 0.0, "loss": 1.0, "learning_rate": 1e-3, "samples": 8, "weight": 8.0}
    costs = {"compute": 0.75, "wait": 0.25, "transfer": 0.5}
    when = float(number) if time is None else time
    return StepEvent(member=member, step=number, time=when, **{**learnt, **costs, **fields})


def sync(round_: int, *, member: int = 0, weight_hash: str = "", **fields: Any) -> SyncEvent:
    exchanged = {"step": round_ * 10, "bytes_sent": 100, "bytes_received": 200, "seconds": 0.5, "wait": 0.1, **fields}
    return SyncEvent(member=member, time=1.0, round=round_, members=[0, 1], weight_hash=weight_hash, **exchanged)


def evaluation(at: int, wer: float = 0.5, split: str = "validation", seconds: float = 1.0) -> EvaluationEvent:
    return EvaluationEvent(
        member=0, time=float(at), step=at, split=split, loss=1.0, metrics={"wer": wer}, samples=5, seconds=seconds
    )


number = st.floats(0, 1e6)
whole = st.integers(0, 1000)
rank = st.integers(0, 3)
text = st.text(max_size=5)
STATUSES = ("started", "ready", "joined", "left", "lost", "done", "failed")
MEMBER_EVENTS = st.one_of(
    st.builds(MemberEvent, time=number, status=st.sampled_from(STATUSES), name=text, message=text),
    st.builds(ProgressEvent, time=number, phase=text, done=whole, total=st.none() | whole),
    st.builds(step, whole, time=number, loss=st.floats(-1e39, 1e39), compute=number, wait=number, samples=whole),
    st.builds(sync, whole, weight_hash=text),
    st.builds(evaluation, whole, st.floats(0, 2), split=st.sampled_from(["validation", "test"])),
    st.builds(SnapshotEvent, time=number, step=whole, path=text, bytes=whole, seconds=number),
    st.builds(
        MachineEvent,
        time=number,
        cpu_percent=number,
        memory_used=whole,
        memory_total=whole,
        celsius=st.none() | number,
        watts=st.none() | number,
        joules=st.none() | number,
        meters=st.none() | st.just(("gpu",)),
        throttled=st.none() | st.booleans(),
    ),
    st.builds(WarningEvent, time=number, message=text),
    st.builds(ElectionEvent, time=number, name=text, term=whole, port=st.just(7)),
    st.builds(ErrorEvent, time=number, message=text, hint=text),
)
RUN_EVENTS = st.one_of(
    st.builds(RunEvent, time=number, status=st.sampled_from(["starting", "running", "failed"]), total_steps=whole),
    st.builds(UnknownEvent, time=number, kind=text),
)
