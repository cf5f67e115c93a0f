"""Candidate plans for real machines: measured, ranked by the planner, and turned into the plan document."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from app.wizard.services.machines import hosts_of, trust_in
from app.wizard.services.outside import Outside
from app.wizard.state.records import FINE, Assessment, CandidateRow, ItemStatus, StrategyRanking, Tell
from app.wizard.state.state import PlanRequest
from distributed.launcher import (
    DOUBTFUL_AGE,
    PlannedRun,
    PlanOptions,
    apply_planning,
    choose,
    coordinators,
    plan_machines,
    with_best_paths,
)
from distributed.measuring.measure import MeasurementResult, MeasureOptions
from distributed.planning import planner
from distributed.planning.cables import CABLES
from distributed.planning.documents.document import Candidate, Choice, Planning, Preference
from distributed.planning.feedback import corrections
from distributed.planning.layouts.divided_plan import fit_or_divide, is_divided, plan_layout
from distributed.planning.prediction import Predictor, known_costs, sync_schedule_of
from distributed.planning.reasons import ESTIMATED, IN_USE, in_use, plain_reasons, sentence, settings_of
from distributed.planning.run_time import quality_text, run_time
from distributed.preparation.members import can_have_members, member_names
from distributed.preparation.preflight import NotReady, Ready, memory_budgets, take_every_gpu
from distributed.preparation.prepare import PrepareOptions
from profiles.errors import BadInput, MusterError
from profiles.schema import Profile

MOST_ROWS = 12


@dataclass(frozen=True)
class Forecast:
    """Measurements of the machines, and the ranking of candidate plans for them."""

    profile: Profile
    machines: tuple[Ready, ...]
    """As they were prepared; their connections are closed."""
    measurements: MeasurementResult
    planning: Planning | None
    """``None``: a single machine that was not measured; there is nothing to choose."""
    files_there: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """SHA-256 of the run's files that a remote machine has after it was measured, by its name."""

    def with_interval(self, index: int, steps: int) -> CandidateRow:
        """Return a candidate plan with another sync interval; its overlap is reduced to stay below it.

        Raises:
            BadInput: the strategy does not support this interval.
        """
        planning = self.planning
        assert planning is not None  # a single machine has no sync interval
        choice, predictor = planning.ranking[index].choice, self._predictor(planning)
        moved = choice.model_copy(update={"interval": steps, "delay": min(choice.delay, steps - 1)})
        if why := known_costs(moved, planning.job).why_unsupported(predictor.run_spec(moved), sync_schedule_of(moved)):
            raise BadInput(f"merging every {steps} steps: this way {why}", "take another number of steps")
        return way_of(planning, index, predictor.predict(moved))

    def _predictor(self, planning: Planning) -> Predictor:
        cluster, job = self.measurements.figures.cluster, planning.job
        return Predictor(cluster, job, corrections(cluster, job), coordinators(cluster, self.machines))

    def planning_of(self, row: CandidateRow | None) -> Planning | None:
        """Return the plan document with a row's candidate plan as the chosen one."""
        planning = self.planning
        if planning is None or row is None or (row.index == planning.chosen and row.interval == row.best_interval):
            return planning
        if is_divided(self.profile):
            cluster, only_member = self.measurements.figures.cluster, not can_have_members(self.machines)
            divided = plan_layout(cluster, planning.job, self.profile, only_member=only_member, chosen=row.index)
            return planner.with_hashes(divided, cluster, self.profile)
        ranking = (*planning.ranking[: row.index], row.candidate, *planning.ranking[row.index + 1 :])
        settings = settings_of(row.candidate, self._predictor(planning))
        settings = with_best_paths(settings, self.measurements, self.machines)
        return planning.model_copy(update={"ranking": ranking, "chosen": row.index, "settings": settings})

    def planned(self, planning: Planning | None, profile: Profile) -> PlannedRun:
        """Return the run that would be planned, without contacting any machine.

        Raises:
            BadInput: the plan does not fit.
        """
        if planning is None:
            return plan_machines(self.machines, profile, PlanOptions())
        return apply_planning(planning, profile, self.machines)


def make_forecast(
    request: PlanRequest, profile: Profile, tell: Tell, outside: Outside, skip: threading.Event
) -> Forecast:
    """Prepare the machines, measure what is not known yet, and rank the candidate plans.

    Args:
        skip: set to end measuring with the figures so far.

    This computer alone is measured on demand only: there is nothing to choose, and the run would have to wait.

    Raises:
        NotReady: a machine cannot take part, or cannot run the task.
        BadInput: the data cannot be used.
    """
    prepare_options = PrepareOptions(tell, trust_in(request.answers.fingerprints), repair=False)
    hosts = hosts_of(request.machines)
    tell(f"asking {', '.join(machine.name for machine in hosts.machines)} how much memory is free")
    machines = outside.prepare(hosts, profile.model.task, prepare_options)
    take_every_gpu(profile, machines)
    profile = fit_or_divide(profile, memory_budgets(profile, machines), tell)
    plan_options = PlanOptions(preference=cast(Preference, request.answers.preference))
    must_measure = request.measure or not (len(request.machines) == 1 and request.machines[0].here)
    max_age = 0.0 if request.measure else plan_options.max_age
    files_there: Mapping[str, frozenset[str]] = {}
    tell("reading model and data on this computer")
    try:
        measurements = outside.measure(
            machines,
            profile,
            MeasureOptions(must_measure, must_measure, max_age, min(max_age, DOUBTFUL_AGE), tell, skip=skip),
        )
        with suppress(MusterError, OSError):  # starting the run reports the error
            files_there = outside.files_there(machines, profile)
    finally:
        for link, _ in machines:
            link.close()
    if measurements.problems:
        raise NotReady(measurements.problems)
    planning = choose(measurements, machines, profile, plan_options) if measurements.speeds else None
    return Forecast(profile, tuple(machines), measurements, planning, files_there)


# ---------------------------------------------------------------------------------------------------------------- rows


def strategy_of(forecast: Forecast) -> StrategyRanking:
    """Return the ranking as the screen shows it, best first; a single machine counts as a candidate plan."""
    if forecast.planning is not None:
        return ranked(forecast.planning, forecast)
    names, machine = tuple(member_names(forecast.machines)), forecast.measurements.names[0]
    candidate = CandidateRow(
        Candidate(choice=Choice(strategy="", codec="", engine="mesh", members=names)), recommended=True
    )
    how = "it trains alone" if len(names) == 1 else f"its {len(names)} GPUs train together"
    return StrategyRanking((candidate,), (f"{machine} is the only machine: {how}",), planning=forecast)


def ranked(planning: Planning, planning_handle: object) -> StrategyRanking:
    """Return a ranking as the screen shows it, each candidate plan only with its best sync interval.

    Args:
        planning_handle: opaque value that later calls pass back to the services.
    """
    rows: dict[object, CandidateRow] = {}
    for index, candidate in enumerate(planning.ranking):
        choice = candidate.choice
        if choice.without_interval not in rows and (len(rows) < MOST_ROWS or choice.alone):
            rows[choice.without_interval] = way_of(planning, index, candidate)
    plain, assessment = plain_reasons(planning), FINE
    sentences = (sentence(reason) for reason in planning.reasons if reason.code not in (IN_USE, ESTIMATED))
    details = tuple(text for text in sentences if text not in plain)
    if planning.chosen is None:
        cause = sentence(planning.reasons[0]) if planning.reasons else "the job fits none of these machines"
        fix = "choose a smaller model, or a machine with more memory"
        assessment = Assessment(status=ItemStatus.FAILED, cause=cause, fix=fix)
    cables = tuple(sentence(reason) for reason in planning.reasons if reason.code in CABLES)
    return StrategyRanking(
        tuple(rows.values()), plain, details, cables, in_use(planning), planning=planning_handle, assessment=assessment
    )


def way_of(planning: Planning, index: int, candidate: Candidate) -> CandidateRow:
    """Return the row of ``planning.ranking[index]``, of which ``candidate`` may differ in its sync interval."""
    choice = candidate.choice
    exchanges_whole = candidate.predicted and not (choice.alone or choice.blocks)
    return CandidateRow(
        candidate,
        index,
        same_loss_seconds=planning.same_loss_seconds(candidate),
        best_interval=planning.ranking[index].choice.interval,
        best_speed=planning.ranking[index].useful_speed_up,
        time=run_time(planning, candidate),
        quality=quality_text(planning, candidate),
        exact=exchanges_whole and known_costs(choice).exact,
        acceptable=candidate.loss_increase <= planning.job.max_loss_increase,
        periodic=exchanges_whole and bool(known_costs(choice).interval_option),
        recommended=index == planning.chosen,
    )
