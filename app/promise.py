"""What the planner promised of a run, and how far it was kept: in samples/s, time, and why not. Pure.

Why says what was recorded: who was away, what took longer than predicted. What no figure tells is not said.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from app.member_state import TROUBLE
from app.pair_paths import pairs
from app.ribbon import Ribbon, ribbons, steps_away
from app.run_series import Point, coarser, of_member
from app.run_state import RunState
from distributed.planning.document import Candidate, Planning
from distributed.planning.feedback import PredictionComparison
from distributed.planning.run_time import FIXED_STEPS, best_single
from profiles.errors import counted
from profiles.quantities import duration_text, time_text

KEPT = 0.95
"""Share of the promise from which on nothing has to be explained."""
SLOWER = 0.97
"""Times as fast as one machine alone, below which that machine would be better: rates are known to some per cent."""
_TELLING = 0.2
"""Share of what is missing that a reason has to explain, so that it is told."""


@dataclass(frozen=True)
class Alone:
    """What one machine alone would do, as the planner predicted it."""

    name: str
    samples_per_second: float
    seconds: float = 0.0
    """Of its whole run; 0: not known."""
    steps: int = 0
    """Of its whole run."""
    fixed_steps: bool = False
    """Whether the group takes as many steps: then it sees more samples, and does not end sooner."""

    def end(self, state: RunState) -> float | None:
        """Return when it would be done, if it had begun when the run did; ``None``: that is not known."""
        began = _beginning(state)
        if began is None or not state.total_steps or self.seconds <= 0:
            return None
        return began[0] + max(0.0, 1 - began[1] / state.total_steps) * self.seconds

    def seconds_of(self, pace: Pace) -> float:
        """Return how long it would have trained for what a run has done."""
        if self.fixed_steps and self.steps:
            return self.seconds * pace.steps / self.steps
        return pace.samples / self.samples_per_second if self.samples_per_second > 0 else 0.0


def _beginning(state: RunState) -> tuple[float, int] | None:
    """Return the moment of the first step since the newest start, and how many steps were done before."""
    return min((member.began for member in state.members.values() if member.began), default=None)


def best_alone(planning: Planning | None) -> Alone | None:
    """Return the best single machine as it was predicted; ``None`` where nothing was."""
    best = best_single(planning.ranking) if planning else None
    if planning is None or best is None:
        return None
    fixed = planning.job.steps > 0
    return Alone(best.choice.members[0], best.samples_per_second, best.steps * best.step, best.steps, fixed)


@dataclass(frozen=True)
class Promise:
    """What was predicted for the way that a run takes."""

    candidate: Candidate
    alone: Alone | None
    """The best single machine; ``None`` where one machine trains, or none was predicted."""

    @property
    def rate(self) -> float:
        """Samples/s of all machines."""
        return self.candidate.samples_per_second

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.candidate.step

    @property
    def figures(self) -> Mapping[str, float]:
        """What was predicted of the series of a run, by their names."""
        return {"samples/s": self.rate, "step time": self.step}

    def end(self, state: RunState) -> float | None:
        """Return when the run should be done, counted from its first step since its newest start."""
        began = _beginning(state)
        if began is None or state.total_steps is None:
            return None
        return began[0] + max(0, state.total_steps - began[1]) * self.step

    def share(self, state: RunState, now: float) -> float | None:
        """Return how much of the run should be done at this moment, 0 to 1."""
        end = self.end(state)
        if end is None or not state.total_steps:
            return None
        return min(1.0, max(0.0, 1 - (end - now) / self.step / state.total_steps))


def promise_of(planning: Planning | None) -> Promise | None:
    """Return what a plan promised; ``None`` where it predicted nothing."""
    best = planning.best if planning else None
    if best is None or not best.predicted or best.step <= 0 or best.samples_per_second <= 0:
        return None
    return Promise(best, None if best.choice.alone else best_alone(planning))


# ---------------------------------------------------------------------------------------------------------- what it was


class PacePiece(NamedTuple):
    """Some steps."""

    end: float
    """The last one."""
    steps: float
    seconds: float


@dataclass(frozen=True)
class Pace:
    """The time of training by steps: evaluations, snapshots and what lies between two attempts are not in it."""

    samples: float
    ends: tuple[float, ...]
    """Steps; the first one is where the time begins."""
    seconds: tuple[float, ...]
    """Until each of them."""

    @property
    def rate(self) -> float:
        """Samples/s of all machines."""
        return self.samples / self.seconds[-1]

    @property
    def steps(self) -> float:
        return self.ends[-1] - self.ends[0]

    def step_at(self, seconds: float) -> float:
        """Return which step was done after so many seconds."""
        index = min(len(self.ends) - 1, max(1, bisect.bisect_left(self.seconds, seconds)))
        begin, end = self.seconds[index - 1], self.seconds[index]
        fraction = (seconds - begin) / (end - begin) if end > begin else 1.0
        return self.ends[index - 1] + fraction * (self.ends[index] - self.ends[index - 1])

    def pieces(self) -> Iterator[PacePiece]:
        """Yield what the time is made of."""
        for (step, until), (next_step, next_until) in itertools.pairwise(zip(self.ends, self.seconds, strict=True)):
            yield PacePiece(next_step, next_step - step, next_until - until)


def pace_of(state: RunState) -> Pace | None:
    """Return how fast a run was, as the time of its steps tells; ``None`` where it took none.

    What the machines that took part spent on the steps of a piece, over their number: between two synchronisations all
    spend as long, whoever computes and whoever waits, and at their own pace they divide the steps among them.
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
            for away in ribbon.away:  # without the places in which it went and came
                begin, end = max(first_bucket, away.start // width + 1), min(last_bucket, (away.until - 1) // width)
                if begin <= end:
                    note(begin, end, -1)
    return (max(1, number) for number in itertools.accumulate(changes[:-1]))


def at_promised_pace(points: Sequence[Point], pace: Pace, promise: Promise) -> list[Point]:
    """Return where a curve over the steps would be if each step had taken as long as promised.

    A point stands at the step that the run really had reached when the promise would have had the point's own: left of
    it in a run that is slower than promised. What the run has not had the time for yet is left out.
    """
    moments = [(point, (point.step - pace.ends[0]) * promise.step) for point in points]
    reached = [(point, moment) for point, moment in moments if moment <= pace.seconds[-1]]
    return [point._replace(step=pace.step_at(moment)) for point, moment in reached]


# ----------------------------------------------------------------------------------------------------- whether it held


@dataclass(frozen=True)
class PromiseOutcome:
    """Promised, and got. ``str`` is the sentence."""

    promise: Promise
    pace: Pace
    why: tuple[str, ...] = ()
    """Where it was not kept: what the recorded figures tell, what explains most first."""

    @property
    def short(self) -> str:
        """``took 1:30 (1:24 promised; pc alone 1:50)``."""
        alone, name = self.alone_seconds, self.promise.alone.name if self.promise.alone else ""
        alone_text = f"; {name} alone {duration_text(alone)}" if alone else ""
        return f"took {duration_text(self.seconds)} ({duration_text(self.promised)} promised{alone_text})"

    @property
    def seconds(self) -> float:
        """Of training, as it was."""
        return self.pace.seconds[-1]

    @property
    def promised(self) -> float:
        """Seconds as promised for as many samples: a step without a lost machine has fewer."""
        return self.pace.samples / self.promise.rate

    @property
    def alone_seconds(self) -> float:
        """What the best machine alone would have taken; 0: not known, or it was that machine's run."""
        return self.promise.alone.seconds_of(self.pace) if self.promise.alone else 0.0

    @property
    def is_met(self) -> bool:
        return self.pace.rate >= KEPT * self.promise.rate

    def __str__(self) -> str:
        times = f"training took {duration_text(self.seconds)} ({duration_text(self.promised)} promised)"
        unknown = ("no recorded figure tells why",)
        why = "" if self.is_met else f": {'; '.join(self.why or unknown)}"
        return f"{times}{why}{self._alone_text()}"

    def _alone_text(self) -> str:
        """What the best machine alone would have taken, and what to do where that is less."""
        alone, alone_seconds = self.promise.alone, self.alone_seconds
        if alone is None or not alone_seconds:
            return ""
        text = f"; {alone.name} alone would have taken {duration_text(alone_seconds)}"
        if alone.fixed_steps:
            return f"{text} ({FIXED_STEPS})"
        return f"{text}: train on {alone.name} alone next time" if self.seconds > alone_seconds / SLOWER else text


def outcome(
    state: RunState, promise: Promise | None, comparison: PredictionComparison | None = None
) -> PromiseOutcome | None:
    """Return how far a promise was kept.

    Args:
        comparison: steps beside their prediction, where the run was long enough for that.

    Returns:
        ``None`` where nothing was promised, or no step was taken.
    """
    pace = pace_of(state) if promise else None
    if promise is None or pace is None or pace.steps <= 0:
        return None
    result = PromiseOutcome(promise, pace)
    return result if result.is_met else PromiseOutcome(promise, pace, tuple(_why(state, promise, pace, comparison)))


def comparison_in(metrics: Mapping[str, Any]) -> PredictionComparison | None:
    """Return the comparison that ``metrics.json`` holds; ``None``: there is none, or it is of another version."""
    written = metrics.get("prediction")
    if isinstance(written, dict):
        with contextlib.suppress(ValidationError):
            return PredictionComparison.model_validate(
                {k: v for k, v in written.items() if k in PredictionComparison.model_fields}
            )
    return None


def _why(state: RunState, promise: Promise, pace: Pace, comparison: PredictionComparison | None) -> list[str]:
    """Return what explains at least a fifth of what is missing."""
    missing = 1 - pace.rate / promise.rate
    typical = _typical_step_seconds(pace, promise.candidate.choice.interval)
    reasons = [*_losses(state, promise, pace, typical), *_first_steps(pace, typical)]
    reasons += _slower(state, comparison) if comparison else []
    telling = sorted((reason for reason in reasons if reason[0] >= _TELLING * missing), reverse=True)
    return [words for _, words in telling[:3]]


def _losses(state: RunState, promise: Promise, pace: Pace, typical: float) -> Iterator[tuple[float, str]]:
    """Yield how much of the run machines that were away have cost, and what is to be said of it."""
    batches = {member.name: member.micro_batch for member in promise.candidate.members}
    for ribbon in ribbons(state):
        away = steps_away(ribbon, pace.ends[-1])
        name = state.members[ribbon.rank].label
        share = batches[name] / sum(batches.values()) if name in batches else 1 / len(state.members)
        stalled = sum(_stood_still(ribbon, pace, promise.candidate.choice.interval, typical))
        if away >= 1 or stalled > 0:
            words = f"{name} was away for {round(away)} of {counted(round(pace.steps), 'step')}"
            waited = f", and the others waited {stalled:.1f} s for it" if stalled > typical else ""
            yield away / pace.steps * share + stalled / pace.seconds[-1], words + waited


def _stood_still(ribbon: Ribbon, pace: Pace, interval: int, typical: float) -> Iterator[float]:
    """Yield how much longer the steps took up to the exchange in which a machine was found to be lost."""
    for lost_at in (absence.start for absence in ribbon.away if absence.status in TROUBLE):
        pieces = [
            piece for piece in pace.pieces() if lost_at < piece.end and piece.end - piece.steps < lost_at + interval
        ]
        yield max(0.0, sum(piece.seconds - piece.steps * typical for piece in pieces))


def _first_steps(pace: Pace, typical: float) -> Iterator[tuple[float, str]]:
    steps, seconds = next(pace.pieces())[1:]
    if len(pace.ends) > 2 and seconds > steps * typical:
        which = "the first step" if steps <= 1 else f"the first {steps:.0f} steps"
        later = "a later one" if steps <= 1 else "as many later ones"
        excess = (seconds - steps * typical) / pace.seconds[-1]
        yield excess, f"{which} took {seconds:.1f} s, {later} {steps * typical:.2g} s"


def _typical_step_seconds(pace: Pace, interval: int) -> float:
    """Return the seconds of a usual step, with its part of what an exchange costs."""
    pieces = list(pace.pieces())
    several = max(1, round(interval / (pace.steps / len(pieces))))
    rounds = [pieces[start : start + several] for start in range(0, len(pieces) - several + 1, several)] or [pieces]
    return statistics.median(
        sum(piece.seconds for piece in chunk) / sum(piece.steps for piece in chunk) for chunk in rounds
    )


def _slower(state: RunState, comparison: PredictionComparison) -> Iterator[tuple[float, str]]:
    """Yield what steps took longer than predicted: the slowest machine's computing, and exchanges."""
    slow = max(comparison.members, key=lambda member: member.measured, default=None)
    wall = max(comparison.measured_step, 1e-9)
    if slow is not None and slow.measured > slow.predicted:
        excess = slow.measured - max(member.predicted for member in comparison.members)
        words = f"{slow.name} computed {time_text(slow.measured)} a step, {time_text(slow.predicted)} were predicted"
        yield excess / wall, words
    excess = comparison.measured_wait - comparison.predicted_wait
    measured, predicted = time_text(comparison.measured_wait), time_text(comparison.predicted_wait)
    words = f"exchanges held all machines up for {measured} a step, {predicted} "
    relayed = [(rank, peer) for rank, peer, *routes in pairs(state.members)
               if any(route is not None and route.how == "relayed" for route in routes)]  # fmt: skip
    names = [" - ".join(state.members[rank].label for rank in pair) for pair in relayed[:2]]
    through = f" ({', '.join(names)} through the relay)" if names else ""
    yield excess / wall, f"{words}were predicted{through}"
