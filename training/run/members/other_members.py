"""The plan of a run that is resumed with fewer members, more, or others.

Members that have gone stay in the plan as absent ones, so ranks and folders of snapshots keep their meaning. New ones
follow with the next ranks, and take weights, optimizer and position from a member that has them. Steps and learning
rate stay as they were planned.
"""

from __future__ import annotations

from collections.abc import Sequence

from profiles.errors import BadInput
from profiles.split import split_of
from training.records.plan import DevicePlan, MemberPlan, RunPlan


def with_newcomers(plan: RunPlan, newcomers: Sequence[MemberPlan]) -> RunPlan:
    """Return a plan with further members.

    Args:
        newcomers: with the ranks after those of the plan.

    Raises:
        BadInput: the run takes no others.
    """
    if not newcomers:
        return plan
    names, data = ", ".join(member.name for member in newcomers), plan.profile.data
    hint = f"leave {names} out: fewer machines can go on"
    if plan.is_staged:
        problem = f"run {plan.run_id} has several members of several devices: {names} cannot hold a part of them"
        raise BadInput(problem, hint)
    if data.local_data or split_of(data.split).kind != "global":
        raise BadInput(f"the data of run {plan.run_id} is divided already: {names} would have none", hint)
    members = (*plan.members, *newcomers)
    return plan.model_copy(update={"members": members, "planned": plan.planned or plan.world_size})


def with_local_members(plan: RunPlan, devices: Sequence[DevicePlan]) -> RunPlan:
    """Return the plan of a run of workers of this machine that is resumed with so many members as there are devices:
    the first ones of the plan, and new ones after them.

    Raises:
        BadInput: it takes no others.
    """
    size = plan.profile.training.batch_size
    newcomers = [MemberPlan(rank=rank, name=f"worker-{rank}", batch_size=size)
                 for rank in range(plan.world_size, len(devices))]  # fmt: skip
    grown = with_newcomers(plan, newcomers)
    there = zip(grown.members, devices, strict=False)
    members = tuple(member.model_copy(update={"devices": (device,)}) for member, device in there)
    absent = tuple(range(len(devices), grown.world_size))
    return grown.model_copy(update={"members": (*members, *grown.members[len(devices) :]), "absent": absent})
