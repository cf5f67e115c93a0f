"""Every figure over the steps of a run in bounded memory, whatever the length of the run.

A series is a row of buckets, each with the least, the greatest and the mean of its values. All buckets have the same
width, a power of two of steps, and lie at multiples of it; when there are too many, neighbours are joined and the width
doubles. So the series of several members, and of two runs, are always aligned. Every member has its own series, so
the order between members does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

from training.records.events import EvaluationEvent, MachineEvent, SnapshotEvent, StepEvent, SyncEvent

MOST_BUCKETS = 1024
_NEAR = 2
"""Neighbours on each side that bound a smoothed line by their least and greatest values."""


class SeriesBucket(NamedTuple):
    """The values of a series within ``width`` steps."""

    number: int
    """Index of the bucket: its first step over the width."""
    amount: int
    """Values in it."""
    low: float
    high: float
    total: float
    """Sum of values times weights."""
    weight: float

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight > 0 else (self.low + self.high) / 2


class Point(NamedTuple):
    """A bucket as a point of a curve."""

    step: float
    """In the middle of the bucket."""
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Series:
    """A figure of one member. :func:`add` returns the next one."""

    width: int = 1
    """Steps of a bucket."""
    closed: tuple[SeriesBucket, ...] = ()
    current: SeriesBucket | None = None
    invalid: int = 0
    """Values that were not finite, and are in no bucket."""

    @property
    def buckets(self) -> tuple[SeriesBucket, ...]:
        return self.closed if self.current is None else (*self.closed, self.current)

    @property
    def count(self) -> int:
        """Values in all buckets."""
        return sum(bucket.amount for bucket in self.buckets)

    @property
    def newest(self) -> float | None:
        """Mean of the current bucket."""
        return self.current.mean if self.current else None

    def points(self) -> list[Point]:
        """Return one point a bucket, in the order of the steps."""
        middle = (self.width - 1) / 2
        return [Point(b.number * self.width + middle, b.low, b.mean, b.high) for b in self.buckets]


def add(series: Series, step: int, value: float, weight: float = 1.0) -> Series:
    """Return the series with one more value; a step before the last one removes the values after it.

    A member that resumes from an earlier snapshot repeats steps: their first values are replaced, to the precision of a
    bucket.
    """
    if not math.isfinite(value) or not math.isfinite(weight) or abs(value) > 1e300 or not 0 <= weight <= 1e300:
        return Series(series.width, series.closed, series.current, series.invalid + 1)
    number = step // series.width
    if series.current is not None and number < series.current.number:
        series = _cut_after(series, number)
    current, new = series.current, SeriesBucket(number, 1, value, value, value * weight, weight)
    if current is not None and number == current.number:
        return Series(series.width, series.closed, _join(current, new), series.invalid)
    grown = Series(series.width, series.buckets, new, series.invalid)
    return coarser(grown, grown.width * 2) if len(grown.closed) >= MOST_BUCKETS else grown


def coarser(series: Series, width: int) -> Series:
    """Return the series with buckets of ``width`` steps, a power of two; the series itself if it is as wide already."""
    factor = width // series.width
    if factor <= 1:
        return series
    joined: list[SeriesBucket] = []
    for bucket in series.buckets:
        moved = bucket._replace(number=bucket.number // factor)
        if joined and joined[-1].number == moved.number:
            joined[-1] = _join(joined[-1], moved)
        else:
            joined.append(moved)
    return Series(width, tuple(joined[:-1]), joined[-1] if joined else None, series.invalid)


def merged(several: Iterable[Series]) -> Series:
    """Return one series of all members: weighted means, the least and the greatest of all."""
    return _combined(several, lambda buckets: reduce(_join, buckets))


def summed(several: Iterable[Series]) -> Series:
    """Return the sum of the members' means, bucket by bucket, where at least one of them has a value."""

    def total(buckets: list[SeriesBucket]) -> SeriesBucket:
        low, high = sum(bucket.low for bucket in buckets), sum(bucket.high for bucket in buckets)
        amount, mean = max(bucket.amount for bucket in buckets), sum(bucket.mean for bucket in buckets)
        return SeriesBucket(buckets[0].number, amount, low, high, mean, 1.0)

    return _combined(several, total)


def _combined(several: Iterable[Series], one_of: Callable[[list[SeriesBucket]], SeriesBucket]) -> Series:
    """Return one series in which ``one_of`` joins the members' buckets of the same number."""
    filled = [series for series in several if series.current is not None]
    width = max((series.width for series in filled), default=1)
    buckets_by_number: dict[int, list[SeriesBucket]] = {}
    for series in filled:
        for bucket in coarser(series, width).buckets:
            buckets_by_number.setdefault(bucket.number, []).append(bucket)
    buckets = [one_of(buckets_by_number[number]) for number in sorted(buckets_by_number)]
    return Series(width, tuple(buckets[:-1]), buckets[-1] if buckets else None, sum(s.invalid for s in filled))


def smoothed(points: list[Point], strength: float) -> list[Point]:
    """Return the points smoothed by means over their neighbours, within the least and greatest of the nearest ones.

    A neighbour weighs ``strength ** distance`` (0: no smoothing, towards 1: more). Both sides have equally many
    neighbours, at most a third of the points before: so a steeply falling curve is not lifted, and the ends stay.
    """
    if strength <= 0 or not points:
        return points
    means = [point.mean for point in points]
    before, after = _fading(means, strength), _fading(means[::-1], strength)[::-1]
    lows, highs = _nearest([point.low for point in points], min), _nearest([point.high for point in points], max)
    smooth = []
    for index, (point, low, high) in enumerate(zip(points, lows, highs)):
        remaining = len(points) - 1 - index
        reach = min(index // 3, remaining)
        beyond = strength ** (reach + 1)
        sum_ = before[index] + after[index] - point.mean
        if reach < index:
            sum_ -= beyond * before[index - reach - 1]
        if reach < remaining:
            sum_ -= beyond * after[index + reach + 1]
        weight = 2.0 * (1.0 - beyond) / (1.0 - strength) - 1.0
        smooth.append(Point(point.step, low, min(high, max(low, sum_ / weight)) if reach else point.mean, high))
    return smooth


def _fading(values: list[float], strength: float) -> list[float]:
    """Return for each value the sum of it and all before it, weighted by ``strength ** distance``."""
    return list(accumulate(values, lambda sum_, value: strength * sum_ + value))


def _nearest(values: list[float], pick: Callable[..., float]) -> list[float]:
    """Return for each value the least, or the greatest, of it and its nearest neighbours."""
    padded = [*values[:1] * _NEAR, *values, *values[-1:] * _NEAR]
    return list(map(pick, *(padded[offset:] for offset in range(2 * _NEAR + 1))))


def _cut_after(series: Series, number: int) -> Series:
    buckets = [bucket for bucket in series.buckets if bucket.number <= number]
    if series.width == 1 and buckets and buckets[-1].number == number:
        buckets.pop()  # the step that is repeated
    return Series(series.width, tuple(buckets[:-1]), buckets[-1] if buckets else None, series.invalid)


def _join(a: SeriesBucket, b: SeriesBucket) -> SeriesBucket:
    low, high = min(a.low, b.low), max(a.high, b.high)
    total, weight = a.total + b.total, a.weight + b.weight
    return SeriesBucket(a.number, a.amount + b.amount, low, high, total, weight)


Curves = Mapping[str, Series]
"""Series by name."""

RUN = -1
"""Rank that stands for the run itself."""

SUMMED = ("samples/s", "bytes/step", "memory", "device memory", "sync bytes", "power")
"""Series whose values add up over the members; of all others the mean is shown."""


SIMULATED = "simulated hours"
"""Time since the run began, on the machines that are simulated."""
SNAPSHOTS = "snapshot time"
"""Seconds in which a machine wrote a snapshot."""
OF_EXCHANGES = {
    "sync bytes": "Bytes that all machines sent and received at a synchronisation.",
    "compression": "How many times more bytes averaging all weights in fp32 in every step would have sent.",
    "delta norm": "Norm of what a machine brought to a synchronisation: what it changed since the last one, or how its "
    "weights differ from the mean they are averaged to.",
    "drift": "Largest difference of a weight that was found between the machines, or from their mean.",
    "correlation": "Of a machine's weights with the mean, before it took the mean over; 1: the same.",
}
"""Series that every strategy reports at a synchronisation, with descriptions for people."""


class Figure(NamedTuple):
    """One value of one series."""

    name: str
    step: int
    value: float
    weight: float = 1.0


MeasuredEvent = StepEvent | SyncEvent | EvaluationEvent | MachineEvent | SnapshotEvent
"""Events that carry figures."""


def figures(event: MeasuredEvent, step: int) -> Iterator[Figure]:
    """Yield the figures of an event.

    Args:
        step: the newest step of the event's member, for events without a step.
    """
    weight: dict[str, float] = {}
    values: dict[str, float | None]
    match event:
        case StepEvent():
            step, seconds = event.step, event.seconds
            loss = event.loss if event.weight else None  # of no sample, or of a step that was left out
            values = {"loss": loss, "learning rate": event.learning_rate, "gradient norm": event.grad_norm}
            weight = {"loss": event.weight}
            if seconds > 0:
                values |= {"samples/s": event.samples / seconds, "wait share": event.wait / seconds}
                weight |= {"samples/s": seconds, "wait share": seconds}
            values |= {"step time": seconds, "bytes/step": event.bytes_sent + event.bytes_received}
            values |= {SIMULATED: None if event.clock is None else event.clock / 3600}
        case SyncEvent():
            step, moved = event.step, event.bytes_sent + event.bytes_received
            values = {"sync bytes": moved, "sync time": event.seconds, "sync wait": event.wait, "drift": event.drift}
            values |= {"correlation": event.correlation, "delta norm": event.delta_norm}
            values |= {"compression": event.compression}
            weight = {"compression": event.bytes_sent}  # so that means are of all bytes
        case EvaluationEvent():
            step = event.step
            values = {evaluation_series(event.split, name): value for name, value in event.figures.items()}
            weight = dict.fromkeys(values, float(event.samples or 1))
        case SnapshotEvent():
            step, values = event.step, {SNAPSHOTS: event.seconds}
        case MachineEvent():
            values = {"processor": event.cpu_percent / 100, "memory": event.memory_used, "power": event.watts}
            values |= {"device memory": event.device_memory_used, "temperature": event.celsius}
    for name, value in values.items():
        if value is not None:
            yield Figure(name, step, value, weight.get(name, 1.0))


def evaluation_series(split: str, metric: str) -> str:
    """Return the name of the series of a metric on a split."""
    return f"{split} {metric}"


def with_figures(curves: Mapping[int, Curves], rank: int, event_figures: Iterator[Figure]) -> Mapping[int, Curves]:
    """Return the curves with the figures of one event of one member added."""
    member_curves = dict(curves.get(rank, {}))
    for name, step, value, weight in event_figures:
        member_curves[name] = add(member_curves.get(name, _EMPTY), step, value, weight)
    updated = {**curves, rank: member_curves}
    return updated if rank in curves else dict(sorted(updated.items()))


def series_names(curves: Mapping[int, Curves]) -> list[str]:
    """Return the names of all series: losses and error rates first."""
    unique = {name for member_curves in curves.values() for name in member_curves}
    return sorted(unique, key=lambda name: (_rank(name), name))


def of_run(curves: Mapping[int, Curves], name: str) -> Series:
    """Return a series over all members: the sum where values add up, else the weighted mean."""
    member_series = [curves[rank][name] for rank in sorted(curves) if name in curves[rank]]
    return (summed if name in SUMMED else merged)(member_series)


def over_hours(curves: Mapping[int, Curves], name: str) -> list[tuple[float, float]]:
    """Return a series over simulated time, as hours and values; values before the first step are at 0."""
    clock, shown = of_run(curves, SIMULATED), of_run(curves, name)
    width = max(clock.width, shown.width)
    hours = {0: 0.0} | {bucket.number: bucket.mean for bucket in coarser(clock, width).buckets}
    return [(hours[bucket.number], bucket.mean) for bucket in coarser(shown, width).buckets if bucket.number in hours]


def newest(curves: Mapping[int, Curves], name: str) -> float | None:
    """Return the newest value of :func:`of_run`, from the current bucket of every member alone."""
    member_series = [curves[rank][name] for rank in sorted(curves) if name in curves[rank]]
    ends = [Series(series.width, (), series.current) for series in member_series]
    return (summed if name in SUMMED else merged)(ends).newest


def at_step(curves: Mapping[int, Curves], name: str, step: int) -> float | None:
    """Return the value of :func:`of_run` at a step, or the last one before it; ``None``: there is none."""
    series = of_run(curves, name)
    return next((b.mean for b in reversed(series.buckets) if b.number * series.width <= step), None)


def of_member(curves: Mapping[int, Curves], rank: int, name: str) -> Series:
    """Return one member's series; an empty one where it has none."""
    return curves.get(rank, {}).get(name, _EMPTY)


_EMPTY = Series()
_ORDER = ("loss", "wer", "cer", "samples/s", "step time", "wait share", "learning rate", "gradient norm")


def _rank(name: str) -> tuple[int, int]:
    metric = name.split(" ")[-1]
    if name in _ORDER:
        return (_ORDER.index(name), 0)
    return (_ORDER.index(metric), 1) if metric in ("wer", "cer", "loss") else (len(_ORDER), 0)
