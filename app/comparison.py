"""Comparison of strategies by runs of one job with several seeds each. Pure: events in, figures out.

All runs are compared after the same number of samples that the group has seen; losses between two points of a curve are
interpolated linearly. Times are predicted: the number of steps is the runs' own, and the planner's cost model gives the
time of a step for equal machines with equal links, which compute as fast as the members did here.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from app.run_view.run_series import OF_EXCHANGES, Curves, coarser, figures, of_run, with_figures
from distributed.planning.cost_model import LINE_SHARE
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.prediction import Predictor
from distributed.planning.simulated import choice_of, job_after
from profiles.errors import BadInput
from profiles.schema import Profile
from training.records.events import EvaluationEvent, Event, RunEvent, StepEvent, SyncEvent
from training.strategies.costs import FEWEST_ROUNDS
from training.strategies.registry import cost_model
from training.strategies.user_strategy import sync_schedule_of

Curve = tuple[tuple[float, float], ...]
"""Samples that the group has seen, and the loss then; ascending in samples."""
AS_GOOD = 0.02
"""Relative excess over the lowest loss that still counts as good; the planner's bound is the same."""
_POINTS = 20
"""Points of a curve of training losses, which are averaged over steps because they are noisy."""
_MARKS = 100
"""Approximate maximum of points of an exchange series."""
_WARM_UP = 3
_FP32 = 4


@dataclass(frozen=True)
class SeedRun:
    """The figures of one run."""

    seed: int
    split: str
    """Split of the losses: ``validation``, another one, or ``training`` where nothing was evaluated."""
    curve: Curve
    steps: int
    samples: int
    sent: float
    """Bytes that a member sent in the whole run, mean of the members."""
    compute: float
    """Median seconds of a member's step without exchanges."""
    trainable: int
    """Trainable parameters; 0: unknown."""
    exchanges: Mapping[str, Curve] = field(default_factory=dict)
    """Series of the synchronisations over samples, of all members together, by name."""
    clock: float = 0.0
    """Simulated seconds; 0: the machines were real."""


@dataclass(frozen=True)
class StrategyTimes:
    """Times for one rate of the links: predicted, or of the simulated clock."""

    mbit: float
    """Line rate of each link; 0: the links of the simulated machines."""
    step: float
    """Seconds of a step."""
    to_end: float
    to_loss: float | None = None
    """Seconds to the loss that all good strategies reach; ``None``: it was not reached."""


@dataclass(frozen=True)
class StrategyResult:
    """One strategy with its runs, and the figures that :func:`rank_strategies` adds."""

    strategy: str
    profile: Profile | None = None
    """Profile of its runs; ``None`` where it was refused before."""
    runs: tuple[SeedRun, ...] = ()
    refused: str = ""
    """Reason why it did not run; empty if it did."""
    losses: tuple[float, ...] = ()
    """By seed, after the samples that every run has seen."""
    curve: Curve = ()
    """The mean over the seeds."""
    sent: float = 0.0
    interval: int = 1
    """Steps between exchanges."""
    memory: int | None = None
    """Bytes of a member's state for the strategy, without the optimizer; ``None``: unknown."""
    times: tuple[StrategyTimes, ...] = ()
    unpredicted: str = ""
    """Reason why there are no times."""

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    def exchanged(self, name: str) -> Curve:
        """Return the mean over the seeds of an exchange series; empty where it was not reported."""
        curves = [run.exchanges[name] for run in self.runs if name in run.exchanges]
        return mean_curve(curves) if curves else ()

    @property
    def rounds(self) -> int:
        """Exchanges in the shortest run, without the final one."""
        return min(run.steps for run in self.runs) // self.interval

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; ``None`` for a single seed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 and math.isfinite(self.loss) else None


@dataclass(frozen=True)
class StrategyComparison:
    """All strategies, compared."""

    rows: tuple[StrategyResult, ...]
    split: str = ""
    samples: float = 0.0
    """Samples after which the losses were compared."""
    target: float | None = None
    """The loss to which times are given."""
    best: str = ""
    """Name of the strategy that ends soonest on the slowest links, among those with enough exchanges and a good
    loss."""
    compute: float = 0.0
    """Seconds of compute in a step, of the machines that times are predicted for."""


@dataclass
class _RunCounters:
    """Counters over the events of a run."""

    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    losses: dict[int, list[StepEvent]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int | None, int] = field(default_factory=lambda: defaultdict(int))
    evaluations: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    trainable: int = 0
    exchanges: Mapping[int, Curves] = field(default_factory=dict)
    clock: float = 0.0


def read_run(seed: int, events: Iterable[Event]) -> SeedRun | None:
    """Return the figures of a whole run from its events; ``None`` where it took no step."""
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
    """Return a loss that can be ordered: infinite where it is missing or not finite."""
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _training_curve(taken: _RunCounters) -> dict[int, float]:
    """Return the mean training loss of all members over windows of steps, by each window's last step."""
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
    """Return the loss after so many samples, interpolated; beyond the ends, that of the nearest point."""
    places = [x for x, _ in curve]
    index = bisect_left(places, samples)
    if index == 0 or index == len(curve):
        return curve[min(index, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 + (y1 - y0) * (samples - x0) / (x1 - x0) if y0 < math.inf else y1


def samples_until(curve: Curve, loss: float) -> float | None:
    """Return the samples after which a curve first reaches a loss; ``None``: never."""
    if curve and curve[0][1] <= loss:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= loss:
            return x0 + (x1 - x0) * ((y0 - loss) / (y0 - y1) if math.isfinite(y0) else 1.0)
    return None


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves over the range that all of them cover."""
    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = sorted({x for curve in curves for x, _ in curve if start <= x <= end})
    return tuple((x, statistics.fmean(loss_at(curve, x) for curve in curves)) for x in places)


# ------------------------------------------------------------------------------------------------------------ the table


def rank_strategies(
    results: Sequence[StrategyResult], members: int, links: Sequence[float], cores: float = 0.0
) -> StrategyComparison:
    """Compare strategies and choose the best.

    Args:
        links: rates of lines in Mbit/s, to predict times for.
        cores: processor cores of a machine; 0: unknown.
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
    """Return the rows with a good loss: within :data:`AS_GOOD` of the lowest, or within the spread of its seeds."""
    lowest = min(rows, key=lambda row: row.loss)
    bound = lowest.loss + max(AS_GOOD * abs(lowest.loss), lowest.spread or 0.0)
    return [row for row in rows if row.loss <= bound]


def _order(row: StrategyResult) -> tuple[float, ...]:
    """Return the sort key: by time on the slowest links; rows without times last, by loss."""
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
    """Seconds of compute in a step of each."""
    cores: float = 0.0

    def cluster(self, batch: int, mbit: float) -> Cluster:
        """Return them as the planner's cluster.

        Args:
            batch: samples of one member's step, in a single forward pass.
            mbit: line rate of a link, and of a machine's interface.
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
    """Return the predicted seconds of a step.

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
