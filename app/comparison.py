"""Strategies side by side: what runs of one job, each with several seeds, say of them. Pure: events in, figures out.

All are compared after the same number of samples, which the group of members has seen together. Between two points of a
curve the loss is a straight line. Times are predicted: the steps are those of the runs, and the planner's cost model
says what a step takes with equal links between equal machines, which compute as fast as the members did here.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from app.run_series import OF_EXCHANGES, Curves, coarser, figures, of_run, with_figures
from distributed.planning.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.cost_model import LINE_SHARE
from distributed.planning.prediction import Predictor
from distributed.planning.simulated import choice_of, job_after
from profiles.errors import BadInput
from profiles.schema import Profile
from training.events import EvaluationEvent, Event, RunEvent, StepEvent, SyncEvent
from training.strategies.costs import FEWEST_ROUNDS
from training.strategies.registry import cost_model
from training.strategies.user_strategy import sync_schedule_of

Curve = tuple[tuple[float, float], ...]
"""Samples that the group has seen, and the loss then; ascending."""
AS_GOOD = 0.02
"""A loss this much higher than the lowest, as a share, counts as good: the bound that the planner has too."""
_POINTS = 20
"""Of a curve of training losses, which differ from step to step."""
_MARKS = 100
"""At most about so many, of a series."""
_WARM_UP = 3
_FP32 = 4


@dataclass(frozen=True)
class SeedRun:
    """What one run says."""

    seed: int
    split: str
    """What the loss was measured on: ``validation``, another split, or ``training`` where nothing is evaluated."""
    curve: Curve
    steps: int
    samples: int
    sent: float
    """Bytes that a member sent in all its steps, on average."""
    compute: float
    """Seconds of a member's step without exchanges: the median."""
    trainable: int
    """Parameters; 0: the run did not say."""
    exchanges: Mapping[str, Curve] = field(default_factory=dict)
    """What synchronisations told over the samples, by the name of the series: of all members together."""
    clock: float = 0.0
    """Seconds on the machines that were simulated; 0: their time was not."""


@dataclass(frozen=True)
class StrategyTimes:
    """What was predicted for one rate of the links, or told by the runs' own clock."""

    mbit: float
    """Rate of each link's line; 0: those of the machines that were simulated."""
    step: float
    """Seconds of a step."""
    to_end: float
    to_loss: float | None = None
    """Until the loss that all good strategies reach; ``None``: it was not reached."""


@dataclass(frozen=True)
class StrategyResult:
    """One strategy and what came of its runs, with what :func:`rank_strategies` makes of them."""

    strategy: str
    profile: Profile | None = None
    """With which it ran; ``None`` where it was refused before."""
    runs: tuple[SeedRun, ...] = ()
    refused: str = ""
    """Why there is nothing to show."""
    losses: tuple[float, ...] = ()
    """By seed, after as many samples as every run has seen."""
    curve: Curve = ()
    """The mean over the seeds."""
    sent: float = 0.0
    interval: int = 1
    """Steps between exchanges."""
    memory: int | None = None
    """Bytes that a member keeps for the strategy beside the optimizer; ``None``: not known."""
    times: tuple[StrategyTimes, ...] = ()
    unpredicted: str = ""
    """Why there are no times."""

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    def exchanged(self, name: str) -> Curve:
        """Return the mean over the seeds of what synchronisations told; nothing where they did not tell it."""
        curves = [run.exchanges[name] for run in self.runs if name in run.exchanges]
        return mean_curve(curves) if curves else ()

    @property
    def rounds(self) -> int:
        """How often members exchanged in the shortest run, what ends it left aside."""
        return min(run.steps for run in self.runs) // self.interval

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; ``None`` of a single one."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 and math.isfinite(self.loss) else None


@dataclass(frozen=True)
class StrategyComparison:
    """All strategies."""

    rows: tuple[StrategyResult, ...]
    split: str = ""
    samples: float = 0.0
    """After which the losses were compared."""
    target: float | None = None
    """The loss to which times are given."""
    best: str = ""
    """Of those that exchanged often enough and have about the lowest loss, the one that ends soonest on the slowest
    links."""
    compute: float = 0.0
    """Seconds of a step of one of the machines that times are predicted for."""


@dataclass
class _RunCounters:
    """What is counted over the events of a run."""

    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    losses: dict[int, list[StepEvent]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int | None, int] = field(default_factory=lambda: defaultdict(int))
    evaluations: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    trainable: int = 0
    exchanges: Mapping[int, Curves] = field(default_factory=dict)
    clock: float = 0.0


def read_run(seed: int, events: Iterable[Event]) -> SeedRun | None:
    """Return what the events of a whole run say; ``None`` where it took no step."""
    taken = _RunCounters()
    for event in events:
        if isinstance(event, StepEvent):
            taken.samples[event.step] += event.samples
            taken.losses[event.step].append(event)
            taken.sent[event.member] += event.bytes_sent
            taken.clock = max(taken.clock, event.clock or 0.0)
        elif isinstance(event, EvaluationEvent):
            taken.evaluations[event.split][event.step] = _orderable_loss(event.loss)
        elif isinstance(event, SyncEvent):
            exchange_figures = (figure for figure in figures(event, event.step) if figure.name in OF_EXCHANGES)
            taken.exchanges = with_figures(taken.exchanges, event.member or 0, exchange_figures)
        elif isinstance(event, RunEvent):
            taken.trainable = int(event.details.get("trainable") or taken.trainable)
    if not taken.losses:
        return None
    seen, total = {0: 0}, 0
    for step in sorted(taken.samples):
        total += taken.samples[step]
        seen[step] = total
    finite_losses = {split: losses for split, losses in taken.evaluations.items() if min(losses.values()) < math.inf}
    split = "validation" if "validation" in finite_losses else min(finite_losses, default="")
    curve = {step: loss for step, loss in finite_losses.get(split, {}).items() if step in seen}
    if not any(curve):  # nothing was evaluated after the first step
        split, curve = "training", _training_curve(taken)
    late = [step_event.compute for step in taken.losses for step_event in taken.losses[step] if step > _WARM_UP]
    return SeedRun(
        seed=seed,
        split=split,
        curve=tuple((seen[step], curve[step]) for step in sorted(curve)),
        steps=max(taken.losses),
        samples=total,
        sent=statistics.fmean(taken.sent.values()),
        compute=statistics.median(
            late or [step_event.compute for step_events in taken.losses.values() for step_event in step_events]
        ),
        trainable=taken.trainable,
        exchanges=_exchanges(taken, total),
        clock=taken.clock,
    )


def _exchanges(taken: _RunCounters, samples: int) -> dict[str, Curve]:
    steps = max(taken.losses)
    width = 1 << (steps // _MARKS).bit_length()
    series_by_name = {name: of_run(taken.exchanges, name) for name in OF_EXCHANGES}
    return {
        name: tuple((samples * min(1.0, point.step / steps), point.mean) for point in coarser(series, width).points())
        for name, series in series_by_name.items()
        if series.count
    }


def _orderable_loss(loss: float | None) -> float:
    """Return a loss that can be ordered: one that is not a number is beyond all others."""
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _training_curve(taken: _RunCounters) -> dict[int, float]:
    """Return the mean loss of all members over some steps, by the last of them."""
    steps = sorted(taken.losses)
    width = max(1, len(steps) // _POINTS)
    mean_losses = {}
    for begin in range(0, len(steps), width):
        window = steps[begin : begin + width]
        events = [event for step in window for event in taken.losses[step]]
        weight = sum(event.weight for event in events)
        mean_losses[window[-1]] = _orderable_loss(
            sum(event.loss * event.weight for event in events) / weight if weight else events[-1].loss
        )
    return mean_losses


# --------------------------------------------------------------------------------------------------------------- curves


def loss_at(curve: Curve, samples: float) -> float:
    """Return the loss after so many samples; the first or last one beyond the ends."""
    places = [x for x, _ in curve]
    index = bisect_left(places, samples)
    if index == 0 or index == len(curve):
        return curve[min(index, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 + (y1 - y0) * (samples - x0) / (x1 - x0) if y0 < math.inf else y1


def samples_until(curve: Curve, loss: float) -> float | None:
    """Return after how many samples a curve first comes down to a loss; ``None``: never."""
    if curve and curve[0][1] <= loss:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= loss:
            return x0 + (x1 - x0) * ((y0 - loss) / (y0 - y1) if math.isfinite(y0) else 1.0)
    return None


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves where all of them are known."""
    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if start <= x <= end})
    return tuple((x, statistics.fmean(loss_at(curve, x) for curve in curves)) for x in places)


# ------------------------------------------------------------------------------------------------------------ the table


def rank_strategies(
    results: Sequence[StrategyResult], members: int, links: Sequence[float], cores: float = 0.0
) -> StrategyComparison:
    """Put strategies side by side.

    Args:
        links: rates of lines in Mbit/s, to predict times for.
        cores: of a machine; 0: unknown.
    """
    runs = [run for result in results for run in result.runs]
    if not runs:
        return StrategyComparison(tuple(results))
    samples = min(run.curve[-1][0] for run in runs)
    compute = statistics.median(run.compute for run in runs)
    rows = [_row(result, samples) for result in results]
    shown = [row for row in rows if row.losses]
    good = _good([row for row in shown if row.rounds >= FEWEST_ROUNDS] or shown)
    target = max(row.loss for row in good)
    machines = EqualMachines(members, compute, cores)
    timed = tuple(_timed(row, machines, links, target) for row in rows)
    names = {row.strategy for row in good}
    best = min((row for row in timed if row.strategy in names), key=_order)
    return StrategyComparison(timed, runs[0].split, samples, target, best.strategy, compute)


def _row(result: StrategyResult, samples: float) -> StrategyResult:
    if result.profile is None or not result.runs:
        return result
    costs, trainable = cost_model(result.strategy, result.profile.strategy), result.runs[0].trainable
    return replace(
        result,
        losses=tuple(loss_at(run.curve, samples) for run in result.runs),
        curve=mean_curve([run.curve for run in result.runs]),
        sent=statistics.fmean(run.sent for run in result.runs),
        interval=sync_schedule_of(result.profile.strategy).interval,
        memory=costs.vectors * _FP32 * trainable if costs is not None and trainable else None,
    )


def _good(rows: Sequence[StrategyResult]) -> list[StrategyResult]:
    """Return those whose loss is about as low as the lowest: within the bound, or within what its seeds differ."""
    lowest = min(rows, key=lambda row: row.loss)
    bound = lowest.loss + max(AS_GOOD * abs(lowest.loss), lowest.spread or 0.0)
    return [row for row in rows if row.loss <= bound]


def _order(row: StrategyResult) -> tuple[float, ...]:
    """The soonest on the slowest links first; where no time is known, the one with the lowest loss, last."""
    if not row.times:
        return (1, row.loss, row.sent)
    slowest = min(row.times, key=lambda times: times.mbit)
    return (0, slowest.to_end, row.loss)


# ---------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class EqualMachines:
    """Equal machines, all connected with each other."""

    count: int
    compute: float
    """Seconds of a step of each."""
    cores: float = 0.0

    def cluster(self, batch: int, mbit: float) -> Cluster:
        """Return them as the planner's figures.

        Args:
            batch: samples of one member's forward pass, in one of which a step consists.
            mbit: rate of a link's line, which is that of a machine's interface too.
        """
        names = [f"machine-{number}" for number in range(1, self.count + 1)]
        measured = (Measurement(batch=batch, seconds=max(self.compute, 1e-9)),)
        rate = mbit * LINE_SHARE
        links = (
            Link(source=source, target=target, mbit=rate, mbit_back=rate, medium="ethernet")
            for source, target in combinations(names, 2)
        )
        machines = (ClusterMachine(name=name, measurements=measured, cores=self.cores) for name in names)
        return Cluster(machines=tuple(machines), links=tuple(links), here=names[0])


def step_seconds(profile: Profile, run: SeedRun, machines: EqualMachines, mbit: float) -> float:
    """Return what a step should take.

    Raises:
        BadInput: it cannot be predicted.
    """
    if not run.trainable:
        raise BadInput("the run did not say how many parameters it trains", "run it again")
    job = job_after(profile, run.trainable, run.steps, run.samples)
    cluster = machines.cluster(job.batch * job.accumulation, mbit)
    names = tuple(machine.name for machine in cluster.machines)
    return Predictor(cluster, job).predict(choice_of(profile, names)).step


def _timed(row: StrategyResult, machines: EqualMachines, links: Sequence[float], target: float) -> StrategyResult:
    if row.profile is None or not row.losses:
        return row
    run = row.runs[0]
    reached = samples_until(row.curve, target)
    share = None if reached is None else reached / run.samples
    try:
        steps = [(mbit, step_seconds(row.profile, run, machines, mbit)) for mbit in ([] if run.clock else links)]
    except BadInput as error:
        return replace(row, unpredicted=error.message)
    if run.clock:
        steps = [(0.0, run.clock / run.steps)]
    times = tuple(
        StrategyTimes(mbit, step, run.steps * step, None if share is None else share * run.steps * step)
        for mbit, step in steps
    )
    return replace(row, times=times)
