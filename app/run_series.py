"""A figure over the steps of a run in bounded memory, whatever the length of the run.

A series is a row of buckets, each with the least, the greatest and the mean of what fell into it. All buckets are as
wide, a power of two of steps, and lie at multiples of their width; when there are too many, neighbours are joined and
the width doubles. So the series of several members, and of a run and a former one, always fit on each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MOST_BUCKETS = 1024


class Bucket(NamedTuple):
    """What a series holds of ``width`` steps."""

    place: int
    """Number of the bucket: its first step over the width."""
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
    """A bucket as a reader sees it."""

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
    closed: tuple[Bucket, ...] = ()
    last: Bucket | None = None
    invalid: int = 0
    """Values that were not finite, and so are in no bucket."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.closed if self.last is None else (*self.closed, self.last)

    @property
    def count(self) -> int:
        """Values in all buckets."""
        return sum(bucket.amount for bucket in self.buckets)

    @property
    def newest(self) -> float | None:
        """Mean of the last bucket."""
        return self.last.mean if self.last else None

    def points(self) -> list[Point]:
        """Return one point a bucket, in the order of the steps."""
        middle = (self.width - 1) / 2
        return [Point(b.place * self.width + middle, b.low, b.mean, b.high) for b in self.buckets]


def add(series: Series, step: int, value: float, weight: float = 1.0) -> Series:
    """Return the series with one more value; a step before the last one takes back what came after it.

    A member that went on from an earlier snapshot does its steps a second time: what it did first is replaced, as far
    as the width of a bucket can tell.
    """
    if not math.isfinite(value) or not math.isfinite(weight) or abs(value) > 1e300 or not 0 <= weight <= 1e300:
        return Series(series.width, series.closed, series.last, series.invalid + 1)
    place = step // series.width
    last = series.last
    if last is not None and place < last.place:
        series = _before(series, place)
        last = series.last
    if last is not None and place == last.place:
        joined = _join(last, Bucket(place, 1, value, value, value * weight, weight))
        return Series(series.width, series.closed, joined, series.invalid)
    closed = series.closed if last is None else (*series.closed, last)
    grown = Series(series.width, closed, Bucket(place, 1, value, value, value * weight, weight), series.invalid)
    return coarser(grown, grown.width * 2) if len(closed) >= MOST_BUCKETS else grown


def coarser(series: Series, width: int) -> Series:
    """Return the series with buckets of ``width`` steps: a power of two, no less than now."""
    factor = width // series.width
    if factor <= 1:
        return series
    joined: list[Bucket] = []
    for bucket in series.buckets:
        moved = bucket._replace(place=bucket.place // factor)
        if joined and joined[-1].place == moved.place:
            joined[-1] = _join(joined[-1], moved)
        else:
            joined.append(moved)
    return Series(width, tuple(joined[:-1]), joined[-1] if joined else None, series.invalid)


def merged(several: Iterable[Series]) -> Series:
    """Return what all members together show: means by weight, the least and the greatest of all."""
    every = [series for series in several if series.last is not None]
    if len(every) < 2:
        return every[0] if every else Series()
    width = max(series.width for series in every)
    found: dict[int, Bucket] = {}
    for series in every:
        for bucket in coarser(series, width).buckets:
            known = found.get(bucket.place)
            found[bucket.place] = bucket if known is None else _join(known, bucket)
    buckets = [found[place] for place in sorted(found)]
    return Series(width, tuple(buckets[:-1]), buckets[-1], sum(series.invalid for series in every))


def summed(several: Iterable[Series]) -> Series:
    """Return the sum of the members' means, bucket by bucket, where at least one of them has a value."""
    every = [series for series in several if series.last is not None]
    width = max((series.width for series in every), default=1)
    found: dict[int, list[Bucket]] = {}
    for series in every:
        for bucket in coarser(series, width).buckets:
            found.setdefault(bucket.place, []).append(bucket)
    buckets = [_sum(place, found[place]) for place in sorted(found)]
    return Series(width, tuple(buckets[:-1]), buckets[-1] if buckets else None, sum(s.invalid for s in every))


def smoothed(points: list[Point], strength: float) -> list[Point]:
    """Return the points with exponentially smoothed means (strength 0: as they are, towards 1: ever smoother).

    The start is corrected for what it lacks of the past (as Adam does, Kingma & Ba 2015, section 3), so it is no
    lower than it should be.
    """
    if strength <= 0:
        return points
    sum_, weight, found = 0.0, 0.0, []
    for point in points:
        sum_ = strength * sum_ + (1 - strength) * point.mean
        weight = strength * weight + (1 - strength)
        found.append(point._replace(mean=sum_ / weight))
    return found


def _before(series: Series, place: int) -> Series:
    """Return the series without the buckets after ``place``."""
    kept = [bucket for bucket in series.buckets if bucket.place <= place]
    if series.width == 1 and kept and kept[-1].place == place:
        kept.pop()  # exactly the step that is done again
    return Series(series.width, tuple(kept[:-1]), kept[-1] if kept else None, series.invalid)


def _join(one: Bucket, other: Bucket) -> Bucket:
    return Bucket(
        one.place,
        one.amount + other.amount,
        min(one.low, other.low),
        max(one.high, other.high),
        one.total + other.total,
        one.weight + other.weight,
    )


def _sum(place: int, buckets: list[Bucket]) -> Bucket:
    total = sum(bucket.mean for bucket in buckets)
    low, high = sum(bucket.low for bucket in buckets), sum(bucket.high for bucket in buckets)
    return Bucket(place, max(bucket.amount for bucket in buckets), low, high, total, 1.0)
