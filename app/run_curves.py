"""Which figures of an event go into which series. Every member has its own, so no order between members matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from app.run_series import Series, add, merged, summed
from training.events import EvaluationEvent, MachineEvent, StepEvent, SyncEvent

Curves = Mapping[str, Series]
"""Series by name."""

RUN = -1
"""Stands for the run itself where a rank is expected."""

SUMMED = ("samples/s", "bytes/step", "memory", "device memory", "sync bytes", "power")
"""Series whose values add up over the members; of all others the mean is shown."""


class Figure(NamedTuple):
    """One value of one series."""

    name: str
    step: int
    value: float
    weight: float = 1.0


def figures(event: StepEvent | SyncEvent | EvaluationEvent | MachineEvent, step: int) -> Iterator[Figure]:
    """Yield the figures of an event.

    Args:
        step: the newest step of the event's member, for events that say none.
    """
    match event:
        case StepEvent():
            yield from _of_step(event)
        case SyncEvent():
            yield Figure("sync bytes", event.step, event.bytes_sent + event.bytes_received)
            yield Figure("sync time", event.step, event.seconds)
            yield Figure("sync wait", event.step, event.wait)
            if event.drift is not None:
                yield Figure("drift", event.step, event.drift)
        case EvaluationEvent():
            weight = float(event.samples or 1)
            for name, value in sorted(event.figures.items()):
                yield Figure(evaluated(event.split, name), event.step, value, weight)
        case MachineEvent():
            yield Figure("processor", step, event.cpu_percent / 100)
            yield Figure("memory", step, event.memory_used)
            if event.device_memory_used is not None:
                yield Figure("device memory", step, event.device_memory_used)
            if event.celsius is not None:
                yield Figure("temperature", step, event.celsius)
            if event.watts is not None:
                yield Figure("power", step, event.watts)


def evaluated(split: str, metric: str) -> str:
    """Return the name of the series of a metric on a split."""
    return f"{split} {metric}"


def _of_step(event: StepEvent) -> Iterator[Figure]:
    step, seconds = event.step, event.seconds
    yield Figure("loss", step, event.loss, event.weight)
    yield Figure("learning rate", step, event.learning_rate)
    if event.grad_norm is not None:
        yield Figure("gradient norm", step, event.grad_norm)
    if seconds > 0:
        yield Figure("samples/s", step, event.samples / seconds, seconds)
        yield Figure("wait share", step, event.wait / seconds, seconds)
    yield Figure("step time", step, seconds)
    yield Figure("bytes/step", step, event.bytes_sent + event.bytes_received)


def extended(curves: Mapping[int, Curves], rank: int, found: Iterator[Figure]) -> Mapping[int, Curves]:
    """Return all curves with the figures of one event of one member."""
    own = dict(curves.get(rank, {}))
    for name, step, value, weight in found:
        own[name] = add(own.get(name, _EMPTY), step, value, weight)
    every = {**curves, rank: own}
    return every if rank in curves else dict(sorted(every.items()))


def names(curves: Mapping[int, Curves]) -> list[str]:
    """Return the names of all series: losses and error rates first."""
    every = {name for own in curves.values() for name in own}
    return sorted(every, key=lambda name: (_rank(name), name))


def of_run(curves: Mapping[int, Curves], name: str) -> Series:
    """Return what all members together show of a series: the sum where values add up, else the weighted mean."""
    own = [curves[rank][name] for rank in sorted(curves) if name in curves[rank]]
    return (summed if name in SUMMED else merged)(own)


def newest(curves: Mapping[int, Curves], name: str) -> float | None:
    """Return the newest value of :func:`of_run` from the last bucket of every member, without joining the rest."""
    own = [curves[rank][name] for rank in sorted(curves) if name in curves[rank]]
    ends = [Series(series.width, (), series.last) for series in own]
    return (summed if name in SUMMED else merged)(ends).newest


def of_member(curves: Mapping[int, Curves], rank: int, name: str) -> Series:
    """Return one member's series; an empty one where it has none."""
    return curves.get(rank, {}).get(name, _EMPTY)


_EMPTY = Series()
_ORDER = ("loss", "wer", "cer", "samples/s", "step time", "wait share", "learning rate", "gradient norm")


def _rank(name: str) -> tuple[int, int]:
    last = name.split(" ")[-1]
    if name in _ORDER:
        return (_ORDER.index(name), 0)
    return (_ORDER.index(last), 1) if last in ("wer", "cer", "loss") else (len(_ORDER), 0)
