"""Events as short calls, for tests of what is shown."""

from __future__ import annotations

from typing import Any

from training.events import EvaluationEvent, StepEvent, SyncEvent


def step(number: int, *, member: int = 0, time: float | None = None, **fields: Any) -> StepEvent:
    defaults: dict[str, Any] = {
        "epoch": 0.0,
        "loss": 1.0,
        "learning_rate": 1e-3,
        "samples": 8,
        "weight": 8.0,
        "compute": 0.75,
        "wait": 0.25,
        "transfer": 0.5,
    }
    when = float(number) if time is None else time
    return StepEvent(member=member, step=number, time=when, **{**defaults, **fields})


def sync(round_: int, *, member: int = 0, weight_hash: str = "", **fields: Any) -> SyncEvent:
    defaults: dict[str, Any] = {"bytes_sent": 100, "bytes_received": 200, "seconds": 0.5, "wait": 0.1}
    return SyncEvent(
        member=member,
        time=1.0,
        step=round_ * 10,
        round=round_,
        members=[0, 1],
        weight_hash=weight_hash,
        **{**defaults, **fields},
    )


def evaluation(at: int, wer: float, split: str = "validation") -> EvaluationEvent:
    return EvaluationEvent(
        member=0, time=float(at), step=at, split=split, loss=1.0, metrics={"wer": wer}, samples=5, seconds=1.0
    )
