"""What of an event is a figure to draw: the vocabulary that TensorBoard, Weights & Biases and trackio get. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import NamedTuple

from training.events import EvaluationEvent, Event, MachineEvent, StepEvent, SyncEvent

_STEP = ("loss", "learning_rate", "epoch", "grad_norm", "compute", "wait", "transfer", "bytes_sent", "bytes_received")
_SYNC = ("seconds", "wait", "bytes_sent", "bytes_received", "drift")
_MACHINE = ("cpu_percent", "memory_used", "device_memory_used", "celsius", "watts", "joules", "battery_percent")


class Scalar(NamedTuple):
    """One figure of a member, or of the run."""

    tag: str
    value: float
    step: int
    time: float
    member: int | None
    """``None``: of the whole run."""


def scalars_of(event: Event, newest_step: int) -> Iterator[Scalar]:
    """Yield the figures of an event.

    Args:
        newest_step: of the event's member, for figures that have a time and no step.
    """
    match event:
        case StepEvent():
            seconds = event.compute + event.wait
            if seconds > 0:
                yield Scalar("train/samples_per_second", event.samples / seconds, event.step, event.time, event.member)
            yield from _fields(event, "train", _STEP, event.step)
        case SyncEvent():
            yield from _fields(event, "sync", _SYNC, event.step)
        case MachineEvent():
            yield from _fields(event, "machine", _MACHINE, newest_step)
        case EvaluationEvent():
            every = {**event.metrics, **({} if event.loss is None else {"loss": event.loss})}
            for name, value in every.items():
                if isfinite(value):
                    yield Scalar(f"{event.split}/{name}", float(value), event.step, event.time, None)
        case _:
            return


def _fields(
    event: StepEvent | SyncEvent | MachineEvent, group: str, names: tuple[str, ...], step: int
) -> Iterator[Scalar]:
    for name in names:
        value = getattr(event, name)
        if value is not None and isfinite(value):
            yield Scalar(f"{group}/{name}", float(value), step, event.time, event.member)


def by_name(scalars: Iterable[Scalar], name: Callable[[int], str]) -> dict[str, float]:
    """Return figures of one event for trackers with flat names: a member's figures end with its name."""
    return {s.tag if s.member is None else f"{s.tag}/{name(s.member)}": s.value for s in scalars}
