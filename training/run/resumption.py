"""The plan with which an earlier run goes on: as it was planned, or for longer than that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from profiles.errors import BadInput
from profiles.installation import program
from profiles.optimisation import TrainingSettings
from profiles.quantities import setting_text
from profiles.schema import PUBLISHED
from training.records.bounded_fields import first_problem
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder, has_snapshots

LENGTHS = ("epochs", "max_steps")
"""Options that a run may go on with in place of its own: how long it trains."""


def plan_to_resume(path: Path, lengths: Mapping[str, Any] | None = None) -> RunPlan:
    """Return the plan to resume the run in ``path`` with: exactly as it was planned, or for longer.

    Args:
        lengths: values of :data:`LENGTHS`; with more of them a completed run goes on, too.

    Raises:
        BadInput: it is completed and is to train no longer, or has no snapshot.
    """
    folder = RunFolder.open(path)
    plan = folder.plan_before()
    is_completed, is_local = folder.metadata.status == "completed", folder.metadata.run_type == "local"
    if is_completed and not lengths:
        hint = (
            f"see its result with: {program('runs', 'show', plan.run_id)}; --resume {plan.run_id} --set epochs=N trains"
        )
        raise BadInput(f"run {plan.run_id} is completed: nothing to resume", f"{hint} on")
    if is_completed and not is_local:
        raise BadInput(f"the machines of run {plan.run_id} kept no snapshot after its end", _anew(plan, path))
    if is_local and not has_snapshots(path):  # other machines know of their own
        hint = _anew(plan, path) if is_completed else "start a new run instead"
        raise BadInput(f"run {plan.run_id} has no snapshot: there is nothing to resume", hint)
    attempt = (folder.metadata.earlier or folder.metadata).attempt + 1
    plan = plan.model_copy(update={"resume": True, "attempt": attempt, "absent": ()})
    return _longer(plan, lengths) if lengths else plan


def _anew(plan: RunPlan, path: Path) -> str:
    """Return how a new run begins with the weights of this one."""
    if plan.profile.model.trait == "own code" or not (path / "model").is_dir():
        return f"start a new run, with snapshot_interval below {plan.profile.snapshot.snapshot_interval}"
    job = (plan.profile.name,) if plan.profile.model.task in PUBLISHED else ("--task", plan.profile.model.task)
    command = program("distributed-train", *job, "--model-path", str(path / "model"))
    return f"train its weights on in a new run: {command}, and the other options"


def _longer(plan: RunPlan, lengths: Mapping[str, Any]) -> RunPlan:
    """Return the plan of a longer run, whose snapshots are those of ``plan``."""
    before = plan.profile.training
    changes = {"max_steps": 0, **lengths} if "epochs" in lengths else dict(lengths)
    try:
        after = TrainingSettings.model_validate({**before.model_dump(), **changes})
    except ValidationError as error:
        raise BadInput(f"--resume {plan.run_id}: {first_problem(error)}", "give a longer training") from None
    name = "max_steps" if after.max_steps else "epochs"
    had, gets = getattr(before, name), getattr(after, name)
    if bool(before.max_steps) == bool(after.max_steps) and gets <= had:
        raise BadInput(f"run {plan.run_id} was planned for {name} = {setting_text(had)}", f"set {name} above that")
    profile = plan.profile.model_copy(update={"training": after})
    return plan.model_copy(update={"profile": profile, "began_as": plan.hash()})
