"""A run that is resumed with fewer members, more, and others than it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from group import Member, Serve, run_group
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput, ExitCode
from training.records.events import StepEvent, WarningEvent
from training.records.plan import DevicePlan, MemberPlan, RunPlan
from training.run.local_plan import with_workers
from training.run.members.other_members import with_newcomers
from training.run.orders import Command, Control

OWN = {name: {"sync_interval": 4} for name in ("diloco", "async_diloco", "noloco")}


def attempt(plan: RunPlan, number: int, members: int, absent: tuple[int, ...]) -> RunPlan:
    """Return the plan of an attempt with so many members in all, of which some are absent."""
    new = [MemberPlan(rank=rank, name=f"worker-{rank}", batch_size=4) for rank in range(plan.world_size, members)]
    return with_newcomers(plan, new).model_copy(update={"absent": absent, "resume": number > 1, "attempt": number})


def stop_after(step: int) -> Control:
    control = Control()
    if step:
        control.post(Command(command="stop", at_step=step))
    return control


def steps(member: Member) -> list[int]:
    return [event.step for event in member.events if isinstance(event, StepEvent)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "async_diloco", "noloco", "sparta"])
def test_three_members_then_two_then_four_then_others(tmp_path: Path, serve: Serve, strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "owned": {strategy: OWN[strategy]} if strategy in OWN else {}}
    training, evaluation = {"max_steps": 0, "epochs": 10}, {"eval_interval": 4}  # 40 steps of 12 samples
    plan = toy_plan(3, training, evaluation=evaluation, strategy=options)
    before = 0
    for number, (members, absent) in enumerate([(3, ()), (3, (1,)), (5, (1,)), (6, (0, 1, 2))], 1):
        plan = attempt(plan, number, members, absent)
        last = 8 * number if number < 4 else 0
        trained = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path, lambda _: stop_after(last))  # noqa: B023
        assert sorted(trained) == [rank for rank in range(members) if rank not in absent]
        assert [member.error for member in trained.values()] == [None] * len(trained)
        warnings = [e.message for m in trained.values() for e in m.events if isinstance(e, WarningEvent)]
        assert not [line for line in warnings if "no valid figures" in line]
        first = [min(steps(member), default=before + 1) for member in trained.values()]
        assert all(before < one <= before + (8 if strategy == "async_diloco" else 1) for one in first)
        assert {member.trainer.total_steps for member in trained.values()} == {40}
        before = max(member.trainer.position.step for member in trained.values())
    assert {member.ending for member in trained.values()} == {ExitCode.DONE}
    assert sorted(next(iter(trained.values())).trainer.position.batch_sizes) == [3, 4, 5]


@pytest.mark.parametrize(("workers", "absent"), [(2, (2,)), (3, ()), (5, ())])
def test_the_workers_of_this_machine_are_counted(workers: int, absent: tuple[int, ...]) -> None:
    plan = toy_plan(3)
    other = with_workers(plan, workers)
    assert (other.world_size, other.absent) == (max(3, workers), absent)
    assert (other.hash(), other.global_batch) == (plan.hash(), plan.global_batch)
    assert with_workers(other.model_copy(update={"absent": ()}), 4).absent == tuple(range(4, other.world_size))


@pytest.mark.parametrize("data", [{"split": "dirichlet:0.5"}, {"local_data": True}])
def test_divided_data_take_no_others(data: dict[str, Any]) -> None:
    plan = toy_plan(2)
    profile = plan.profile.model_copy(update={"data": plan.profile.data.model_copy(update=data)})
    plan = plan.model_copy(update={"profile": profile})
    assert with_workers(plan.model_copy(update={"members": (*plan.members,)}), 1).absent == (1,)
    with pytest.raises(BadInput, match="is divided already: worker-2 would have none"):
        with_workers(plan, 3)


def test_members_of_several_devices_take_no_others() -> None:
    plan = toy_plan(2)
    staged = tuple(member.model_copy(update={"devices": (DevicePlan(), DevicePlan())}) for member in plan.members)
    with pytest.raises(BadInput, match="several members of several devices: x cannot hold a part"):
        with_newcomers(plan.model_copy(update={"members": staged}), [MemberPlan(rank=2, name="x", batch_size=1)])
