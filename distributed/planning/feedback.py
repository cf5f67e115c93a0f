"""Predictions compared with measurements, and what the next prediction for these machines learns from that.

At the end of a run, :func:`prediction_metrics` compares and remembers; the next plan asks for :func:`corrections`.
Ratios are measured over predicted, freed of the corrections that the prediction had in it.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from distributed.planning.cluster import Cluster, ClusterMachine, Document, MeasurementCache, Name, Text
from distributed.planning.corrections import Corrections, ExchangeCorrection, bounded, shrunk
from distributed.planning.document import Candidate, Choice, Figures, Job, MemberForecast, Planning
from profiles.errors import MusterError
from training.events import Event, MemberEvent, StepEvent
from training.run_folder import RunFolder
from training.strategies.registry import cost_model

PLANNING = "planning.json"
"""What a run's plan was chosen from, where there was a choice."""
FIGURES = "figures.json"
"""What was measured for it."""
FORGET = 30 * 24 * 3600.0
"""Seconds after which a comparison counts half as much."""
MOST_OBSERVATIONS = 16
OTHER_MODEL = 0.25
"""What a comparison of a model of another size counts: fixed costs and costs of a byte are not off alike."""
_FEWEST_STEPS = 5
_WARM_UP = 3
"""Steps of a run that are left out: memory is still being claimed and caches are being filled."""
_NOTHING = 1e-3
"""Seconds: an exchange predicted shorter tells nothing by how far it was off."""


class MemberComparison(Document):
    """One member's compute, in seconds a step, with the work that exchanges take from it."""

    name: Name
    predicted: float
    measured: float
    ratio: float
    """Measured over predicted without corrections."""


class PredictionComparison(Document):
    """One run beside its prediction. Times in seconds of one optimizer step."""

    choice: Choice
    trainable: int = 0
    steps: int
    """Steps that were counted, after the warm-up."""
    predicted_step: float
    measured_step: float
    """Of the slowest member: the median of its steps, two by two; the mean where some steps exchange more than others,
    over whole rounds where only some exchange."""
    predicted_wait: float
    measured_wait: float
    """Of the member that waits least: what the exchange costs and not what the others take longer."""
    predicted_share: float
    measured_share: float
    """Of a step that is waited for exchanges."""
    predicted_bytes_per_hour: float
    measured_bytes_per_hour: float
    """Of the machine that moves most."""
    exchange_ratio: float | None = None
    """Measured over predicted without corrections; ``None`` where the run does not tell."""
    members: tuple[MemberComparison, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted time of a step, the corrections included."""
        return self.measured_step / self.predicted_step

    def document(self) -> dict[str, Any]:
        """Return it for ``metrics.json``."""
        return {"ratio": round(self.ratio, 4), **self.model_dump(mode="json")}


# -------------------------------------------------------------------------------------------------------------- compare


def compare(candidate: Candidate, events: Iterable[Event], trainable: int = 0) -> PredictionComparison | None:
    """Compare a finished run with its prediction.

    Args:
        candidate: what was predicted for exactly this run.
        events: of the whole run, in any order; members are known by the names they gave, else by their ranks in the
            order of the choice.
        trainable: parameters that an exchange carries.

    Returns:
        The comparison; ``None`` where fewer than 5 steps (or one whole interval) after the warm-up were taken by all
        members of the choice, or each goes at its own pace.
    """
    costs = cost_model(candidate.choice.strategy)
    if costs is not None and not costs.waits:
        return None
    steps, names = _by_rank(events)
    choice = candidate.choice
    ranks = _ranks(choice.members, steps, names)
    if ranks is None:
        return None
    counted = _counted([steps[rank] for rank in ranks], choice.interval)
    if not counted:
        return None

    def by_member(typical: Callable[[Sequence[float]], float], value: Callable[[StepEvent], float]) -> list[float]:
        return [typical([value(steps[rank][number]) for number in counted]) for rank in ranks]

    typical = statistics.fmean if choice.interval > 1 or (costs is not None and costs.uneven) else _usual
    walls = by_member(typical, lambda e: e.seconds)
    waits = by_member(typical, lambda e: e.wait)
    busy = by_member(typical, lambda e: e.compute)
    moved = max(by_member(statistics.fmean, lambda e: e.bytes_sent + e.bytes_received))
    wall, wait = max(walls), min(waits)
    predicted_wait = max(0.0, candidate.step - max(map(_busy, candidate.members)))
    return PredictionComparison(
        choice=choice,
        trainable=trainable,
        steps=len(counted),
        predicted_step=candidate.step,
        measured_step=wall,
        predicted_wait=predicted_wait,
        measured_wait=wait,
        predicted_share=predicted_wait / candidate.step,
        measured_share=wait / wall if wall else 0.0,
        predicted_bytes_per_hour=candidate.bytes_per_hour,
        measured_bytes_per_hour=0.0 if choice.alone else moved * 3600 / wall,
        exchange_ratio=_exchange_ratio(candidate, predicted_wait - candidate.skew, wait - candidate.skew),
        members=tuple(
            MemberComparison(
                name=one.name, predicted=_busy(one), measured=seconds, ratio=seconds / _busy(one) * one.correction
            )
            for one, seconds in zip(candidate.members, busy, strict=True)
        ),
    )


def _busy(member: MemberForecast) -> float:
    """Return the seconds that a member works in a step; of a plan without prediction its compute."""
    return member.busy or member.seconds


def _by_rank(events: Iterable[Event]) -> tuple[dict[int, dict[int, StepEvent]], dict[str, int]]:
    """Return the steps of every rank (of a step taken twice the later one), and the ranks by name."""
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


def _ranks(members: Sequence[str], steps: Mapping[int, object], names: Mapping[str, int]) -> list[int] | None:
    """Return the rank of every member of the choice; ``None`` where the run was another one."""
    known = [names[name] for name in members if name in names]
    ranks = known if len(known) == len(members) else sorted(steps) if not known else []
    return ranks if len(ranks) == len(members) == len(steps) and set(ranks) <= set(steps) else None


def _counted(steps: Sequence[Collection[int]], interval: int) -> list[int]:
    """Return the steps that all members took, after the warm-up, whole intervals of them; none where they are too few.

    They end with the last exchange, after the first one where there are more: it comes when the slowest start is over.
    """
    common = sorted(set.intersection(*map(set, steps)))
    if interval > 1:
        last = common[-1] // interval * interval if common else 0
        first = interval if last >= 2 * interval else 0
        counted = [step for step in common if first < step <= last]
        return counted if len(counted) >= interval else []
    counted = [step for step in common if step > _WARM_UP]
    return counted if len(counted) >= _FEWEST_STEPS else []


def _usual(values: Sequence[float]) -> float:
    """Return the median of the means of two values that follow one another: members that wait for each other have long
    and short steps by turns, of which a median alone takes one kind."""
    return statistics.median((one + other) / 2 for one, other in itertools.pairwise(values))


def _exchange_ratio(candidate: Candidate, predicted_wait: float, wait: float) -> float | None:
    """Return how long an exchange took over what was predicted, as far as the wait tells.

    What the prediction hides behind compute is taken as hidden: ``(hidden + waited) / predicted``.
    """
    if candidate.choice.alone or candidate.exchange < _NOTHING:
        return None
    interval = candidate.choice.interval
    hidden = max(0.0, candidate.exchange - predicted_wait * interval)
    ratio = (hidden + max(0.0, wait) * interval) / candidate.exchange
    return ratio * candidate.exchange_correction if ratio > 0 else None


# ------------------------------------------------------------------------------------------------------------- remember


class Observation(Document):
    """One ratio of one run."""

    at: float
    """Unix time."""
    trainable: int
    ratio: Annotated[float, Field(gt=0)]
    strategy: Text = ""
    engine: Text = ""
    """Both empty: of compute."""


class History(Document):
    """What was observed on one machine, the oldest first."""

    kind: Literal["predictions"] = "predictions"
    observations: Annotated[tuple[Observation, ...], Field(max_length=4 * MOST_OBSERVATIONS)] = ()


def remember(
    cluster: Cluster, comparison: PredictionComparison, cache: MeasurementCache | None = None, now: float | None = None
) -> None:
    """Keep a comparison for the machines of the run.

    Args:
        cluster: where the names of the choice have their identities.

    Raises:
        BadInput: the cache folder cannot be written.
    """
    cache = cache or MeasurementCache()
    at = time.time() if now is None else now
    for one in comparison.members:
        key = _key(cluster.machine(one.name))
        held = cache.get(History, key) or History()
        cache.put(key, History(observations=_kept((*held.observations, *_observed(comparison, one, at)))))


def _observed(comparison: PredictionComparison, one: MemberComparison, at: float) -> Iterable[Observation]:
    size = comparison.trainable
    if one.ratio > 0:
        yield Observation(at=at, trainable=size, ratio=bounded(one.ratio))
    if comparison.exchange_ratio:
        choice = comparison.choice
        yield Observation(at=at, trainable=size, ratio=bounded(comparison.exchange_ratio),
                          strategy=choice.strategy, engine=choice.engine)  # fmt: skip


def _kept(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the latest of every kind, and of all not more than a file may hold."""
    counts = Counter[tuple[str, str]]()
    kept = []
    for one in reversed(observations):
        counts[one.strategy, one.engine] += 1
        if counts[one.strategy, one.engine] <= MOST_OBSERVATIONS:
            kept.append(one)
    return tuple(reversed(kept[: 4 * MOST_OBSERVATIONS]))


def corrections(
    cluster: Cluster, job: Job, cache: MeasurementCache | None = None, now: float | None = None
) -> Corrections:
    """Return what earlier runs on these machines teach; nothing where there were none.

    Every factor is the geometric mean of what was observed, drawn towards 1, within 1/3 and 3; later runs and runs of a
    model of this size count more.
    """
    cache = cache or MeasurementCache()
    moment = time.time() if now is None else now
    compute: dict[str, float] = {}
    exchange: list[ExchangeCorrection] = []
    for machine in cluster.machines:
        held = cache.get(History, _key(machine)) or History()
        by_kind: dict[tuple[str, str], list[Observation]] = {}
        for one in held.observations:
            by_kind.setdefault((one.strategy, one.engine), []).append(one)
        for (strategy, engine), found in by_kind.items():
            weights = [_weight(one, job, moment) for one in found]
            factor = shrunk([one.ratio for one in found], weights)
            if not strategy and not engine:
                compute[machine.name] = factor
                continue
            exchange.append(ExchangeCorrection(machine=machine.name, strategy=strategy, engine=engine, factor=factor))
    return Corrections(compute=compute, exchange=tuple(exchange))


def _weight(one: Observation, job: Job, now: float) -> float:
    age = max(0.0, now - one.at)
    return float(0.5 ** (age / FORGET)) * (1.0 if one.trainable == job.trainable else OTHER_MODEL)


def _key(machine: ClusterMachine) -> dict[str, Any]:
    return {"machine": machine.host, "device": machine.device}


# ------------------------------------------------------------------------------------------------------ in a run folder


def keep_planning(folder: Path, planning: Planning, figures: Figures | None) -> None:
    """Write a plan, and the figures it stands on, into a run folder.

    Raises:
        BadInput: they cannot be written.
    """
    planning.write(folder / PLANNING)
    if figures is not None:
        figures.write(folder / FIGURES)


def prediction_metrics(folder: RunFolder, learn: bool = True) -> dict[str, Any]:
    """Return ``{"prediction": ...}`` for ``metrics.json``, and remember it for the next plan on these machines.

    Nothing where nothing was predicted, or the run was too short to tell.

    Args:
        learn: whether to remember it: not of machines that there are not.
    """
    with contextlib.suppress(MusterError):  # a damaged document is no reason to lose a run's end
        planning = Planning.read(folder.path / PLANNING) if (folder.path / PLANNING).is_file() else None
        if planning is None or planning.best is None or not planning.best.predicted:
            return {}
        comparison = compare(planning.best, folder.events(), planning.job.trainable)
        if comparison is None:
            return {}
        if learn and (folder.path / FIGURES).is_file():
            remember(Figures.read(folder.path / FIGURES).cluster, comparison)
        return {"prediction": comparison.document()}
    return {}
