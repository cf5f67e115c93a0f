"""What settings a layout cannot have, whatever machines it lies on: refused as soon as a profile is read."""

from __future__ import annotations

from profiles.declarations import declare_check
from profiles.errors import BadInput
from profiles.schema import Profile
from training.layouts.inside.checks import INSIDE_LAYOUTS, refusal_inside
from training.strategies.registry import refusal_in_parts
from training.tasks.registry import inputs_of

DIVIDED = ("pipeline", *INSIDE_LAYOUTS)
"""Layouts of members that have several devices."""


def check_layout(profile: Profile) -> None:
    """Check the settings of a profile against its layout.

    Raises:
        BadInput: they are not compatible; names the option to change.
    """
    run = profile.run
    if run.stages and run.layout != "pipeline":
        message = f"stages = {run.stages} is for a pipeline, and layout = {run.layout}"
        raise BadInput(message, "set layout = pipeline, or leave stages out", option="stages")
    if run.offload and run.layout != "shard":
        message = "offload = true: only shards can be kept in main memory"
        raise BadInput(message, "set layout = shard, or leave it out", option="offload")
    if reason := refusal_of_layout(profile):
        raise BadInput(f"layout = {run.layout} {reason}", "set layout = replicate", option="layout")


def refusal_of_layout(profile: Profile, devices: int = 0) -> str:
    """Return why the layout of a profile is not possible, as words after its name; empty: it is.

    Args:
        devices: of the run; 0: not known yet.
    """
    run = profile.run
    if run.layout not in DIVIDED:
        return ""
    if run.simulate or run.cluster:
        return "is for workers that are not simulated"
    if devices == 1:
        return "needs 2 workers or more, not 1"
    return _refusal_in_pipeline(profile, devices) if run.layout == "pipeline" else refusal_inside(profile)


def _refusal_in_pipeline(profile: Profile, devices: int) -> str:
    """Return why the settings of a profile do not work with stages; empty: they do."""
    training, strategy, stages = profile.training, profile.strategy, profile.run.stages
    of_task, is_only = inputs_of(profile.model.task).refusal_in_stages(profile), stages in (0, devices)
    of_strategy = "" if is_only or strategy.strategy == "auto" else refusal_in_parts(strategy)
    reasons = {
        f"needs members of 2 devices or more, not stages = {stages}": stages == 1,
        f"cannot divide {devices} devices into members of stages = {stages}": bool(stages and devices % stages),
        f"has one member, no use for {strategy.strategy}": is_only and strategy.strategy not in ("auto", "allreduce"),
        of_strategy: bool(of_strategy),
        "has one member: engine = nccl has nothing to do": is_only and strategy.engine == "nccl",
        "exchanges through the mesh, not engine = nccl": strategy.engine == "nccl",
        "has one member: shares divide nothing": is_only and bool(profile.run.shares),
        "gives all devices of a member the same data: local_data is of no use": profile.data.local_data,
        "leaves no worker with weights of its own: eval_local = on": is_only and profile.evaluation.eval_local == "on",
        "needs one loss scale for all stages, not mixed_precision = fp16": training.mixed_precision == "fp16",
        "does not compile blocks yet: compile = on": training.compile == "on",
        of_task: bool(of_task),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def load() -> None:
    """Declare the check of what devices hold; see :mod:`profiles.declarations`."""
    declare_check("run", check_layout)
