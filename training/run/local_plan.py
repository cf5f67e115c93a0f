"""The plan of a run on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from profiles.errors import BadInput, RunFailed, counted
from profiles.schema import Profile
from profiles.split import split_of
from training.data.sample_order import shares_to_batch_sizes
from training.hardware.resources import count_gpus, whole_cores
from training.layouts.compatibility import DIVIDED, check_layout, refusal_of_layout
from training.layouts.inside.checks import INSIDE_LAYOUTS
from training.records.bounded_fields import first_problem
from training.records.plan import JOB_FACTORY, DevicePlan, MemberPlan, RunPlan
from training.records.run_files import explain_errors, write_atomically
from training.records.run_folder import RunFolder, new_run_id, plan_text
from training.run.members.other_members import with_local_members
from training.strategies.costs import start_of
from training.strategies.registry import (
    check_settings,
    check_strategy,
    default_strategy,
    scaling_rule_of,
    segment_steps_of,
)
from training.tasks.published_models import with_local_model

logger = logging.getLogger("muster.plan")
SESSION = "session"
"""In the details of a ``running`` event: the options that a launched script gives its session."""


def plan_local_run(
    profile: Profile,
    workers: int,
    *,
    on_this_machine: bool = True,
    simulated: bool = False,
    count: Callable[[], int] = count_gpus,
) -> RunPlan:
    """Return the plan of a run of ``workers`` workers, on this machine or (not ``on_this_machine``) on another one.

    Args:
        simulated: whether they are one process and take turns.
        count: returns the number of GPUs of this machine.

    Raises:
        BadInput: zero workers, shares that do not fit, or a strategy that is unknown or incompatible with the data or
            with other settings.
    """
    _check_count(workers)
    check_devices(profile, workers, simulated)
    members, text = workers // stages_of(profile, workers), profile.run.shares
    shares = [float(part) for part in text.split(",")] if text else [1.0] * members
    if len(shares) != members:
        message = f'shares = "{text}" does not fit {counted(members, "worker" if members == workers else "member")}'
        raise BadInput(message, "set one positive number per worker, or leave it empty")
    batch_sizes = shares_to_batch_sizes(shares, profile.training.batch_size)
    strategy = profile.strategy
    name = default_strategy() if strategy.strategy == "auto" else check_strategy(strategy.strategy)
    rule = scaling_rule_of(profile.training.lr_scaling, name, start_of(profile))
    update = {
        "strategy": strategy.model_copy(update={"strategy": name}),
        "training": profile.training.model_copy(update={"lr_scaling": rule}),
    }
    chosen = with_local_model(profile).model_copy(update=update)
    if workers > 1:
        check_settings(chosen.strategy)
    if workers > 1 and segment_steps_of(chosen.strategy):
        _check_own_pace(chosen)
    devices = _devices(profile, workers, simulated, count if on_this_machine and not simulated else lambda: 0)
    plan = RunPlan(
        run_id=new_run_id(),
        profile=chosen,
        members=_members(chosen, batch_sizes, devices),
        engine="simulated" if simulated else "nccl" if strategy.engine == "nccl" else "mesh",
    )
    if profile.run.balance == "on" and (reason := why_not_balanced(plan)):
        raise BadInput(f"balance = on {reason}", "set balance = auto", option="balance")
    return plan


def _check_count(workers: int) -> None:
    if workers < 1:
        raise BadInput(f"{counted(workers, 'worker')} cannot train", "pass --local 1 or more")


def _members(profile: Profile, batch_sizes: Sequence[int], devices: Sequence[DevicePlan]) -> tuple[MemberPlan, ...]:
    """Return members of as many devices as each has."""
    stages = stages_of(profile, len(devices))
    groups = [(*devices[first : first + stages],) for first in range(0, len(devices), stages)]
    return tuple(
        MemberPlan(
            rank=rank,
            name=f"worker-{rank}",
            batch_size=batch_sizes[rank],
            data=own_data(profile, rank),
            devices=group,
        )
        for rank, group in enumerate(groups)
    )


def stages_of(profile: Profile, devices: int) -> int:
    """Return how many of a run's devices each member has."""
    if profile.run.layout in INSIDE_LAYOUTS:
        return devices
    return (profile.run.stages or devices) if profile.run.layout == "pipeline" else 1


def check_devices(profile: Profile, workers: int, simulated: bool = False) -> None:
    """Check the layout of a run of so many workers.

    Args:
        simulated: whether they are one process and take turns.

    Raises:
        BadInput: the layout does not work with that, or with a setting.
    """
    check_layout(profile)
    refusal = "is for workers that are not simulated" if simulated else refusal_of_layout(profile, workers)
    if profile.run.layout in DIVIDED and refusal:
        raise BadInput(f"layout = {profile.run.layout} {refusal}", "set layout = replicate", option="layout")


def _check_own_pace(profile: Profile) -> None:
    """Raise ``BadInput`` for settings that make no sense if members do not make the same steps."""
    name, data = profile.strategy.strategy, profile.data
    if data.local_data or split_of(data.split).kind != "global":
        hint = "leave out split and local_data, or take another strategy"
        raise BadInput(f"with {name} no part of the data belongs to one machine: it takes what is next", hint)
    if profile.evaluation.eval_local == "on":
        hint = "set eval_local = auto"
        raise BadInput(f"with {name} weights are not averaged all at once, so eval_local means nothing", hint)


def trains_objects(plan: RunPlan) -> bool:
    """Whether model and data are objects of a script, which alone can resume the run (``fit(resume=...)``)."""
    model = plan.profile.model
    return model.trait == "own code" and not model.model_path and plan.launch is None


def balances(plan: RunPlan) -> bool:
    """Whether the shares of a run follow the speed of its members."""
    choice = plan.profile.run.balance
    wanted = choice == "on" or (choice == "auto" and plan.own_folders and not plan.profile.run.shares)
    return wanted and not why_not_balanced(plan)


def why_not_balanced(plan: RunPlan) -> str:
    """Return why the shares of a run cannot follow speed, as words after ``balance = on``; empty: they can."""
    data, strategy = plan.profile.data, plan.profile.strategy
    reasons = {
        "has nothing to do for a launched script": plan.launch is not None,
        "moves no samples between simulated members": plan.engine == "simulated",
        "is for members of one device each": plan.is_staged,
        f"has nothing to do: with {strategy.strategy} members take samples as fast as they can": bool(
            segment_steps_of(strategy)
        ),
        "moves no samples: they belong to one machine each": data.local_data or split_of(data.split).kind != "global",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def own_data(profile: Profile, rank: int, folder: str = "") -> str:
    """Return the path of a member's own data: ``folder``, or else the profile's path, with the member's rank for
    ``{rank}``; empty if data do not stay on machines."""
    if not profile.data.local_data or profile.model.model_path == JOB_FACTORY:
        return ""
    return (folder or profile.data.dataset_path).replace("{rank}", str(rank))


def with_workers(plan: RunPlan, workers: int, layout: str = "", count: Callable[[], int] = count_gpus) -> RunPlan:
    """Return the plan of a run that is resumed with another number of workers: with so many members where each worker
    is one, else these hold the one model together.

    Args:
        layout: what each of several workers holds; empty: as before, or a stage of a pipeline.

    Raises:
        BadInput: it is not of workers of this machine, or is divided otherwise; or see :func:`plan_local_run`.
    """
    _check_count(workers)
    before = plan.profile.run.layout
    if workers == len(plan.processes) and layout in ("", "auto", before):
        return plan
    is_local = plan.engine != "simulated" and not any(member.machine for member in plan.members)
    if is_local and plan.world_size > 1 and not plan.is_staged and layout in ("", "auto", "replicate"):
        return with_local_members(plan, _devices(plan.profile, workers, False, count))
    if workers > 1 and layout == "replicate":
        raise BadInput("with layout = replicate one worker goes on with the one model", "add --local 1")
    if workers == 1 and layout in DIVIDED:
        raise BadInput(f"layout = {layout} needs 2 workers or more, not 1", "add --local 2", option="layout")
    divided = next((name for name in (layout, before) if name in DIVIDED), "pipeline")
    member, *others = plan.members
    if others or plan.engine != "mesh" or any(device.machine for device in member.devices):
        message = f"run {plan.run_id} goes on with the workers it began with: only one model that lies on workers of "
        raise BadInput(f"{message}this machine can be cut otherwise", "leave the number of workers out")
    changes = {"layout": divided if workers > 1 else "replicate", "workers": workers, "stages": 0}
    profile = plan.profile.model_copy(update={"run": plan.profile.run.model_copy(update=changes)})
    check_devices(profile, workers)
    devices = (*_devices(profile, workers, False, count),)
    return plan.model_copy(update={"profile": profile, "members": (member.model_copy(update={"devices": devices}),)})


def _devices(profile: Profile, workers: int, shares_process: bool, count: Callable[[], int]) -> list[DevicePlan]:
    """Return a device for each worker; ``count`` returns the number of GPUs among which they are divided."""
    threads = profile.training.threads or max(1, whole_cores() // (1 if shares_process else workers))
    kind = profile.training.device
    return [DevicePlan(kind=kind, index=index, threads=threads) for index in _device_indices(kind, workers, count)]


def _device_indices(device: str, workers: int, count: Callable[[], int]) -> list[int]:
    """Give each worker a GPU of its own; where there are too few, they take turns."""
    gpus = count() if workers > 1 and device in ("auto", "cuda") else 0
    if 0 < gpus < workers:
        logger.warning("%s share %s", counted(workers, "worker"), counted(gpus, "GPU"))
    return [rank % gpus if gpus else 0 for rank in range(workers)]


def record_session(folder: RunFolder, plan: RunPlan, sections: object) -> RunPlan:
    """Return the plan of a launched script that trains in a session, after it was written into the run folder.

    Args:
        sections: of the profile, as a member reports them.

    Raises:
        RunFailed: they are no options of this version, or cannot be written.
    """
    try:
        options = TypeAdapter(dict[str, Any]).validate_python(sections)
        profile = Profile.model_validate({"name": plan.profile.name} | options)
    except ValidationError as error:
        hint = "run the same version of Muster on all machines"
        raise RunFailed(f"the script's session has invalid options: {first_problem(error)}", hint) from error
    plan = plan.in_session(profile)
    with explain_errors(folder.path, kind=RunFailed):
        write_atomically(folder.path / "plan.json", plan_text(plan))
    folder.update_metadata(strategy=profile.strategy.strategy, config=plan.profile.model_dump(mode="json"))
    return plan
