"""What a data set holds, found without training on it and without loading torch.

The start of a run looks here first: whether the data set can be read. Nothing is decoded.
``python -m training.workers.data_findings PROFILE.json`` prints all findings.

Standard input is a profile's document (:class:`profiles.schema.Profile`). Standard output is one JSON object::

    {"splits": {"train": 6400}, "hours": 1.9, "columns": ["id", ...], "broken": ["a.wav: ..."], "broken_count": 1,
     "examples": ["seven two", ...], ...}
    {"splits": ..., "too_long": {"error": ..., "hint": ..., "instead": "PROFILE"}}
    {"error": ..., "hint": ..., "problems": ["train.csv:12: column text is empty", ...], "salvageable": true}

``salvageable``, where something cannot be read: whether a data set may be made of the rest. The tables are read as a
run reads them, by the inputs of the profile's task
(:class:`training.tasks.inputs.base.TaskInputs`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from profiles.errors import MusterError
from profiles.files.resolve import NO_OVERRIDES, Resolved, load_profile
from profiles.locations import is_on_hub
from profiles.quantities import setting_text
from profiles.schema import Profile
from training.numerics.schedule import (
    IN_EACH_QUARTER,
    ends_in_warm_up,
    enough_epochs,
    few_samples_remark,
    is_length_open,
    steps_in,
)
from training.records.plan import RunPlan
from training.tasks.published_models import Tell, usable_profile
from training.tasks.registry import inputs_of


def findings(profile: Profile) -> dict[str, Any]:
    """Return what the data set of a profile holds.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    inputs = inputs_of(profile.model.task)
    if not inputs.reads_dataset:
        return {"splits": {}, "note": f"made by {profile.model.model_path}"}
    if profile.data.local_data:
        return {"splits": {}, "note": "each machine has its own, which stay there"}
    if is_on_hub(profile.data.dataset_path):
        return {"splits": {}, "note": "on the hub: it is downloaded when the run begins"}
    return inputs.findings(profile)


def check_data(profile: Profile) -> None:
    """Read the tables of a profile's data set, and check that its files exist; nothing is decoded.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    inputs = inputs_of(profile.model.task)
    if inputs.reads_dataset and _is_local(profile):  # each machine checks data of its own
        inputs.check_data(profile)


def _is_local(profile: Profile) -> bool:
    return not (profile.data.local_data or is_on_hub(profile.data.dataset_path))


def usable_for_data(
    name: str,
    overrides: Mapping[str, str] = NO_OVERRIDES,
    tell: Tell = lambda line: None,
    check: Callable[[Profile], None] = lambda profile: None,
) -> Resolved:
    """Return a profile whose model is available and suits its data set.

    That of :func:`usable_profile`; if it is a stand-in that cannot take all samples, the profile that can, with the
    options that the task takes over. A profile or a model that the user has named stays. Where the data set is the
    user's and the length of the run is not, the run is long enough for few samples.

    Args:
        check: validates what else the run needs, after its data and before a model is fetched.

    Raises:
        BadInput: as :func:`usable_profile`, or the data set cannot be used.
    """

    def check_before_fetching(profile: Profile) -> None:
        check_data(profile)
        check(profile)

    resolved = usable_profile(name, overrides, tell=tell, check=check_before_fetching)
    profile, inputs = resolved.profile, inputs_of(resolved.profile.model.task)
    named = profile.name == name or bool({"model", "model_path"} & overrides.keys())
    if not inputs.reads_dataset or not _is_local(profile):
        return resolved
    options: Mapping[str, str] = overrides
    if not named and (substitute := inputs.substitute(profile)) is not None:
        tell(substitute.reason)
        options = {**substitute.options, **overrides}
        resolved = load_profile(substitute.profile, options)
    if not is_length_open(options):
        return resolved
    samples, training = inputs.training_samples(resolved.profile), resolved.profile.training
    if (number := enough_epochs(samples, training)) == training.epochs:
        return resolved
    epochs = setting_text(number)
    tell(few_samples_remark(samples, training.epochs, epochs))
    return load_profile(resolved.profile.name, {**dict([IN_EACH_QUARTER]), **options, "epochs": epochs})


def check_data_of(plan: RunPlan) -> None:
    """Read the tables of all members of a run on this machine: see :func:`check_data`.

    Raises:
        BadInput: some cannot be used.
    """
    for profile in {plan.all_members[rank].data: plan.profile_of(rank) for rank in range(plan.world_size)}.values():
        data = profile.data.model_copy(update={"local_data": False})
        check_data(profile.model_copy(update={"data": data}))


def warm_up_remark(plan: RunPlan) -> str:
    """Return a remark on a run whose steps all lie in its warm-up; empty where they do not, or are not known yet.

    Raises:
        BadInput: the data set cannot be used.
    """
    profile, settings = plan.profile, plan.profile.training
    inputs, steps = inputs_of(profile.model.task), settings.max_steps
    if not steps and inputs.reads_dataset and _is_local(profile):
        steps = steps_in(inputs.training_samples(profile) / plan.global_batch, settings.epochs, settings.drop_last)
    return ends_in_warm_up(steps, profile)


def main() -> int:
    """Answer the profile on standard input."""
    profile = Profile.model_validate_json(sys.stdin.buffer.read())
    try:
        document = findings(profile)
    except MusterError as error:
        document = {"error": error.message, "hint": error.hint, "problems": list(getattr(error, "problems", ()))}
    if "error" in document or document.get("broken_count"):
        inputs = inputs_of(profile.model.task)
        document["salvageable"] = inputs.reads_dataset and _is_local(profile) and inputs.can_select(profile)
    json.dump(document, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
