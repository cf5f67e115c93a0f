"""Ribbons: what each machine did over the steps of a run (computed, waited, was away, wrote snapshots). Pure.

The dashboard and the report draw them under the loss, on the same axis.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.run_view.member_state import MemberState
from app.run_view.run_series import SNAPSHOTS, SUMMED, Series, SeriesBucket, merged, of_member, of_run, summed
from app.run_view.run_state import RunState
from app.run_view.tables.machine_changes import machine_changes
from app.run_view.timeline import with_reason

PER_ROUND = ("samples/s", "wait share")
"""Series that are averaged over the steps between two synchronisations.

With an interval between exchanges, members wait in one step of a round, each in another: the values of single steps
would show either nothing or that wait alone, and rates would add up to more than the run's.
"""
_GAP = 8
"""Buckets without a step that count as work: uneven members do not take every step."""


class AwaySpan(NamedTuple):
    """A span of steps in which a machine did not take part."""

    start: float
    """Step at which it left or was lost."""
    until: float
    """Step at which it was back; infinite: it never was."""
    status: str
    """Its status since then."""
    why: str

    @property
    def text(self) -> str:
        """``lost: silent for 5 s``."""
        return with_reason(self.status, self.why)


@dataclass(frozen=True)
class Ribbon:
    """One machine over the steps of a run."""

    rank: int
    waits: Series
    """Share of waiting in its time, averaged over the steps between two synchronisations; there is a bucket wherever
    the machine took a step."""
    away: tuple[AwaySpan, ...] = ()
    arrivals: tuple[float, ...] = ()
    """Steps at which it joined or came back."""
    snapshots: tuple[float, ...] = ()
    """Steps at which it wrote one."""


def ribbons(state: RunState) -> list[Ribbon]:
    """Return the ribbon of every machine."""
    away: dict[int, list[AwaySpan]] = {}
    arrivals: dict[int, list[float]] = {}
    for step, entry in machine_changes(state):
        absences = away.setdefault(entry.member, [])
        if entry.is_arrival:
            arrivals.setdefault(entry.member, []).append(step)
            if absences and absences[-1].until == math.inf:
                absences[-1] = absences[-1]._replace(until=max(step, absences[-1].start))
        elif absences and step <= absences[-1].start:  # it was lost again at once: it is the same absence
            absences[-1] = absences[-1]._replace(until=math.inf)
        else:
            if absences:  # lost again before it took a step
                absences[-1] = absences[-1]._replace(until=min(step, absences[-1].until))
            absences.append(AwaySpan(step, math.inf, entry.status, entry.why))
    for rank, absences in away.items():  # why its process has ended is known a little later than that it is gone
        member = state.members.get(rank)
        if member is not None and member.has_ended and absences:
            absences[-1] = absences[-1]._replace(why=member.message)
    return [
        Ribbon(
            rank,
            series_of_member(state, rank, "wait share"),
            tuple(away.get(rank, ())),
            tuple(dict.fromkeys(arrivals.get(rank, ()))),
            tuple(point.step for point in of_member(state.curves, rank, SNAPSHOTS).points()),
        )
        for rank in state.members
    ]


def rate_of_run(state: RunState) -> Series:
    """Return the samples/s of all machines together."""
    return series_of_run(state, "samples/s")


def series_of_run(state: RunState, name: str) -> Series:
    """Return a series over all members; those of :data:`PER_ROUND` with the members' averages of a round."""
    if name not in PER_ROUND:
        return of_run(state.curves, name)
    return (summed if name in SUMMED else merged)(series_of_member(state, rank, name) for rank in state.members)


def series_of_member(state: RunState, rank: int, name: str) -> Series:
    """Return a member's series; those of :data:`PER_ROUND` averaged over the steps between two synchronisations."""
    series = of_member(state.curves, rank, name)
    return moving_average(series, _between_syncs(state.members[rank])) if name in PER_ROUND else series


def _between_syncs(member: MemberState) -> int:
    """Return the median number of steps between synchronisations; 1 where none are reported, or nearly every step
    exchanges something."""
    if sum(step.bytes_sent > 0 for step in member.window) > 0.6 * len(member.window):
        return 1
    steps = [sync.step for sync in member.recent_syncs]
    return max(1, round(statistics.median(map(operator.sub, steps[1:], steps)))) if len(steps) > 1 else 1


def moving_average(series: Series, steps: int) -> Series:
    """Return a series whose buckets are means over ``steps`` steps around them, within runs of adjacent buckets.

    Members that exchange every H steps wait in each H-th step alone; without the mean, only those waits would show.
    """
    around = steps // series.width
    if around < 2 or series.current is None:
        return series
    runs = itertools.groupby(enumerate(series.buckets), lambda pair: pair[1].number - pair[0])
    *closed, current = [bucket for _, run in runs for bucket in _averages([bucket for _, bucket in run], around)]
    return Series(series.width, tuple(closed), current, series.invalid)


def _averages(run: Sequence[SeriesBucket], around: int) -> Iterator[SeriesBucket]:
    totals = list(itertools.accumulate((bucket.total for bucket in run), initial=0.0))
    weights = list(itertools.accumulate((bucket.weight for bucket in run), initial=0.0))
    for index, bucket in enumerate(run):
        begin = index - around // 2
        start, stop = max(0, begin), min(len(run), begin + around)
        weight = weights[stop] - weights[start]
        mean = (totals[stop] - totals[start]) / weight if weight > 0 else bucket.mean
        yield bucket._replace(total=mean * bucket.weight)


def steps_away(ribbon: Ribbon, last_step: float) -> float:
    """Return for how many steps up to ``last_step`` a machine was away."""
    return sum(max(0.0, min(absence.until, last_step) - absence.start) for absence in ribbon.away)


def most_notable(candidates: Sequence[Ribbon], limit: int) -> list[Ribbon]:
    """Return at most ``limit`` ribbons in their order: those of machines that were away, then those whose share of
    waiting differs most from the median."""
    waited = {ribbon.rank: wait_of(ribbon.waits) for ribbon in candidates}
    known_shares = sorted(share for share in waited.values() if share is not None)
    median = known_shares[len(known_shares) // 2] if known_shares else 0.0

    def worth(ribbon: Ribbon) -> tuple[object, ...]:
        share = waited[ribbon.rank]
        return (not ribbon.away, -abs((median if share is None else share) - median), ribbon.rank)

    chosen_ranks = {ribbon.rank for ribbon in sorted(candidates, key=worth)[: max(0, limit)]}
    return [ribbon for ribbon in candidates if ribbon.rank in chosen_ranks]


def wait_of(waits: Series) -> float | None:
    """Return the share of waiting in a machine's whole time; ``None``: it took no step."""
    weight = sum(bucket.weight for bucket in waits.buckets)
    return sum(bucket.total for bucket in waits.buckets) / weight if weight > 0 else None


def shares(waits: Series, left: float, right: float, cells: int) -> list[float | None]:
    """Return the share of waiting for each of ``cells`` cells between two steps; ``None`` where no step was taken.

    The cell of a step is that of a curve above: ``(step - left) / (right - left) * cells``, rounded down.
    """
    sums, weights = [0.0] * cells, [0.0] * cells
    right = right if right > left else left + 1  # the run has a single step
    scale = cells / (right - left)
    end = -1
    for bucket in waits.buckets:
        begin, after = bucket.number * waits.width, (bucket.number + 1) * waits.width
        if after <= left or begin > right:
            continue
        start = min(cells - 1, max(0, int((begin - left) * scale)))
        if 0 <= end < start and (start - end) <= _GAP * max(1.0, waits.width * scale):
            _fill(sums, weights, end, start)
        end = min(cells - 1, max(start, math.ceil((after - left) * scale) - 1))
        for cell in range(start, end + 1):
            sums[cell] += bucket.total
            weights[cell] += bucket.weight
    return [sums[n] / weights[n] if weights[n] > 0 else None for n in range(cells)]


def _fill(sums: list[float], weights: list[float], end: int, start: int) -> None:
    """Fill the cells between two that have values with the first one's."""
    for cell in range(end + 1, start):
        sums[cell], weights[cell] = sums[end], weights[end]
