"""A run compared with its plan's prediction: time, samples, and the reasons of a shortfall. Pure.

Reasons come from recorded figures alone: machines that were away, work that took longer than predicted.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from app.run_view.figures import waiting_text
from app.run_view.member_state import TROUBLE
from app.run_view.pair_paths import pairs
from app.run_view.ribbon import Ribbon, ribbons, steps_away
from app.run_view.run_series import Point, coarser, of_member
from app.run_view.run_state import RunState
from distributed.planning.documents.document import Candidate, Planning
from distributed.planning.feedback import PredictionComparison
from distributed.planning.run_time import FIXED_STEPS, SLOWER_BELOW, RunTime, promised_time, took_text
from profiles.errors import counted
from profiles.quantities import duration_text, machine_text, share_text, time_text

MET_FROM = 0.95
"""Share of the predicted speed from which a plan counts as met."""
_MIN_EXPLAINED = 0.2
"""Share of the shortfall that a reason must explain to be reported."""
_LEAST_LATE = 5.0
"""Seconds below which a run is not called late."""


@dataclass(frozen=True)
class PlanPrediction:
    """What the planner predicted for the candidate plan that a run follows."""

    candidate: Candidate
    time: RunTime
    run_samples: float = math.inf
    """Samples of all passes over the data; infinite: the run has a fixed number of steps."""

    @property
    def rate(self) -> float:
        """Samples/s of all machines."""
        return self.candidate.samples_per_second

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.candidate.step

    @property
    def step_samples(self) -> float:
        """Samples of a step, on average: the last step of a pass over the data may have fewer than the others."""
        return min(self.rate * self.step, self.run_samples / max(1, self.candidate.steps))

    @property
    def figures(self) -> Mapping[str, float]:
        """Predicted values by the names of a run's series."""
        return {"samples/s": self.rate, "step time": self.step}

    def share(self, state: RunState, now: float) -> float:
        """Return the share of the promised time that has passed at ``now``, 0 to 1."""
        return min(1.0, state.seconds(now) / self.time.seconds)


def plan_prediction(planning: Planning | None) -> PlanPrediction | None:
    """Return the prediction of a plan's best candidate; ``None`` where it has none."""
    best = planning.best if planning else None
    time = promised_time(planning)
    if (
        planning is None
        or best is None
        or time is None
        or not time.seconds
        or not best.predicted
        or best.samples_per_second <= 0
    ):
        return None
    return PlanPrediction(best, time, math.inf if planning.job.steps else planning.job.samples)


# ------------------------------------------------------------------------------------------------------ the actual pace


class PaceSegment(NamedTuple):
    """Consecutive steps of a run."""

    end: float
    """The last step."""
    steps: float
    seconds: float


@dataclass(frozen=True)
class Pace:
    """Training time over the steps, without evaluations, snapshots and the time between attempts."""

    samples: float
    ends: tuple[float, ...]
    """Last step of each segment; the first value is the step before the first segment."""
    seconds: tuple[float, ...]
    """Training time up to each of ``ends``."""

    @property
    def rate(self) -> float:
        """Samples/s of all machines."""
        return self.samples / self.seconds[-1]

    @property
    def steps(self) -> float:
        return self.ends[-1] - self.ends[0]

    def step_at(self, seconds: float) -> float:
        """Return the step that was reached after so many seconds of training, interpolated."""
        index = min(len(self.ends) - 1, max(1, bisect.bisect_left(self.seconds, seconds)))
        begin, end = self.seconds[index - 1], self.seconds[index]
        fraction = (seconds - begin) / (end - begin) if end > begin else 1.0
        return self.ends[index - 1] + fraction * (self.ends[index] - self.ends[index - 1])

    def segments(self) -> Iterator[PaceSegment]:
        """Yield the segments in order."""
        for (step, until), (next_step, next_until) in itertools.pairwise(zip(self.ends, self.seconds, strict=True)):
            yield PaceSegment(next_step, next_step - step, next_until - until)


def pace_of(state: RunState) -> Pace | None:
    """Return the pace of a run from the times of its steps; ``None`` where it took none.

    A segment lasts the time that the machines present spent on its steps, over their number: between two
    synchronisations all spend the same time computing or waiting, and uneven machines divide the steps among them.
    """
    series_by_rank = {
        rank: samples_series
        for rank in state.members
        if (samples_series := of_member(state.curves, rank, "samples/s")).current
    }
    width = max((series.width for series in series_by_rank.values()), default=1)
    shown = {rank: coarser(series, width).buckets for rank, series in series_by_rank.items()}
    spent: dict[int, float] = {}
    samples = 0.0
    for buckets in shown.values():
        for bucket in buckets:
            samples += bucket.total
            spent[bucket.number] = spent.get(bucket.number, 0.0) + bucket.weight
    numbers = sorted(spent)
    spans = {rank: (buckets[0].number, buckets[-1].number) for rank, buckets in shown.items()}
    durations = [
        spent[number] / n for number, n in zip(numbers, _members_present(state, spans, numbers, width), strict=True)
    ]
    seconds = tuple(itertools.accumulate(durations, initial=0.0))
    if seconds[-1] <= 0:
        return None
    newest = max(member.step for member in state.members.values())
    first_step, last_step = max(0, numbers[0] * width - 1), max(newest, numbers[-1] * width)
    ends = (first_step, *(min(last_step, (number + 1) * width - 1) for number in numbers))
    return Pace(samples, tuple(map(float, ends)), seconds)


def _members_present(
    state: RunState, spans: Mapping[int, tuple[int, int]], numbers: Sequence[int], width: int
) -> Iterator[int]:
    """Yield how many machines took part in each bucket, from their first and last buckets and their absences."""
    changes = [0] * (len(numbers) + 1)

    def note(low: float, high: float, change: int) -> None:
        begin, end = bisect.bisect_left(numbers, low), bisect.bisect_right(numbers, high)
        changes[begin] += change
        changes[max(begin, end)] -= change

    for ribbon in ribbons(state):
        if ribbon.rank in spans:
            first_bucket, last_bucket = spans[ribbon.rank]
            note(first_bucket, last_bucket, 1)
            for away in ribbon.away:  # without the buckets in which it left and came back
                begin, end = max(first_bucket, away.start // width + 1), min(last_bucket, (away.until - 1) // width)
                if begin <= end:
                    note(begin, end, -1)
    return (max(1, number) for number in itertools.accumulate(changes[:-1]))


def at_predicted_pace(points: Sequence[Point], pace: Pace, prediction: PlanPrediction) -> list[Point]:
    """Return a curve over the steps as it would be had each step taken the predicted time.

    A point moves to the step that the run had really reached at the predicted time of the point's own step: to the left
    in a run that is slower than predicted. Points beyond the training time so far are left out.
    """
    moments = [(point, (point.step - pace.ends[0]) * prediction.step) for point in points]
    reached = [(point, moment) for point, moment in moments if moment <= pace.seconds[-1]]
    return [point._replace(step=pace.step_at(moment)) for point, moment in reached]


# ---------------------------------------------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class PlanVsActual:
    """A completed run beside its promise; ``str`` gives the sentence that is shown.

    The promise is made once: it stays when machines are lost or join.
    """

    prediction: PlanPrediction
    seconds: float
    """Time that the run took."""
    samples: float
    """Samples that it saw, over those that were planned for as many steps."""
    reasons: tuple[str, ...] = ()
    """Why the plan was not met, by the recorded figures; the largest cause first."""
    slowdown_of_alone: float = 1.0
    """Measured over predicted compute of the machine that the run is compared with: alone it would be slower, too."""

    @property
    def shortfall(self) -> float:
        """Share by which the run was slower than promised, with the samples that it missed; at most 0 if it was not."""
        return 1 - min(1.0, self.prediction.time.seconds / self.seconds) * min(1.0, self.samples)

    @property
    def is_met(self) -> bool:
        return self.shortfall <= 1 - MET_FROM

    def __str__(self) -> str:
        time = self.prediction.time
        fewer = f" on {share_text(1 - self.samples)} fewer samples than planned" if self.samples < MET_FROM else ""
        why = "" if self.is_met else f": {'; '.join(self.reasons or ('no recorded figure tells why',))}"
        note = ""
        if time.alone and self.seconds > self.slowdown_of_alone * time.alone_seconds / SLOWER_BELOW:
            note = f"; {FIXED_STEPS if time.fixed_steps else f'train on {machine_text(time.alone)} alone next time'}"
        return f"{took_text(self.seconds, time)}{fewer}{why}{note}"


def lateness_text(state: RunState, took: float, doubt: float, promised: float, forecasts: Mapping[str, float]) -> str:
    """Return by how much a run that goes on will be later than promised, and why, as far as its figures tell:
    ``4:10 later than promised: pc computes 2.1 s a step, 0.9 s were predicted``; empty: it will not be.

    Args:
        took: estimated seconds of the whole run.
        doubt: uncertainty of that.
        promised: seconds that the plan promised; 0: nothing.
        forecasts: predicted seconds of compute in a step, by name.
    """
    late = took - promised
    if promised <= 0 or late <= max(doubt, _LEAST_LATE, (1 / MET_FROM - 1) * promised):
        return ""
    measured = {
        member.label: statistics.fmean(step.compute for step in member.window)
        for member in state.members.values()
        if member.active and member.window
    }
    slow = max(measured, key=lambda name: measured[name], default="")
    steps = {ribbon.rank: steps_away(ribbon, state.step) for ribbon in ribbons(state)}
    rank = max(steps, key=lambda rank: steps[rank], default=-1)
    why = ""
    if steps.get(rank, 0) >= 1:
        why = f": {machine_text(state.members[rank].label)} was away for {counted(round(steps[rank]), 'step')}"
    elif 0 < forecasts.get(slow, 0.0) < MET_FROM * measured.get(slow, 0.0):
        predicted = f"{time_text(forecasts[slow])} were predicted"
        why = f": {machine_text(slow)} computes {time_text(measured[slow])} a step, {predicted}"
    return f"{duration_text(late)} later than promised{why}"


def compare_with_plan(
    state: RunState, prediction: PlanPrediction | None, comparison: PredictionComparison | None = None
) -> PlanVsActual | None:
    """Return a completed run beside its promise.

    Args:
        comparison: predicted and measured steps, where the run was long enough to compare them.

    Returns:
        ``None`` where nothing was predicted, no step was taken, or the run is not completed.
    """
    pace = pace_of(state) if prediction and state.status == "completed" else None
    if prediction is None or pace is None or pace.steps <= 0:
        return None
    planned = pace.steps * prediction.step_samples
    members = comparison.members if comparison else ()
    slowdown = max(
        (m.measured / m.predicted for m in members if m.name == prediction.time.alone and m.predicted), default=1.0
    )
    result = PlanVsActual(prediction, state.seconds(0.0), pace.samples / planned, slowdown_of_alone=max(1.0, slowdown))
    return result if result.is_met else replace(result, reasons=tuple(_reasons(state, result, pace, comparison)))


def comparison_in(metrics: Mapping[str, Any]) -> PredictionComparison | None:
    """Return the comparison in ``metrics.json``; ``None``: there is none, or it is of another version."""
    written = metrics.get("prediction")
    if isinstance(written, dict):
        with contextlib.suppress(ValidationError):
            return PredictionComparison.model_validate(
                {k: v for k, v in written.items() if k in PredictionComparison.model_fields}
            )
    return None


def _reasons(state: RunState, result: PlanVsActual, pace: Pace, comparison: PredictionComparison | None) -> list[str]:
    """Return up to three reasons, each of which explains at least a fifth of the shortfall."""
    prediction = result.prediction
    typical = _typical_step_seconds(pace, prediction.candidate.choice.interval)
    reasons = [*_absence_costs(state, prediction, pace, typical), *_slow_start(pace, typical)]
    reasons += [*(_slower(state, comparison) if comparison else ()), *_gave_way(state, pace)]
    reasons += _beside_steps(result, pace)
    telling = sorted((reason for reason in reasons if reason[0] >= _MIN_EXPLAINED * result.shortfall), reverse=True)
    return [words for _, words in telling[:3]]


def _beside_steps(result: PlanVsActual, pace: Pace) -> Iterator[tuple[float, str]]:
    """Yield the share of the run that evaluations, snapshots and saving cost beyond the prediction, with a sentence."""
    measured, predicted = result.seconds - pace.seconds[-1], result.prediction.candidate.evaluating
    foreseen = f"{duration_text(predicted)} were predicted" if predicted else "none of it predicted"
    words = f"evaluations and saving took {duration_text(measured)}, {foreseen}"
    yield (measured - predicted) / result.seconds, words


def _absence_costs(
    state: RunState, prediction: PlanPrediction, pace: Pace, typical: float
) -> Iterator[tuple[float, str]]:
    """Yield the share of the run that each absence cost, with its sentence."""
    batches = {member.name: member.micro_batch for member in prediction.candidate.members}
    for ribbon in ribbons(state):
        away = steps_away(ribbon, pace.ends[-1])
        name = state.members[ribbon.rank].label
        share = batches[name] / sum(batches.values()) if name in batches else 1 / len(state.members)
        stalled = sum(_stalled_seconds(ribbon, pace, prediction.candidate.choice.interval, typical))
        if away >= 1 or stalled > 0:
            words = f"{machine_text(name)} was away for {round(away)} of {counted(round(pace.steps), 'step')}"
            longer = f", and those in which it was lost took {time_text(stalled)} longer" if stalled > typical else ""
            yield away / pace.steps * share + stalled / pace.seconds[-1], words + longer


def _stalled_seconds(ribbon: Ribbon, pace: Pace, interval: int, typical: float) -> Iterator[float]:
    """Yield the extra seconds of the steps up to the exchange in which a loss was noticed."""
    for lost_at in (absence.start for absence in ribbon.away if absence.status in TROUBLE):
        segments = [
            segment
            for segment in pace.segments()
            if lost_at < segment.end and segment.end - segment.steps < lost_at + interval
        ]
        yield max(0.0, sum(segment.seconds - segment.steps * typical for segment in segments))


def _gave_way(state: RunState, pace: Pace) -> Iterator[tuple[float, str]]:
    """Yield the share of the run in which each member rested for the owner of its machine, with a sentence."""
    for member in state.members.values():
        if (seconds := member.total.gave_way) > 0:
            words = f"{machine_text(member.label)} gave way to its owner for {duration_text(seconds)}"
            yield seconds / max(pace.seconds[-1], seconds), words


def _slow_start(pace: Pace, typical: float) -> Iterator[tuple[float, str]]:
    """Yield the share of the run that slow first steps cost, with its sentence."""
    steps, seconds = next(pace.segments())[1:]
    if len(pace.ends) > 2 and seconds > steps * typical:
        which = "the first step" if steps <= 1 else f"the first {steps:.0f} steps"
        later = "a later one" if steps <= 1 else "as many later ones"
        excess = (seconds - steps * typical) / pace.seconds[-1]
        yield excess, f"{which} took {time_text(seconds)}, {later} {time_text(steps * typical)}"


def _typical_step_seconds(pace: Pace, interval: int) -> float:
    """Return the median seconds of a step over whole sync intervals, so with its part of an exchange."""
    segments = list(pace.segments())
    several = max(1, round(interval / (pace.steps / len(segments))))
    rounds = [segments[start : start + several] for start in range(0, len(segments) - several + 1, several)] or [
        segments
    ]
    return statistics.median(
        sum(segment.seconds for segment in chunk) / sum(segment.steps for segment in chunk) for chunk in rounds
    )


def _slower(state: RunState, comparison: PredictionComparison) -> Iterator[tuple[float, str]]:
    """Yield the share of a step by which computing, and exchanges, exceeded their predictions, with sentences."""
    slow = max(comparison.members, key=lambda member: member.measured, default=None)
    wall = max(comparison.measured_step, 1e-9)
    if slow is not None and slow.measured > slow.predicted:
        excess = slow.measured - max(member.predicted for member in comparison.members)
        name, measured, predicted = machine_text(slow.name), time_text(slow.measured), time_text(slow.predicted)
        words = f"{name} computed {measured} a step, {predicted} were predicted"
        yield excess / wall, words
    if (state.waiting_share or 0.0) <= comparison.predicted_share:
        return
    excess = comparison.measured_wait - comparison.predicted_wait
    words = f"{waiting_text(state)}, {share_text(comparison.predicted_share)} was predicted"
    relayed = [(rank, peer) for rank, peer, *routes in pairs(state.members)
               if any(route is not None and route.how == "relayed" for route in routes)]  # fmt: skip
    names = [" - ".join(state.members[rank].label for rank in pair) for pair in relayed[:2]]
    through = f" ({', '.join(names)} through the relay)" if names else ""
    yield excess / wall, f"{words}{through}"
