"""The plan of a model that no machine holds: when a model is divided, and the planner's document for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Job, Planning, Reason, Settings
from distributed.planning.layouts.candidates import layout_candidates, pipeline_in_memory, whole_candidates
from distributed.planning.layouts.divided import why_shards
from distributed.planning.layouts.hybrid import (
    ParallelPlan,
    hybrid_plans,
    member_reasons,
    merging_of,
    plan_of,
    ranked_plans,
)
from distributed.planning.layouts.layout_documents import Layout, LayoutCandidate, LayoutJob, StageForecast, member_name
from distributed.planning.memory.fitting import NO_TOLERANCE, MemoryBudget, fit, fit_to_budgets
from distributed.planning.reasons import sentence
from profiles.errors import BadInput, counted
from profiles.schema import Profile
from training.layouts.compatibility import refusal_of_layout
from training.layouts.inside.checks import refusal_inside
from training.records.plan import DevicePlan, MemberPlan
from training.tasks.inputs.model_size import ModelSize
from training.tasks.published_models import model_folder
from training.tasks.registry import size_for


def is_divided(profile: Profile) -> bool:
    """Whether the planner cuts the model of a profile: it is to be a pipeline, and its blocks are known."""
    return profile.run.layout == "pipeline" and _has_blocks(size_for(profile))


def is_open(profile: Profile) -> bool:
    """Whether the planner has chosen to divide the model, and nobody has set it."""
    return "layout" not in profile.run.model_fields_set


def _has_blocks(size: ModelSize | None) -> bool:
    return size is not None and bool(size.blocks)


def fit_or_divide(
    profile: Profile, budgets: Sequence[MemoryBudget], report: Callable[[str], None] = lambda line: None
) -> Profile:
    """Return the profile fitted to all memory budgets; where no setting fits, one whose model is divided among them.

    With a layout other than ``auto`` the profile decides. With it, a model is divided where it would take memory on one
    of the machines that the system and other programs may need; if another one of them holds the whole model, the
    planner compares it with divisions (:func:`plan_layout`). A model that cannot be divided may be tight.

    Args:
        report: is called with a line about what was changed.

    Raises:
        BadInput: the model cannot fit; says why it is not divided either.
    """
    if is_divided(profile):
        return profile  # the planner fits each stage to its device
    if profile.run.layout != "auto" or sum(budget.members for budget in budgets) < 2:
        return fit(profile, budgets, report)
    try:
        return fit(profile, budgets, report, NO_TOLERANCE)
    except BadInput as error:
        inside = _inside(profile, budgets, report)
        why = "" if inside else _why_no_pipeline(profile, budgets)
        if not why:
            alone = "" if inside else _holder(profile, budgets)
            report(f"{error.problem}: the model is divided{f', unless {alone} alone is faster' if alone else ''}")
            return inside or _as(profile, "pipeline")
    try:
        return fit(profile, budgets, report, 1.0)  # which is tight
    except BadInput as error:
        alone = _holder(profile, budgets)
        also = f"; {alone} holds the whole model, without the others" if alone else ""
        raise BadInput(error.problem, f"{error.hint}; it is not divided: {why}{also}") from None


def fit_locally(profile: Profile, budgets: Sequence[MemoryBudget], report: Callable[[str], None]) -> Profile:
    """Return the profile fitted to the workers of this machine: where each cannot hold the model, all together.

    Raises:
        BadInput: they cannot either.
    """
    if profile.run.layout != "auto" or profile.run.workers < 2:
        return fit(profile, budgets, report)
    try:
        return fit(profile, budgets, report, NO_TOLERANCE)
    except BadInput as error:
        with suppress(BadInput):
            fitted = _inside(profile, budgets, report) or _in_stages(profile, budgets, report)
            report(f"{error.problem}: the model is divided over {counted(profile.run.workers, 'worker')}")
            return fitted
    return fit(profile, budgets, report)


def _in_stages(profile: Profile, budgets: Sequence[MemoryBudget], report: Callable[[str], None]) -> Profile:
    """Return the profile of a pipeline over the workers of this machine.

    Raises:
        BadInput: it is not possible, or does not fit.
    """
    staged = _as(profile, "pipeline")
    if why := refusal_of_layout(staged, profile.run.workers):
        raise BadInput(f"layout = pipeline {why}", "set layout = replicate")
    return fit(staged, budgets, report, NO_TOLERANCE)


def _as(profile: Profile, layout: Layout) -> Profile:
    """Return the profile with a layout that is chosen here: it does not count as set in the profile."""
    run = profile.run
    values = {**dict(run), "layout": layout}
    chosen = type(run).model_construct(_fields_set=run.model_fields_set - {"layout"}, **values)
    return profile.model_copy(update={"run": chosen})


def _inside(profile: Profile, budgets: Sequence[MemoryBudget], report: Callable[[str], None]) -> Profile | None:
    """Return the profile with a slice of every matrix, or a shard of every weight, on each GPU of one machine.

    ``None``: they are not in one, each has not one of its own, or neither fits."""
    are_inside = len({budget.name for budget in budgets}) == 1
    has_each_one = all(budget.device == "cuda" and budget.members == 1 for budget in budgets)
    if not (are_inside and has_each_one) or refusal_inside(profile):
        return None
    why_not = _why_no_slices(profile, max(len(budgets), profile.run.workers))
    if why_not:
        report(f"layout = tensor is not taken: {why_not}")
    layouts: tuple[Layout, ...] = ("shard",) if why_not else ("tensor", "shard")
    for layout in layouts:
        with suppress(BadInput):
            return fit(_as(profile, layout), budgets, report)
    return None


def _why_no_slices(profile: Profile, devices: int) -> str:
    """Return why devices of one machine do not take slices of matrices; empty: they are possible, and the fastest."""
    size, folder = size_for(profile), model_folder(profile.model.model_path)
    if size is None or not size.blocks:
        return "the blocks of the model are not known"
    if folder is None:
        return "only published models have a plan of what can be divided"
    if why := why_shards(profile, size, devices):
        return why
    from training.layouts.inside.tensor_plans import refusal_of_folder  # loads torch

    return refusal_of_folder(folder, devices)


def _why_no_pipeline(profile: Profile, budgets: Sequence[MemoryBudget]) -> str:
    """Return why a model cannot be cut into stages for these memories; empty: it can."""
    size, staged = size_for(profile), _as(profile, "pipeline")
    if size is None or not size.blocks:
        return "its blocks are not known"
    if refusal := refusal_of_layout(staged, sum(budget.members for budget in budgets)):
        return f"a pipeline {refusal}"
    pipeline = pipeline_in_memory(staged, size, budgets)
    return "" if pipeline.accepted else sentence(pipeline.reason)


def _holder(profile: Profile, budgets: Sequence[MemoryBudget]) -> str:
    """Return the name of a machine that holds the whole model, if it trains alone; empty: none does."""
    for budget in budgets:
        with suppress(BadInput):
            fit_to_budgets(profile, size_for(profile), [budget], alone=True, tolerance=NO_TOLERANCE)
            return budget.name
    return ""


def plan_layout(
    cluster: Cluster, job: Job, profile: Profile, *, only_member: bool = False, chosen: int = 0
) -> Planning:
    """Plan a run of one member whose devices hold the model together, or of several such members; where nobody has set
    that the model is divided, also of one device that holds all of it.

    Args:
        cluster: with the times of the blocks, or with measured steps of a model that was held whole.
        only_member: whether the run cannot have several members.
        chosen: index in the ranking of what is taken.

    Raises:
        BadInput: no device was measured, or another model.
    """
    size = size_for(profile)
    assert size is not None  # a model without known blocks is not divided by a plan
    for machine in cluster.machines:
        if machine.blocks and len(machine.blocks) != len(size.blocks):
            counts = f"{len(machine.blocks)} blocks, and this one has {len(size.blocks)}"
            raise BadInput(f"the model measured on {machine.name} has {counts}", "measure this profile")
    merging = merging_of(profile)
    layout_job = LayoutJob(profile, size, cluster, merging["interval"], divides=True)
    candidates = layout_candidates(layout_job)
    fitting = [each for each in candidates if each.layout == "pipeline" and each.accepted and each.fits]
    if stages := profile.run.stages:  # by hand: as many members as fit
        taken = sorted((p for p in fitting if len(p.members[0]) == stages), key=lambda p: -len(p.members))[:1]
        plans = [plan_of(pipeline, job, merging) for pipeline in taken]
    else:
        plans = [plan_of(pipeline, job, merging) for pipeline in fitting if len(pipeline.members) == 1]
        plans += [] if only_member else hybrid_plans(profile, size, cluster, job, fitting)
        plans += [plan_of(whole, job, merging) for whole in whole_candidates(layout_job)] if is_open(profile) else []
        plans = ranked_plans(plans, job)
    if not plans:  # the lines about the layouts that a person could not choose would tell nothing
        refused = [each.reason for each in candidates if each.layout == "pipeline"]
        return Planning(job=job, ranking=(), chosen=None, reasons=(Reason.of("nothing-fits"), *refused))
    refused = [each.reason for each in candidates if not each.accepted]
    best = plans[chosen]
    beside = [best, *(plan for plan in plans if plan is not best)]
    return Planning(
        job=job,
        ranking=tuple(plan.candidate for plan in plans),
        chosen=chosen,
        settings=_settings(best, cluster, profile),
        reasons=(best.layout.reason, *member_reasons(beside), *refused),
    )


def _settings(plan: ParallelPlan, cluster: Cluster, profile: Profile) -> Settings:
    layout = plan.layout
    changed = {name: after for name, (_, after) in layout.options.items()}
    batch_size = int(changed.get("batch_size", profile.training.batch_size))
    if plan.is_whole:
        device = layout.members[0][0].name
        whole = MemberPlan(rank=0, name=device, batch_size=batch_size)
        members = [whole.on_device(machine=cluster.machine(device).machine_name)]
    else:
        members = [_member(rank, stages, batch_size, layout, cluster) for rank, stages in enumerate(layout.members)]
    stages = {"stages": len(layout.members[0])} if len(members) > 1 else {}
    return Settings(
        options={"layout": layout.layout, **stages, **changed, **plan.options},
        members=tuple(members),
        engine="mesh",
        left_out=tuple(sorted({m.name for m in cluster.machines if m.trains} - {*plan.candidate.choice.members})),
    )


def _member(
    rank: int, stages: Sequence[StageForecast], batch_size: int, layout: LayoutCandidate, cluster: Cluster
) -> MemberPlan:
    machines = [cluster.machine(stage.name).machine_name for stage in stages]
    devices = tuple(
        DevicePlan(machine=machine, blocks=(stage.start, stage.end), ahead=layout.extra)
        for machine, stage in zip(machines, stages, strict=True)
    )
    name = member_name(machines, [stage.name for stage in stages], len(layout.members) == 1)
    return MemberPlan(rank=rank, name=name, batch_size=batch_size, devices=devices)
