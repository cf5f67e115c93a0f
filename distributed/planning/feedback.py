"""Compares predictions with measurements, and corrects the next predictions for the same machines.

At the end of a run, :func:`prediction_metrics` compares and stores the result; the next plan uses :func:`corrections`.
Ratios are measured over predicted times, without the corrections that the prediction included.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Document, MeasurementCache, Name, Text
from distributed.planning.documents.corrections import Corrections, ExchangeCorrection, clamped, shrunk_mean
from distributed.planning.documents.document import Candidate, Choice, Figures, Job, MemberForecast, Planning
from profiles.errors import MusterError
from training.records.events import Event, MemberEvent, StepEvent
from training.records.run_folder import RunFolder
from training.strategies.registry import cost_model

PLANNING = "planning.json"
"""File of the planner's result in a run folder."""
FIGURES = "figures.json"
"""File of the figures that the plan was made from."""
HALF_LIFE = 30 * 24 * 3600.0
"""Seconds after which an observation counts half as much."""
MOST_OBSERVATIONS = 16
OTHER_MODEL_WEIGHT = 0.25
"""Weight of an observation with a model of another size: the errors of fixed costs and of costs per byte differ."""
_FEWEST_STEPS = 5
_WARM_UP_STEPS = 3
"""Steps of a run that are not compared: memory is still being allocated and caches are being filled."""
_SHORTEST_EXCHANGE = 1e-3
"""Seconds: the error of a shorter predicted exchange is not meaningful."""


class MemberComparison(Document):
    """One member's compute in seconds per step, with its work for exchanges."""

    name: Name
    predicted: float
    measured: float
    ratio: float
    """Measured over predicted without corrections."""


class PredictionComparison(Document):
    """A run compared with its prediction. Times in seconds per optimizer step."""

    choice: Choice
    trainable: int = 0
    steps: int
    """Number of compared steps, after the warm-up."""
    predicted_step: float
    measured_step: float
    """Time of the slowest member: the median over pairs of its steps; the mean if their samples or exchanges differ,
    over whole rounds if only some steps exchange."""
    predicted_wait: float
    measured_wait: float
    """Time of the member that waits least: the cost of the exchange, without that of slower members."""
    predicted_share: float
    measured_share: float
    """Share of the machines' time spent waiting for exchanges: the mean over them."""
    predicted_bytes_per_hour: float
    measured_bytes_per_hour: float
    """Traffic of the machine with the most."""
    exchange_ratio: float | None = None
    """Measured over predicted without corrections; ``None`` if the run does not show it."""
    members: tuple[MemberComparison, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted time of a step, with the corrections."""
        return self.measured_step / self.predicted_step

    def document(self) -> dict[str, Any]:
        """Return the entry in ``metrics.json``."""
        return {"ratio": round(self.ratio, 4), **self.model_dump(mode="json")}


# -------------------------------------------------------------------------------------------------------------- compare


def compare(candidate: Candidate, events: Iterable[Event], trainable: int = 0) -> PredictionComparison | None:
    """Compare a finished run with its prediction.

    Args:
        candidate: the prediction for this run.
        events: all events of the run, in any order; members are identified by their names if they have some, else by
            their ranks in the order of the choice.
        trainable: number of exchanged parameters.

    Returns:
        The comparison; ``None`` if the members of the choice have fewer than 5 steps (or one whole interval) after the
        warm-up in common, or do not wait for each other.
    """
    costs = cost_model(candidate.choice.strategy)
    if costs is not None and not costs.waits:
        return None
    (steps, names), choice = _by_rank(events), candidate.choice
    if choice.blocks:
        return _compare_stages(candidate, [steps[rank] for rank in sorted(steps)], trainable)
    ranks = _ranks(choice.members, steps, names)
    if ranks is None:
        return None
    counted_steps = _comparable_steps([steps[rank] for rank in ranks.values()], choice.interval)
    if not counted_steps:
        return None

    def by_member(typical: Callable[[Sequence[float]], float], value: Callable[[StepEvent], float]) -> dict[str, float]:
        return {n: typical([value(steps[rank][number]) for number in counted_steps]) for n, rank in ranks.items()}

    is_uneven = candidate.has_smaller_steps or (costs is not None and costs.uneven)
    typical = statistics.fmean if choice.interval > 1 or is_uneven else _median_of_pairs
    step_seconds = by_member(typical, lambda e: e.seconds)
    waits = by_member(typical, lambda e: e.wait)
    busy = by_member(typical, lambda e: e.compute - (e.gave_way or 0.0))
    moved = max(by_member(statistics.fmean, lambda e: e.bytes_sent + e.bytes_received).values())
    wall, wait = max(step_seconds.values()), min(waits.values())
    share = statistics.fmean(waits[name] / step_seconds[name] if step_seconds[name] else 0.0 for name in ranks)
    measured = _Measured(len(counted_steps), wall, wait, share, 0.0 if choice.alone else moved)
    predicted_wait = _predicted_wait(candidate)
    exchange_ratio = _exchange_ratio(candidate, predicted_wait - candidate.skew, wait - candidate.skew)
    ratios = [busy[member.name] / _busy(member) * member.correction for member in candidate.members]
    return measured.comparison(candidate, trainable, [busy[m.name] for m in candidate.members], ratios, exchange_ratio)


def _compare_stages(
    candidate: Candidate, members: Sequence[Mapping[int, StepEvent]], trainable: int
) -> PredictionComparison | None:
    """Compare a run whose members' models lie on several devices: each stage counts as a member of the choice.

    A stage waits for the others while it does not compute, so the wait is what the slowest one's compute leaves.
    """
    counted_steps = _comparable_steps(members, candidate.choice.interval) if members else []
    if not counted_steps:
        return None
    columns = [[*zip(*(member[step].stages for step in counted_steps))] for member in members]
    busy = [_median_of_pairs(seconds) for column in columns for seconds in column]
    if len(busy) != len(candidate.members):  # it was cut anew
        return None
    wall = max(_median_of_pairs([member[step].seconds for step in counted_steps]) for member in members)
    sent = max(member[step].bytes_sent + member[step].bytes_received for member in members for step in counted_steps)
    wait = max(0.0, wall - max(busy))
    measured = _Measured(len(counted_steps), wall, wait, wait / wall if wall else 0.0, sent)
    ratios = [seconds / _busy(member) for member, seconds in zip(candidate.members, busy)]
    return measured.comparison(candidate, trainable, busy, ratios)


class _Measured(NamedTuple):
    """A typical step of a run."""

    steps: int
    """Number of compared steps."""
    wall: float
    wait: float
    """Seconds."""
    waiting: float
    moved: float
    """Bytes of the machine with the most."""

    def comparison(
        self,
        candidate: Candidate,
        trainable: int,
        busy: Iterable[float],
        ratios: Iterable[float],
        exchange_ratio: float | None = None,
    ) -> PredictionComparison:
        """Return the comparison; ``busy`` and ``ratios`` in the order of the candidate's members."""
        predicted_wait, wall = _predicted_wait(candidate), self.wall
        return PredictionComparison(
            choice=candidate.choice,
            trainable=trainable,
            steps=self.steps,
            predicted_step=candidate.step,
            measured_step=wall,
            predicted_wait=predicted_wait,
            measured_wait=self.wait,
            predicted_share=candidate.waiting,
            measured_share=self.waiting,
            predicted_bytes_per_hour=candidate.bytes_per_hour,
            measured_bytes_per_hour=self.moved * 3600 / wall if wall else 0.0,
            exchange_ratio=exchange_ratio,
            members=tuple(
                MemberComparison(name=member.name, predicted=_busy(member), measured=seconds, ratio=ratio)
                for member, seconds, ratio in zip(candidate.members, busy, ratios)
            ),
        )


def _predicted_wait(candidate: Candidate) -> float:
    return max(0.0, candidate.step - max(map(_busy, candidate.members)))


def _busy(member: MemberForecast) -> float:
    """Return the seconds that a member works in a step; of a plan without prediction its compute."""
    return member.busy or member.seconds


def _by_rank(events: Iterable[Event]) -> tuple[dict[int, dict[int, StepEvent]], dict[str, int]]:
    """Return the steps of every rank (the later event of a repeated step), and the ranks by name."""
    steps: dict[int, dict[int, StepEvent]] = {}
    names: dict[str, int] = {}
    for event in events:
        if event.member is None:
            continue
        if isinstance(event, StepEvent):
            steps.setdefault(event.member, {})[event.step] = event
        elif isinstance(event, MemberEvent) and event.name:
            names[event.name] = event.member
    return steps, names


def _ranks(members: Sequence[str], steps: Mapping[int, object], names: Mapping[str, int]) -> dict[str, int] | None:
    """Return the rank of every member of the choice; ``None`` if the run had other members."""
    ranks = {name: names[name] for name in members if name in names}
    if not ranks and len(members) == len(steps):  # of events without names: in the order of the choice
        ranks = dict(zip(members, sorted(steps)))
    return ranks if len(ranks) == len(members) == len(steps) and set(ranks.values()) <= set(steps) else None


def _comparable_steps(steps: Sequence[Collection[int]], interval: int) -> list[int]:
    """Return the steps that all members took after the warm-up, in whole intervals; empty if they are too few.

    They end with the last exchange. The first interval is left out if there are several: it includes the start of the
    slowest member.
    """
    common = sorted(set.intersection(*map(set, steps)))
    if interval > 1:
        last_step = common[-1] // interval * interval if common else 0
        first_step = interval if last_step >= 2 * interval else 0
        counted_steps = [step for step in common if first_step < step <= last_step]
        return counted_steps if len(counted_steps) >= interval else []
    counted_steps = [step for step in common if step > _WARM_UP_STEPS]
    return counted_steps if len(counted_steps) >= _FEWEST_STEPS else []


def _median_of_pairs(values: Sequence[float]) -> float:
    """Return the median of the means of adjacent values: members that wait for each other alternate long and short
    steps, and a plain median would represent one kind only."""
    return statistics.median((earlier + later) / 2 for earlier, later in itertools.pairwise(values))


def _exchange_ratio(candidate: Candidate, predicted_wait: float, wait: float) -> float | None:
    """Return the measured over the predicted time of an exchange, as far as the wait shows it.

    The part that the prediction hides behind compute counts as hidden: ``(hidden + waited) / predicted``.
    """
    if candidate.choice.alone or candidate.exchange < _SHORTEST_EXCHANGE:
        return None
    interval = candidate.choice.interval
    hidden = max(0.0, candidate.exchange - predicted_wait * interval)
    ratio = (hidden + max(0.0, wait) * interval) / candidate.exchange
    return ratio * candidate.exchange_correction if ratio > 0 else None


# ------------------------------------------------------------------------------------------------------------- remember


class Observation(Document):
    """One ratio of measured to predicted time of one run."""

    at: float
    """Unix time."""
    trainable: int
    ratio: Annotated[float, Field(gt=0)]
    strategy: Text = ""
    engine: Text = ""
    """Strategy and engine empty: the ratio of compute."""


class History(Document):
    """Observations of one machine, the oldest first."""

    kind: Literal["predictions"] = "predictions"
    observations: Annotated[tuple[Observation, ...], Field(max_length=4 * MOST_OBSERVATIONS)] = ()


def remember(
    cluster: Cluster, comparison: PredictionComparison, cache: MeasurementCache | None = None, now: float | None = None
) -> None:
    """Store a comparison for the machines of the run.

    Args:
        cluster: identities of the machines, by the names of the choice.

    Raises:
        BadInput: the cache folder cannot be written.
    """
    cache, at = cache or MeasurementCache(), time.time() if now is None else now
    for member in comparison.members:
        key = _key(cluster.machine(member.name))
        history = cache.get(History, key) or History()
        cache.put(key, History(observations=_most_recent((*history.observations, *_observed(comparison, member, at)))))


def _observed(comparison: PredictionComparison, member: MemberComparison, at: float) -> Iterable[Observation]:
    size = comparison.trainable
    if member.ratio > 0:
        yield Observation(at=at, trainable=size, ratio=clamped(member.ratio))
    if comparison.exchange_ratio:
        choice = comparison.choice
        yield Observation(at=at, trainable=size, ratio=clamped(comparison.exchange_ratio),
                          strategy=choice.strategy, engine=choice.engine)  # fmt: skip


def _most_recent(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the latest observations of every kind, in all as many as a document may hold."""
    counts = Counter[tuple[str, str]]()
    recent = []
    for observation in reversed(observations):
        counts[observation.strategy, observation.engine] += 1
        if counts[observation.strategy, observation.engine] <= MOST_OBSERVATIONS:
            recent.append(observation)
    return tuple(reversed(recent[: 4 * MOST_OBSERVATIONS]))


def corrections(
    cluster: Cluster, job: Job, cache: MeasurementCache | None = None, now: float | None = None
) -> Corrections:
    """Return the corrections from earlier runs on these machines.

    Every factor is the geometric mean of the observations, shrunk towards 1, between 1/3 and 3; later runs and runs of
    a model of the same size have more weight.
    """
    cache, moment = cache or MeasurementCache(), time.time() if now is None else now
    compute: dict[str, float] = {}
    exchange: list[ExchangeCorrection] = []
    for machine in cluster.machines:
        history = cache.get(History, _key(machine)) or History()
        by_kind: dict[tuple[str, str], list[Observation]] = {}
        for observation in history.observations:
            by_kind.setdefault((observation.strategy, observation.engine), []).append(observation)
        for (strategy, engine), observations in by_kind.items():
            weights = [_weight(observation, job, moment) for observation in observations]
            factor = shrunk_mean([observation.ratio for observation in observations], weights)
            if not strategy and not engine:
                compute[machine.name] = factor
                continue
            exchange.append(ExchangeCorrection(machine=machine.name, strategy=strategy, engine=engine, factor=factor))
    return Corrections(compute=compute, exchange=tuple(exchange))


def _weight(observation: Observation, job: Job, now: float) -> float:
    age = max(0.0, now - observation.at)
    return float(0.5 ** (age / HALF_LIFE)) * (1.0 if observation.trainable == job.trainable else OTHER_MODEL_WEIGHT)


def _key(machine: ClusterMachine) -> dict[str, Any]:
    return {"machine": machine.host, "device": machine.device}


# ------------------------------------------------------------------------------------------------------ in a run folder


def write_planning(folder: Path, planning: Planning, figures: Figures | None) -> None:
    """Write a plan, and the figures that it was made from, into a run folder.

    Raises:
        BadInput: they cannot be written.
    """
    planning.write(folder / PLANNING)
    if figures is not None:
        figures.write(folder / FIGURES)


def planning_in(folder: Path) -> Planning | None:
    """Return the plan in a run folder; ``None``: there is none, or it cannot be read."""
    with contextlib.suppress(MusterError):
        return Planning.read(folder / PLANNING)
    return None


def prediction_metrics(folder: RunFolder, learn: bool = True) -> dict[str, Any]:
    """Return ``{"prediction": ...}`` for ``metrics.json``, and store the comparison for the next plan.

    Empty if there was no prediction, or the run was too short to compare.

    Args:
        learn: whether to store the comparison; ``False`` for simulated machines.
    """
    with contextlib.suppress(MusterError):  # a damaged document must not fail the end of a run
        planning = planning_in(folder.path)
        if planning is None or planning.best is None or not planning.best.predicted:
            return {}
        comparison = compare(planning.best, folder.events(), planning.job.trainable)
        if comparison is None:
            return {}
        if learn and not comparison.choice.blocks and (folder.path / FIGURES).is_file():  # blocks are always measured
            remember(Figures.read(folder.path / FIGURES).cluster, comparison)
        return {"prediction": comparison.document()}
    return {}
