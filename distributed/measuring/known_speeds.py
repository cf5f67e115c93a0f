"""Shares by speed for a strategy that was named by hand: nothing is measured for it, but members may be measured
already."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.measuring.machine_figures import placements_of
from distributed.measuring.measure import MeasurementResult, MeasureOptions, usable_speeds
from distributed.planning.documents.document import job_of
from distributed.planning.prediction import Predictor
from distributed.preparation.code_sync import collect
from distributed.preparation.preflight import Ready
from profiles.schema import Profile
from training.records.plan import RunPlan
from training.run.local_plan import balances


def with_known_speeds(plan: RunPlan, profile: Profile, machines: Sequence[Ready], options: MeasureOptions) -> RunPlan:
    """Return the plan with shares by speed, as the planner divides them, if all members have recent figures; else, and
    where shares do not follow speed, the plan as it is.

    Raises:
        BadInput: a file of the job cannot be read.
    """
    if plan.world_size < 2 or not balances(plan):
        return plan
    speeds = usable_speeds(placements_of(machines, plan.members), collect(plan), options)
    names = tuple(member.name for member in plan.members)
    if speeds.keys() != set(names):
        return plan
    measured = MeasurementResult([*names], speeds=[*speeds.values()], model_path=profile.model.model_path)
    figures = measured.figures
    split = Predictor(figures.cluster, job_of(profile, figures.workload)).split(names, plan.profile.strategy.strategy)
    if split is None or not split.fits or split.accumulation != profile.training.gradient_accumulation:
        return plan
    sizes = [split.batches[name] for name in names]
    if sum(sizes) != sum(member.batch_size for member in plan.members):
        return plan
    options.tell(f"shares of a step by measured speed: {', '.join(map('{} {}'.format, names, sizes))} samples")
    members = (m.model_copy(update={"batch_size": size}) for m, size in zip(plan.members, sizes, strict=True))
    return plan.model_copy(update={"members": tuple(members)})
