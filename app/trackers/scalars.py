"""What of an event is a figure to draw: the vocabulary that TensorBoard, Weights & Biases and trackio get. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite

from app.run_curves import Figure
from training.events import EvaluationEvent, Event, MachineEvent, StepEvent, SyncEvent

_STEP = ("loss", "learning_rate", "epoch", "grad_norm", "compute", "wait", "transfer", "bytes_sent", "bytes_received")
_SYNC = ("seconds", "wait", "bytes_sent", "bytes_received", "drift")
_MACHINE = ("cpu_percent", "memory_used", "device_memory_used", "celsius", "watts", "joules", "battery_percent")


def scalars_of(event: Event, newest_step: int) -> Iterator[Figure]:
    """Yield the figures of an event.

    Args:
        newest_step: of the event's member, for figures that have a time and no step.
    """
    match event:
        case StepEvent():
            if event.seconds > 0:
                yield Figure("train/samples_per_second", event.step, event.samples / event.seconds)
            yield from _fields(event, "train", _STEP, event.step)
        case SyncEvent():
            yield from _fields(event, "sync", _SYNC, event.step)
        case MachineEvent():
            yield from _fields(event, "machine", _MACHINE, newest_step)
        case EvaluationEvent():
            for name, value in event.figures.items():
                if isfinite(value):
                    yield Figure(f"{event.split}/{name}", event.step, float(value))
        case _:
            return


def _fields(
    event: StepEvent | SyncEvent | MachineEvent, group: str, names: tuple[str, ...], step: int
) -> Iterator[Figure]:
    for name in names:
        value = getattr(event, name)
        if value is not None and isfinite(value):
            yield Figure(f"{group}/{name}", step, float(value))


def owner(event: Event) -> int | None:
    """Return the member whose figures an event has; ``None``: they are of the whole run."""
    return None if isinstance(event, EvaluationEvent) else event.member


def by_name(event: Event, newest_step: int, name: Callable[[int], str]) -> tuple[int, dict[str, float]]:
    """Return step and figures of an event for trackers with flat names: a member's figures end with its name."""
    found, member = list(scalars_of(event, newest_step)), owner(event)
    end = "" if member is None else f"/{name(member)}"
    return (found[0].step if found else newest_step), {f"{figure.name}{end}": figure.value for figure in found}
