"""Chooses the best candidate plan for machines, links and a job. Pure functions: figures in, a plan out.

Candidates are all strategies of the registry whose costs are known, with their codecs, both engines, and two groups of
machines each: all eligible machines, and those that are left after dropping, one by one, machines that cost more than
they add (greedily, so not every subset is tried). Each machine alone is always a candidate.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from distributed.planning.documents.cluster import Cluster, ClusterMachine
from distributed.planning.documents.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.documents.document import (
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
from distributed.planning.memory import memory_model
from distributed.planning.prediction import Predictor, significant
from distributed.planning.ranking import SIGNIFICANT_RATIO, about_equal, order, simplest_first
from distributed.planning.reasons import choice_reasons, memory_reasons, settings_of
from profiles.errors import BadInput
from profiles.schema import Profile, StrategySettings
from training.strategies.costs import LOSS_UNKNOWN, CostModel
from training.strategies.registry import check_strategy, cost_model, default_strategy, strategies, strategy_class

MOST_SUSPECTS = 8


def plan(
    cluster: Cluster,
    job: Job,
    coordinator_candidates: Collection[str] | None = None,
    corrections: Corrections = NO_CORRECTIONS,
) -> Planning:
    """Rank all candidates and choose one.

    Args:
        coordinator_candidates: names of the machines that may run the coordinator; ``None``: all.
        corrections: factors from earlier predictions (:func:`distributed.planning.feedback.corrections`).

    Raises:
        BadInput: the job names an unknown strategy or codec.
    """
    return _Planner(cluster, job, coordinator_candidates, corrections).plan()


def with_hashes(planning: Planning, cluster: Cluster, profile: Profile) -> Planning:
    """Return the plan with hashes of its inputs."""
    machines = sorted((machine.name, machine.identity) for machine in cluster.machines)
    made_for = MadeFor(
        profile=profile_hash(profile),
        machines=digest(machines),
        figures=digest(json.loads(cluster.model_dump_json())),
    )
    return planning.model_copy(update={"made_for": made_for})


@dataclass(frozen=True)
class _Configuration:
    """The part of a choice without members and interval."""

    strategy: str
    codec: str
    engine: Engine


class _Planner:
    def __init__(
        self, cluster: Cluster, job: Job, coordinator_candidates: Collection[str] | None, corrections: Corrections
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._predictor = Predictor(cluster, job, corrections, coordinator_candidates)
        self._noted: dict[tuple[str, str, str], Reason] = {}

    def plan(self) -> Planning:
        baseline = default_strategy()
        alone = [
            self._predictor.predict(Choice(strategy=baseline, codec="fp32", engine="mesh", members=(name,)))
            for name in self._predictor.measured_machines
        ]
        if self._job.strategy != "auto" and cost_model(check_strategy(self._job.strategy)) is None:
            return self._plan_without_prediction(alone)
        groups = {
            candidate.choice: candidate
            for configuration in self._configurations()
            for candidate in self._groups(configuration)
        }
        ranking = self._simplest_first(sorted([*alone, *groups.values()], key=self._order))
        return self._choose_first(ranking)

    def _choose_first(self, ranking: list[Candidate]) -> Planning:
        """Return the plan that chooses the first candidate of a ranking."""
        job, best = self._job, ranking[0] if ranking and ranking[0].fits else None
        reasons: tuple[Reason, ...] = (Reason.of("nothing-fits"), *self._machine_reasons(()))
        if best is not None:
            acceptable = [candidate for candidate in ranking if not self._is_in_clear_unasked(candidate)]
            reasons = (
                *choice_reasons(best, acceptable, self._predictor),
                *self._faster_in_clear(best, ranking),
                *self._machine_reasons(best.choice.members),
            )
        return Planning(
            job=job,
            ranking=tuple(ranking),
            chosen=None if best is None else 0,
            settings=None if best is None else settings_of(best, self._predictor),
            reasons=reasons,
        )

    def _plan_without_prediction(self, alone: list[Candidate]) -> Planning:
        """Return a plan that uses the profile's strategy with all machines, if its costs are not known."""
        job = self._job
        configuration = _Configuration(job.strategy, job.codec, "nccl" if job.engine == "nccl" else "mesh")
        members = self._eligible(configuration)
        split = self._predictor.split(members, configuration.strategy) if len(members) > 1 else None
        if split is None:
            return self._choose_first(sorted(alone, key=self._order))
        choice = Choice(**vars(configuration), members=tuple(sorted(members)))
        best = self._predictor.unpredicted(choice, split)
        return self._choose_first([best, *sorted(alone, key=self._order)])

    # ------------------------------------------------------------------------------------------------------- candidates

    def _configurations(self) -> Iterator[_Configuration]:
        job = self._job
        considered = strategies() if job.strategy == "auto" else (check_strategy(job.strategy),)
        for strategy in considered:
            costs = cost_model(strategy, job)
            if reason := self._unsound(strategy, costs):
                self._note("no-cost-model", strategy, reason)
                continue
            assert costs is not None
            for codec in costs.codecs if job.codec == "auto" else (job.codec,):
                if job.engine != "nccl":
                    yield _Configuration(strategy, codec, "mesh")
                if job.engine != "mesh":
                    yield _Configuration(strategy, codec, "nccl")

    def _unsound(self, strategy: str, costs: CostModel | None) -> str:
        """Return why a strategy is not considered; empty if it is."""
        if costs is None:
            return LOSS_UNKNOWN
        asked = {"codec": self._job.codec, "owned": self._job.owned}
        try:
            strategy_class(strategy).codec(StrategySettings().model_copy(update=asked))
        except BadInput as error:
            return error.problem
        if self._job.strategy != "auto":
            return ""
        members = self._predictor.measured_machines
        choice = Choice(strategy=strategy, codec=costs.codecs[0], engine="mesh", members=members)
        return costs.why_not_ranked(self._predictor.run_spec(choice)) if choice.members else ""

    def _groups(self, configuration: _Configuration) -> Iterator[Candidate]:
        members = self._eligible(configuration)
        if len(members) < 2:
            return
        whole_group = self._best_interval(configuration, members)
        if whole_group is None:
            return
        reduced = self._without_slow_machines(configuration, whole_group)
        for outcome in (whole_group, reduced) if reduced is not whole_group else (whole_group,):
            yield self._predictor.predict(outcome.choice)

    def _eligible(self, configuration: _Configuration) -> tuple[str, ...]:
        """Return the machines that can be members of a configuration."""
        coordinator, eligible = self._predictor.coordinator, []
        for name in self._predictor.measured_machines:
            machine = self._cluster.machine(name)
            if not memory_model.largest_batch(self._job, machine, configuration.strategy):
                self._note_strategy_does_not_fit(machine, configuration.strategy)
            elif configuration.engine == "mesh" and not (coordinator and self._cluster.reaches(name, coordinator)):
                self._note("no-link", name, coordinator)
            elif configuration.engine == "nccl" and machine.device != "cuda":
                if self._job.engine == "nccl":
                    self._note("no-cuda", name)
            else:
                eligible.append(name)
        return tuple(eligible) if configuration.engine == "mesh" else self._connected(eligible)

    def _note_strategy_does_not_fit(self, machine: ClusterMachine, strategy: str) -> None:
        """Note that a strategy does not fit, unless the job itself does not: that has its own reason."""
        if memory_model.largest_batch(self._job, machine, ""):
            needed = memory_model.member_bytes(self._job, machine, strategy, 1)
            self._note("strategy-does-not-fit", machine.name, strategy, needed=needed, free=machine.memory_free)

    def _connected(self, names: list[str]) -> tuple[str, ...]:
        """Drop machines without links to others until all that are left reach each other."""
        while True:
            missing_links = {name: sum(not self._cluster.reaches(name, peer) for peer in names) for name in names}
            worst = max(sorted(names), key=lambda name: missing_links[name], default="")
            if not worst or not missing_links[worst]:
                return tuple(names)
            self._note("no-link-nccl", worst)
            names = [name for name in names if name != worst]

    def _without_slow_machines(self, configuration: _Configuration, whole_group: PredictedOutcome) -> PredictedOutcome:
        """Drop the machine whose absence helps most, as long as dropping one helps."""

        def value(outcome: PredictedOutcome) -> tuple[bool, float]:
            return outcome.fits, significant(outcome.useful_speed_up)

        best = whole_group
        while len(best.choice.members) > 2:
            members = best.choice.members
            groups = [tuple(name for name in members if name != dropped) for dropped in self._suspects(members)]
            outcomes = filter(None, (self._best_interval(configuration, group) for group in groups))
            best_smaller = max(outcomes, key=value, default=best)
            if value(best_smaller) <= value(best):
                return best
            best = best_smaller
        return best

    def _suspects(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Return the machines that may slow the group down: all; in a large group those with the slowest processors and
        interfaces."""
        if len(members) <= MOST_SUSPECTS:
            return members
        by_speed = sorted(members, key=lambda name: (self._cluster.machine(name).speed, name))
        by_link = sorted(members, key=lambda name: (self._cluster.interface(name), name))
        return tuple(sorted({*by_speed[: MOST_SUSPECTS // 2], *by_link[: MOST_SUSPECTS // 2]}))

    def _best_interval(self, configuration: _Configuration, members: tuple[str, ...]) -> PredictedOutcome | None:
        """Return the choice with the best interval for the job's preference; ``None`` if none is allowed."""
        base = Choice(**vars(configuration), members=members)
        split = self._predictor.split(members, configuration.strategy)
        if split is None:
            self._note("batch-too-small")
            return None
        schedules = list(self._predictor.sync_schedules(base))
        if not schedules:
            if refusal := self._predictor.refused(base):
                self._note("refused", configuration.strategy, refusal)
            else:
                self._note("no-interval", configuration.strategy, bound=self._job.max_loss_increase)
            return None
        choices = [base.model_copy(update={"interval": s.interval, "delay": s.delay}) for s in schedules]
        return min((self._predictor.outcome(choice, split) for choice in choices), key=self._interval_order)

    def _interval_order(self, outcome: PredictedOutcome) -> tuple[float, ...]:
        """Return the sort key of intervals, best first. An overlap must gain at least 1 %."""
        useful = significant(outcome.useful_speed_up * (0.99 if outcome.choice.delay else 1.0))
        if self._job.preference == "closest-to-exact" and outcome.useful_speed_up >= SIGNIFICANT_RATIO:
            return (0, outcome.loss_increase, -useful)
        if self._job.preference == "least-traffic" and outcome.useful_speed_up >= SIGNIFICANT_RATIO:
            return (0, outcome.bytes_per_hour, outcome.loss_increase, -useful)
        return (1, -useful, outcome.loss_increase)

    # ---------------------------------------------------------------------------------------------------------- ranking

    def _simplest_first(self, ranking: list[Candidate]) -> list[Candidate]:
        """Move the simplest of the candidates that are about as fast as the fastest to the front."""
        if self._job.preference != "fastest" or not ranking or not ranking[0].fits:
            return ranking
        acceptable = [candidate for candidate in ranking if not self._is_in_clear_unasked(candidate)]
        return [*simplest_first(acceptable), *ranking[len(acceptable) :]]  # the first ones: machines alone are

    def _order(self, candidate: Candidate) -> tuple[object, ...]:
        """Return the sort key of the ranking: best first, no two equal, and last those that send in clear unasked."""
        return self._is_in_clear_unasked(candidate), *order(candidate, self._job.preference)

    def _is_in_clear_unasked(self, candidate: Candidate) -> bool:
        """Whether it sends training traffic in clear over a network, and the job does not ask for that engine."""
        choice = candidate.choice
        in_clear = choice.engine == "nccl" and not self._cluster.on_one_machine(choice.members)
        return in_clear and self._job.engine == "auto"

    # ---------------------------------------------------------------------------------------------------------- reasons

    def _note(self, code: str, subject: str = "", detail: str = "", **numbers: float) -> None:
        self._noted.setdefault((code, subject, detail), Reason.of(code, subject, detail, **numbers))

    def _faster_in_clear(self, best: Candidate, ranking: Sequence[Candidate]) -> Iterator[Reason]:
        candidates_in_clear = [
            candidate for candidate in ranking if candidate.fits and self._is_in_clear_unasked(candidate)
        ]
        rival = max(candidates_in_clear, key=lambda candidate: candidate.useful_speed_up, default=best)
        if rival.useful_speed_up > best.useful_speed_up and not about_equal(rival, best):
            strategy = rival.choice.strategy
            yield Reason.of("faster-in-clear", strategy, open=rival.useful_speed_up, useful=best.useful_speed_up)

    def _machine_reasons(self, members: tuple[str, ...]) -> Iterator[Reason]:
        """Yield why machines are excluded or restricted, and which candidates were not considered."""
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
