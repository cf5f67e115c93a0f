"""How many members train a divided model: one over all devices, or several of fewer devices each, which exchange what
they learn (hybrid parallelism). They are ranked by their time to the same loss.

Members exchange in every step with the default strategy, or seldom with :data:`PERIODIC`; with the profile's strategy
where a person has set one. A step of several members has as many times the samples, of which each counts for less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Candidate, Choice, Job, MemberForecast, Reason
from distributed.planning.layouts.candidates import layout_candidates
from distributed.planning.layouts.layout_documents import LayoutCandidate, LayoutJob
from distributed.planning.prediction import significant
from distributed.planning.ranking import about_equal
from profiles.errors import BadInput, counted
from profiles.schema import Profile
from training.data.sample_order import apportion
from training.layouts.compatibility import refusal_of_layout
from training.numerics.schedule import RunSteps
from training.strategies.costs import CostModel, Learning, RunSpec, SyncSchedule, batch_efficiency
from training.strategies.registry import (
    check_settings,
    cost_model,
    default_strategy,
    keeps_copies_alike,
    strategy_class,
)
from training.strategies.user_strategy import load_user_strategy, sync_schedule_of
from training.tasks.inputs.model_size import ModelSize

PERIODIC, PERIODIC_CODEC = "diloco", "bf16"
"""The strategy of members that exchange seldom, and a codec with which all devices of a member that hold a tied
embedding keep it alike."""
_SEARCHED_INTERVAL = 20
"""Steps between two exchanges of the members whose cut is searched; others change its time, and not the cut."""


class Merging(TypedDict):
    """How members exchange, as fields of a choice."""

    strategy: str
    codec: str
    interval: int


Option = str | int | float | bool


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is divided among members and devices, and how the members exchange."""

    layout: LayoutCandidate
    candidate: Candidate
    """As the other documents of a plan show it."""
    options: dict[str, Option] = field(default_factory=dict)
    """How its members exchange, where the profile leaves that open."""

    @property
    def members(self) -> int:
        return len(self.layout.members)

    @property
    def is_whole(self) -> bool:
        """Whether its only device holds the whole model."""
        return self.layout.layout == "replicate"

    @property
    def name(self) -> str:
        """``2 members of 3 devices``."""
        return f"{counted(self.members, 'member')} of {counted(len(self.layout.members[0]), 'device')}"


def merging_of(profile: Profile) -> Merging:
    """Return how the members of a profile's run exchange."""
    chosen = profile.strategy
    if chosen.strategy == "auto":
        chosen = chosen.model_copy(update={"strategy": default_strategy()})
    codec = strategy_class(chosen.strategy).codec(load_user_strategy(chosen))
    return Merging(strategy=chosen.strategy, codec=codec, interval=sync_schedule_of(chosen).interval)


def plan_of(layout: LayoutCandidate, job: Job, merging: Merging, learning: Learning | None = None) -> ParallelPlan:
    """Return a layout as a plan, with its prediction.

    Args:
        learning: how well its members learn from one another; ``None``: it has one.
    """
    alone = Merging(strategy=default_strategy(), codec="fp32", interval=1)
    candidate = _candidate(layout, job, merging if len(layout.members) > 1 else alone)
    if learning is None:
        return ParallelPlan(layout, candidate)
    ratio = job.global_batch_of(len(layout.members)) / job.global_batch_of(1)
    update = {
        "token_efficiency": batch_efficiency(ratio, job.lr_scaling) * learning.share,
        "loss_increase": learning.loss,
        "sources": (*learning.sources, *(("batch",) if ratio > 1 else ())),
        "exchange": layout.exchange * merging["interval"],
        "rounds": candidate.steps // merging["interval"],
    }
    return ParallelPlan(layout, candidate.model_copy(update=update))


# ------------------------------------------------------------------------------------------------------------- ranking


def ranked_plans(plans: Sequence[ParallelPlan], job: Job) -> list[ParallelPlan]:
    """Return plans that fit, best first, with their speed-up over the fastest one of one member, or of all if none is.

    Of those that are about as fast as the fastest, the one with the fewest members comes first, then one whose model is
    not divided, then one whose members exchange in every step.
    """
    basis = max((plan.candidate.samples_per_second for plan in plans if plan.members == 1), default=0.0)
    basis = basis or max((plan.candidate.samples_per_second for plan in plans), default=1.0)
    ranked = sorted((_compared(plan, basis) for plan in plans), key=lambda plan: _cost(plan, job))
    if not ranked or job.preference == "least-traffic":
        return ranked
    most = ranked[0].candidate.loss_increase if job.preference == "closest-to-exact" else math.inf
    near_ties = [
        w for w in ranked if w.candidate.loss_increase <= most and about_equal(w.candidate, ranked[0].candidate)
    ]
    simplest = min(near_ties, key=lambda plan: (plan.members, not plan.is_whole, plan.candidate.loss_increase))
    return [simplest, *(plan for plan in ranked if plan is not simplest)]


def _compared(plan: ParallelPlan, basis: float) -> ParallelPlan:
    speed_up = plan.candidate.samples_per_second / basis if basis else 1.0
    useful = speed_up * plan.candidate.token_efficiency
    update = {"speed_up": speed_up, "useful_speed_up": useful}
    return ParallelPlan(plan.layout, plan.candidate.model_copy(update=update), plan.options)


def _cost(plan: ParallelPlan, job: Job) -> tuple[float, ...]:
    useful = -significant(plan.candidate.useful_speed_up)
    if job.preference == "closest-to-exact":
        return (plan.candidate.loss_increase, useful)
    return (plan.members > 1, useful) if job.preference == "least-traffic" else (useful,)


def member_reasons(ranked: Sequence[ParallelPlan]) -> Iterator[Reason]:
    """Yield why the first of these plans has one member, or several: its speed beside that of the best other one."""
    chosen, *others = ranked
    rival = next((plan for plan in others if (plan.members > 1) != (chosen.members > 1)), None)
    if rival is None:
        return
    several, single = sorted((chosen, rival), key=lambda plan: plan.members, reverse=True)
    times = several.candidate.useful_speed_up / single.candidate.useful_speed_up
    code = "layout-several-members" if several is chosen else "layout-one-member"
    numbers = {"useful": times, "exchange": several.layout.exchange, "step": several.layout.step}
    yield Reason.of(code, several.name, single.name, **numbers)


# ------------------------------------------------------------------------------------------------------ several members


def hybrid_plans(
    profile: Profile, size: ModelSize, cluster: Cluster, job: Job, layouts: Sequence[LayoutCandidate]
) -> list[ParallelPlan]:
    """Return the plans with several members that fit and are possible: the best one of each number of members and
    devices.

    Args:
        layouts: those with an exchange in every step.
    """
    best: dict[str, ParallelPlan] = {}
    plans = _exact_plans(profile, size, job, layouts)
    if profile.strategy.strategy == "auto" and profile.strategy.codec in ("auto", PERIODIC_CODEC):
        plans += _periodic_plans(profile, size, cluster, job)
    for plan in plans:
        if plan.name not in best or _useful(plan) > _useful(best[plan.name]):
            best[plan.name] = plan
    return list(best.values())


def _useful(plan: ParallelPlan) -> float:
    return plan.candidate.samples_per_second * plan.candidate.token_efficiency


def _possible(
    profile: Profile, layouts: Sequence[LayoutCandidate], is_tied: bool
) -> Iterator[tuple[LayoutCandidate, int]]:
    """Yield the layouts with several members that work with the profile's settings, with the number of members."""
    with_strategy = _exchanging_with(profile, merging_of(profile)["strategy"])
    if is_tied and not keeps_copies_alike(load_user_strategy(with_strategy.strategy)):
        return
    for layout in layouts:
        if layout.layout == "pipeline" and len(layout.members) > 1 and layout.fits:
            members, stages = len(layout.members), len(layout.members[0])
            run = profile.run.model_copy(update={"layout": "pipeline", "stages": stages})
            if not refusal_of_layout(with_strategy.model_copy(update={"run": run}), members * stages):
                yield layout, members


def _ties(profile: Profile, size: ModelSize) -> bool:
    """Whether two devices of a member hold one trained weight."""
    return bool(size.tied) and profile.model.tuning == "full"


def _exchanging_with(profile: Profile, strategy: str, codec: str = "") -> Profile:
    update = {"strategy": strategy, **({"codec": codec} if codec else {})}
    return profile.model_copy(update={"strategy": profile.strategy.model_copy(update=update)})


def _exact_plans(profile: Profile, size: ModelSize, job: Job, layouts: Sequence[LayoutCandidate]) -> list[ParallelPlan]:
    """Return plans whose members exchange as the profile says, or in every step."""
    merging = merging_of(profile)
    costs = cost_model(merging["strategy"], profile.strategy)
    if costs is None:
        return []
    schedule = SyncSchedule(merging["interval"])
    return [
        ParallelPlan(plan.layout, plan.candidate, {"strategy": merging["strategy"], "codec": merging["codec"]})
        for layout, members in _possible(profile, layouts, _ties(profile, size))
        for plan in (plan_of(layout, job, merging, costs.learning(_run(job, members, merging), schedule, members)),)
    ]


def _run(job: Job, members: int, merging: Merging) -> RunSpec:
    return RunSpec(job.run_steps(members).steps, job.start, job.lora, merging["codec"], job.texts)


def _periodic_plans(profile: Profile, size: ModelSize, cluster: Cluster, job: Job) -> Iterator[ParallelPlan]:
    """Yield plans whose members exchange seldom, at the interval with the shortest time to the same loss."""
    costs = cost_model(PERIODIC, profile.strategy)
    asked = _exchanging_with(profile, PERIODIC, PERIODIC_CODEC)
    try:
        check_settings(asked.strategy)
    except BadInput:  # the profile's other options are not for it
        return
    if costs is None:
        return
    layouts = layout_candidates(LayoutJob(asked, size, cluster, _SEARCHED_INTERVAL, divides=True))
    for layout, members in _possible(asked, layouts, _ties(asked, size)):
        plans = [
            _periodic(layout, job, costs, schedule, members)
            for schedule in costs.sync_schedules(_run(job, members, _periodic_merging(1)))
            if not schedule.delay
        ]
        accepted = [plan for plan in plans if plan.candidate.loss_increase <= job.max_loss_increase]
        if accepted:
            yield max(accepted, key=_useful)


def _periodic_merging(interval: int) -> Merging:
    return Merging(strategy=PERIODIC, codec=PERIODIC_CODEC, interval=interval)


def _periodic(
    layout: LayoutCandidate, job: Job, costs: CostModel, schedule: SyncSchedule, members: int
) -> ParallelPlan:
    """Return a plan at an interval other than the searched one."""
    merging = _periodic_merging(schedule.interval)
    run, exchange = _run(job, members, merging), layout.exchange * _SEARCHED_INTERVAL / schedule.interval
    layout = layout.model_copy(update={"exchange": exchange, "step": layout.step - layout.exchange + exchange})
    plan = plan_of(layout, job, merging, costs.learning(run, schedule, members))
    options = {"strategy": PERIODIC, "codec": PERIODIC_CODEC, **costs.settings(run, schedule)}
    return ParallelPlan(plan.layout, plan.candidate, options)


# ----------------------------------------------------------------------------------------------------------- candidates


def _candidate(layout: LayoutCandidate, job: Job, merging: Merging) -> Candidate:
    """Return a pipeline as the other documents of a plan show it: with its devices as their members."""
    stages = [stage for member in layout.members for stage in member]
    run = job.run_steps(len(layout.members))
    micro_batches, step = _mean_step(layout, run)
    compute = [stage.seconds * micro_batches for stage in stages]
    members = tuple(
        MemberForecast(
            name=stage.name,
            micro_batch=layout.micro_batch,
            seconds=seconds,
            busy=seconds,
            memory=stage.memory,
            memory_free=stage.memory_usable,
            bytes_per_hour=0.0,
        )
        for stage, seconds in zip(stages, compute, strict=True)
    )
    return Candidate(
        choice=Choice(
            **merging,
            engine="mesh",
            members=tuple(stage.name for stage in stages),
            blocks=tuple((s.start, s.end) for s in stages if layout.layout == "pipeline"),
        ),
        step=step,
        samples_per_second=run.mean_batch / step if step else 0.0,
        speed_up=1.0,
        useful_speed_up=1.0,
        members=members,
        accumulation=layout.micro_batches,
        global_batch=run.batch,
        steps=run.steps,
        samples=run.samples,
        compute=max(compute),
        exposed=step - max(compute),
        reasons=(layout.reason,),
    )


def _mean_step(layout: LayoutCandidate, run: RunSteps) -> tuple[float, float]:
    """Return the mean micro-batches and seconds of a run's steps: a pipeline takes as many periods as micro-batches
    pass through its stages."""
    filling = len(layout.members[0]) - 1
    largest_part = max(apportion(run.remainder, [layout.micro_batch] * len(layout.members)))
    in_smaller = math.ceil(largest_part / layout.micro_batch)
    micro_batches = (run.full * layout.micro_batches + run.smaller * in_smaller) / run.steps
    return micro_batches, layout.step * (micro_batches + filling) / (layout.micro_batches + filling)
