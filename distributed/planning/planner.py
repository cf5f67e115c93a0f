"""Which way of training is best for these machines, links and this job. Pure: figures in, a plan out.

Candidates are all strategies of the registry whose cost is known, with their codecs, both engines, and two groups of
machines each: all that can take part, and what is left when machines that cost more than they add are dropped one by
one (greedy, so not every subset is looked at). Each machine alone is always a candidate.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from distributed.planning import memory_model
from distributed.planning.cluster import Cluster
from distributed.planning.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.document import (
    Candidate,
    Choice,
    Engine,
    Job,
    MadeFor,
    Planning,
    PredictedOutcome,
    Reason,
    digest,
    profile_hash,
)
from distributed.planning.prediction import Predictor, known_costs, significant
from distributed.planning.reasons import WORTH, about_equal, memory_reasons, settings_of, why
from profiles.errors import BadInput
from profiles.schema import Profile, StrategySettings
from training.strategies.costs import LOSS_UNKNOWN, CostModel
from training.strategies.registry import check_strategy, cost_model, strategies, strategy_class, usual_strategy

MOST_SUSPECTS = 8


def plan(
    cluster: Cluster, job: Job, carriers: Collection[str] | None = None, corrections: Corrections = NO_CORRECTIONS
) -> Planning:
    """Rank all candidates and choose one.

    Args:
        carriers: names of the machines that may carry the coordinator; ``None``: all.
        corrections: how far off earlier predictions were (:func:`distributed.planning.feedback.corrections`).

    Raises:
        BadInput: the job names a strategy or codec that is not known.
    """
    return _Planner(cluster, job, carriers, corrections).plan()


def simplicity(candidate: Candidate) -> tuple[object, ...]:
    """Return a key that orders ways which are about equally fast, the surest first: one machine before a group; exact
    gradients before merged weights, whose loss is known from small models only; the mesh before nccl, which is not
    encrypted; fp32 before 16 bit; fewer machines before more."""
    choice = candidate.choice
    merged = not choice.alone and not known_costs(choice).exact
    return (not choice.alone, merged, choice.engine == "nccl", choice.codec != "fp32", len(choice.members))


def signed(planning: Planning, cluster: Cluster, profile: Profile) -> Planning:
    """Return the plan with hashes of what it was made for."""
    machines = sorted((machine.name, machine.identity) for machine in cluster.machines)
    made_for = MadeFor(
        profile=profile_hash(profile),
        machines=digest(machines),
        figures=digest(json.loads(cluster.model_dump_json())),
    )
    return planning.model_copy(update={"made_for": made_for})


@dataclass(frozen=True)
class _Way:
    """A choice before its members and its interval."""

    strategy: str
    codec: str
    engine: Engine


class _Planner:
    def __init__(self, cluster: Cluster, job: Job, carriers: Collection[str] | None, corrections: Corrections) -> None:
        self._cluster = cluster
        self._job = job
        self._predictor = Predictor(cluster, job, corrections, carriers)
        self._noted: dict[tuple[str, str, str], Reason] = {}

    def plan(self) -> Planning:
        usual = usual_strategy()
        alone = [
            self._predictor.predict(Choice(strategy=usual, codec="fp32", engine="mesh", members=(name,)))
            for name in self._predictor.workable
        ]
        if self._job.strategy != "auto" and cost_model(check_strategy(self._job.strategy)) is None:
            return self._unpredicted(alone)
        groups = {candidate.choice: candidate for way in self._ways() for candidate in self._groups(way)}
        ranking = self._simplest_first(sorted([*alone, *groups.values()], key=self._order))
        return self._planned(ranking)

    def _planned(self, ranking: list[Candidate]) -> Planning:
        """Return the plan with the first of a ranking as the chosen one."""
        job, best = self._job, ranking[0] if ranking and ranking[0].fits else None
        reasons: tuple[Reason, ...] = (Reason.of("nothing-fits"), *self._machine_reasons(()))
        if best is not None:
            reasons = (
                *why(best, [candidate for candidate in ranking if not self._unasked(candidate)], self._predictor),
                *self._faster_in_clear(best, ranking),
                *self._machine_reasons(best.choice.members),
            )
        return Planning(
            job=job,
            preference=job.preference,
            ranking=tuple(ranking),
            chosen=None if best is None else 0,
            settings=None if best is None else settings_of(best, self._predictor),
            reasons=reasons,
        )

    def _unpredicted(self, alone: list[Candidate]) -> Planning:
        """Return a plan that carries out what the profile says with all machines, where its cost is not known."""
        job = self._job
        way = _Way(job.strategy, job.codec, "nccl" if job.engine == "nccl" else "mesh")
        members = self._able(way)
        split = self._predictor.split(members, way.strategy) if len(members) > 1 else None
        if split is None:
            return self._planned(sorted(alone, key=self._order))
        choice = Choice(**vars(way), members=tuple(sorted(members)))
        best = self._predictor.unpredicted(choice, split)
        return self._planned([best, *sorted(alone, key=self._order)])

    # ------------------------------------------------------------------------------------------------------- candidates

    def _ways(self) -> Iterator[_Way]:
        job = self._job
        wanted = strategies() if job.strategy == "auto" else (check_strategy(job.strategy),)
        for strategy in wanted:
            costs = cost_model(strategy, job)
            if why_not := self._unsound(strategy, costs):
                self._note("no-cost-model", strategy, why_not)
                continue
            assert costs is not None
            for codec in costs.codecs if job.codec == "auto" else (job.codec,):
                if job.engine != "nccl":
                    yield _Way(strategy, codec, "mesh")
                if job.engine != "mesh":
                    yield _Way(strategy, codec, "nccl")

    def _unsound(self, strategy: str, costs: CostModel | None) -> str:
        """Return why a strategy is not ranked; empty: it is."""
        if costs is None:
            return LOSS_UNKNOWN
        asked = {"codec": self._job.codec, "owned": self._job.owned}
        try:
            strategy_class(strategy).codec(StrategySettings().model_copy(update=asked))
        except BadInput as error:
            return error.problem
        if self._job.strategy != "auto":
            return ""
        choice = Choice(strategy=strategy, codec=costs.codecs[0], engine="mesh", members=self._predictor.workable)
        return costs.unsound(self._predictor.course(choice)) if choice.members else ""

    def _groups(self, way: _Way) -> Iterator[Candidate]:
        members = self._able(way)
        if len(members) < 2:
            return
        whole = self._best_interval(way, members)
        if whole is None:
            return
        best = self._without_brakes(way, whole)
        for outcome in (whole, best) if best is not whole else (whole,):
            yield self._predictor.predict(outcome.choice)

    def _able(self, way: _Way) -> tuple[str, ...]:
        """Return the machines that can take part this way."""
        coordinator, found = self._predictor.coordinator, []
        for name in self._predictor.workable:
            machine = self._cluster.machine(name)
            if not memory_model.largest_batch(self._job, machine, way.strategy):
                if memory_model.largest_batch(self._job, machine, ""):  # else it has a reason of its own
                    needed = memory_model.member_bytes(self._job, machine, way.strategy, 1)
                    self._note("strategy-does-not-fit", name, way.strategy, needed=needed, free=machine.memory_free)
            elif way.engine == "mesh" and not (coordinator and self._cluster.reaches(name, coordinator)):
                self._note("no-link", name, coordinator)
            elif way.engine == "nccl" and machine.device != "cuda":
                if self._job.engine == "nccl":
                    self._note("no-cuda", name)
            else:
                found.append(name)
        return tuple(found) if way.engine == "mesh" else self._connected(found)

    def _connected(self, names: list[str]) -> tuple[str, ...]:
        """Return the machines less those that miss links to the others."""
        while True:
            missing = {name: sum(not self._cluster.reaches(name, other) for other in names) for name in names}
            worst = max(sorted(names), key=lambda name: missing[name], default="")
            if not worst or not missing[worst]:
                return tuple(names)
            self._note("no-link-nccl", worst)
            names = [name for name in names if name != worst]

    def _without_brakes(self, way: _Way, whole: PredictedOutcome) -> PredictedOutcome:
        """Drop the machine whose absence helps most, until every one left adds something."""

        def worth(outcome: PredictedOutcome) -> tuple[bool, float]:
            return outcome.fits, significant(outcome.useful_speed_up)

        best = whole
        while len(best.choice.members) > 2:
            members = best.choice.members
            rests = [tuple(name for name in members if name != dropped) for dropped in self._suspects(members)]
            options = [found for rest in rests if (found := self._best_interval(way, rest)) is not None]
            leader = max(options, key=worth, default=best)
            if worth(leader) <= worth(best):
                return best
            best = leader
        return best

    def _suspects(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Return who may be a brake: everybody; in a large group the slowest and those with the slowest interfaces."""
        if len(members) <= MOST_SUSPECTS:
            return members
        by_speed = sorted(members, key=lambda name: (self._cluster.machine(name).speed, name))
        by_link = sorted(members, key=lambda name: (self._cluster.interface(name), name))
        return tuple(sorted({*by_speed[: MOST_SUSPECTS // 2], *by_link[: MOST_SUSPECTS // 2]}))

    def _best_interval(self, way: _Way, members: tuple[str, ...]) -> PredictedOutcome | None:
        """Return the choice with the interval that the preference likes best."""
        base = Choice(**vars(way), members=members)
        split = self._predictor.split(members, way.strategy)
        if split is None:
            self._note("batch-too-small")
            return None
        rhythms = list(self._predictor.rhythms(base))
        if not rhythms:
            if refused := self._predictor.refused(base):
                self._note("refused", way.strategy, refused)
            else:
                self._note("no-interval", way.strategy, bound=self._job.max_loss_increase)
            return None
        choices = [base.model_copy(update={"interval": one.interval, "delay": one.delay}) for one in rhythms]
        return min((self._predictor.outcome(choice, split) for choice in choices), key=self._interval_order)

    def _interval_order(self, outcome: PredictedOutcome) -> tuple[float, ...]:
        """Best first. An overlap has to be worth 1 %."""
        useful = significant(outcome.useful_speed_up * (0.99 if outcome.choice.delay else 1.0))
        if self._job.preference == "closest-to-exact" and outcome.useful_speed_up >= WORTH:
            return (0, outcome.loss_increase, -useful)
        if self._job.preference == "least-traffic" and outcome.useful_speed_up >= WORTH:
            return (0, outcome.bytes_per_hour, outcome.loss_increase, -useful)
        return (1, -useful, outcome.loss_increase)

    # ---------------------------------------------------------------------------------------------------------- ranking

    def _simplest_first(self, ranking: list[Candidate]) -> list[Candidate]:
        """Put the simplest of those ways first that are about as fast as the fastest."""
        if self._job.preference != "fastest" or not ranking or not ranking[0].fits:
            return ranking
        near = [one for one in ranking if one.fits and about_equal(one, ranking[0]) and not self._unasked(one)]
        simplest = min(near, key=simplicity)  # the fastest of equally simple ones, for they are in order
        return [simplest, *(one for one in ranking if one is not simplest)]

    def _order(self, candidate: Candidate) -> tuple[object, ...]:
        """Return the key of the ranking: best first, never two alike, and last what is not taken unasked."""
        choice = candidate.choice
        behind, unasked = -significant(candidate.useful_speed_up), self._unasked(candidate)
        lossy = choice.codec != "fp32"
        worth = not choice.alone and candidate.useful_speed_up >= WORTH
        tier = (not candidate.fits, 0 if worth else 1 if choice.alone else 2)
        exactness = (candidate.loss_increase, lossy)
        rest = (*exactness, candidate.bytes_per_hour, choice.members, choice.engine, choice.strategy, choice.codec)
        if self._job.preference == "closest-to-exact":
            return (unasked, *tier, *exactness, behind, *rest)
        if self._job.preference == "least-traffic":
            return (unasked, *tier, significant(candidate.bytes_per_hour), behind, *rest)
        return (unasked, not candidate.fits, behind, *rest)

    def _unasked(self, candidate: Candidate) -> bool:
        """Whether it sends training traffic in clear over a network, and nobody asked for the engine that does."""
        choice = candidate.choice
        in_clear = choice.engine == "nccl" and not self._cluster.on_one_machine(choice.members)
        return in_clear and self._job.engine == "auto"

    # ---------------------------------------------------------------------------------------------------------- reasons

    def _note(self, code: str, subject: str = "", other: str = "", **numbers: float) -> None:
        self._noted.setdefault((code, subject, other), Reason.of(code, subject, other, **numbers))

    def _faster_in_clear(self, best: Candidate, ranking: Sequence[Candidate]) -> Iterator[Reason]:
        open_ = [candidate for candidate in ranking if candidate.fits and self._unasked(candidate)]
        rival = max(open_, key=lambda candidate: candidate.useful_speed_up, default=best)
        if rival.useful_speed_up > best.useful_speed_up and not about_equal(rival, best):
            way = rival.choice.strategy
            yield Reason.of("faster-in-clear", way, open=rival.useful_speed_up, useful=best.useful_speed_up)

    def _machine_reasons(self, members: tuple[str, ...]) -> Iterator[Reason]:
        """Yield why machines can take no part, or only in some ways, and what was left aside altogether."""
        for option in ("strategy", "engine", "codec"):
            value: str = getattr(self._job, option)
            if value != "auto":
                yield Reason.of("fixed", value, option)
        for machine in sorted(self._cluster.machines, key=lambda machine: machine.name):
            if machine.trains and machine.speed <= 0:
                yield Reason.of("no-speed", machine.name)
            elif machine.trains:
                yield from memory_reasons(self._job, machine)
        yield from (reason for reason in self._noted.values() if reason.subject not in members)
