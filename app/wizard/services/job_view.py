"""The job as the set-up shows it: options with values and errors, the data set, and the machines' memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.wizard.services.outside import Outside
from app.wizard.state.data_actions import LEAVE_OUT, Selection
from app.wizard.state.records import (
    MAIN,
    Assessment,
    DataSummary,
    Fit,
    ItemStatus,
    JobAnswers,
    JobForm,
    JobOption,
    MachineRow,
    Tell,
)
from distributed.checks.findings import Health
from distributed.checks.job import free_memory, memory_level
from distributed.planning.memory.fitting import FreeMemory, fit_to_budgets
from profiles.errors import BadInput, counted
from profiles.files.layers import DEFAULT
from profiles.files.library import Library
from profiles.files.resolve import Resolved, load_profile
from profiles.installation import relative_path
from profiles.options import OptionSpec, check_value, memory_saving_settings, option_names, options
from profiles.quantities import setting_text
from profiles.schema import Profile
from training.hardware.resources import total_memory
from training.numerics.schedule import enough_epochs
from training.tasks.inputs.model_size import ModelSize
from training.tasks.published_models import hub_notes, usable_profile
from training.tasks.registry import size_for

_OWN = ("hosts", "workers", "layout", "stages", "offload", "simulate", "shares", "output_dir")
"""Options that the set-up decides itself, or that do not belong to the job."""
WAYS = {"strategy": "auto", "engine": "auto", "codec": "auto"}
"""Options left to the planner unless the user or a saved profile sets them."""


def resolved(answers: JobAnswers, config: Path | None = None, complete: bool = True) -> Resolved:
    """Return the profile with the user's choices; strategy, engine and codec are left to the planner unless chosen.

    Raises:
        BadInput: the profile cannot be used.
    """
    overrides = dict(answers.options)
    library = Library.open(config)
    entry = library.find("profile", answers.profile)
    saved = entry is not None and entry.file.path != library.config.path
    if not saved and load_profile(answers.profile, {}, config, complete=False).origins["hosts"] == DEFAULT:
        overrides = {**WAYS, **overrides}
    return usable_profile(answers.profile, overrides, config, complete=complete)


# ------------------------------------------------------------------------------------------------------------- options


def job_of(answers: JobAnswers, config: Path | None = None) -> JobForm:
    """Return the options, each with its error if its value is invalid.

    Raises:
        BadInput: there is no such profile.
    """
    library = Library.open(config)
    try:
        plain = resolved(JobAnswers(answers.profile), config, complete=False)
    except BadInput:  # its model is gone: the form still takes another one
        plain = load_profile(answers.profile, {}, config, complete=False)
    strategy = dict(answers.options).get("strategy", plain.value("strategy"))
    overrides = {name: text for written, text in answers.options for name in option_names(written, strategy)}
    problems = {name: problem for name, text in overrides.items() if (problem := _problem(name, text))}
    current, problem_of_all = plain, ""
    try:
        fitting = tuple(pair for pair in overrides.items() if pair[0] not in problems)
        current = resolved(JobAnswers(answers.profile, fitting), config, complete=False)
    except BadInput as error:
        guilty = error.option if error.option in overrides and error.option not in _OWN else ""
        problem_of_all = "" if guilty else str(error)
        named = f"'{overrides[guilty]}': " if guilty in ("model", "dataset") else ""  # other options' rows show it
        problems[guilty] = f"{named}{error.problem}" if guilty else error.message
    rows = [
        JobOption(
            spec,
            overrides.get(spec.name, current.value(spec.name)),
            plain.value(spec.name),
            problems.get(spec.name, ""),
            spec.name in overrides,
        )
        for spec in options()
        if spec.name not in _OWN and (_is_read(spec, current.profile) or spec.name in overrides)
    ]
    profile, remark, fix = current.profile, "", ""
    if profile.name != answers.profile:  # a substitute profile
        remark = f"the model of {answers.profile} cannot be downloaded (no internet)"
        fix = f"a small new model is trained instead, by the profile {profile.name}"
    elif not problems:
        remark = "; ".join(hub_notes(profile))
    return JobForm(
        options=tuple(sorted(rows, key=lambda row: MAIN.index(row.name) if row.name in MAIN else len(MAIN))),
        models=tuple(library.names("model")),
        datasets=tuple(library.names("dataset")),
        model=overrides.get("model") or profile.model_name or profile.model.model_path,
        dataset=overrides.get("dataset") or profile.dataset_name or profile.data.dataset_path,
        assessment=Assessment(
            status=ItemStatus.FAILED if problem_of_all or problems.keys() & {"model", "dataset", ""} else ItemStatus.OK,
            cause=problem_of_all
            or next((problems[name] for name in ("model", "dataset", "") if name in problems), remark),
            fix="choose another one" if problems.keys() & {"model", "dataset"} else fix,
        ),
    )


def _is_read(spec: OptionSpec, profile: Profile) -> bool:
    return spec.is_read_by(profile.model.task) and spec.is_read_with(profile.strategy.strategy)


def _problem(name: str, text: str) -> str:
    if name in ("model", "dataset"):
        return ""
    try:
        return check_value(name, text) or ""
    except KeyError:
        return "there is no such option"


# ---------------------------------------------------------------------------------------------------------------- data


def data_of(profile: Profile, outside: Outside) -> DataSummary:
    """Read a summary of a profile's data set."""
    if not profile.data.dataset_path and profile.model.trait in ("speech", "texts"):
        return _unusable("not chosen", "no data set is chosen",
                         "choose one: the folder of your recordings and their table, or the name of one on the hub; "
                         "'data prepare' and 'data segment' make such a folder of others")  # fmt: skip
    summary = outside.look_at_data(profile)
    salvageable = bool(summary.get("salvageable"))
    if "error" in summary:
        fix = LEAVE_OUT if salvageable else str(summary.get("hint", ""))
        unusable = _unusable("cannot be used", str(summary["error"]), fix)
        return replace(unusable, salvageable=salvageable, problems=tuple(map(str, summary.get("problems", ()))))
    splits = tuple((str(split), int(count)) for split, count in dict(summary.get("splits", {})).items())
    samples = dict(splits).get("train", 0)
    few = str(summary.get("few", ""))
    broken, total = int(summary.get("broken_count", 0)), max(1, int(summary.get("looked_at", 0)))
    too_many = broken / total > profile.data.max_broken_share
    too_long = dict(summary.get("too_long", {}))
    if too_long:
        return replace(
            _unusable("too long", str(too_long["error"]), str(too_long["hint"])),
            samples=samples, splits=splits, instead=str(too_long.get("instead", "")),
        )  # fmt: skip
    epochs = enough_epochs(samples, profile.training)
    are_few = epochs != profile.training.epochs
    return DataSummary(
        samples=samples,
        epochs=setting_text(epochs) if are_few else "",
        hours=float(summary["hours"]) if "hours" in summary else None,
        columns=tuple(map(str, summary.get("columns", ()))),
        splits=splits,
        broken=tuple(map(str, summary.get("broken", ()))),
        broken_count=broken,
        notes=tuple(map(str, summary.get("notes", ()))),
        examples=tuple(map(str, summary.get("examples", ()))),
        assessment=Assessment(
            status=ItemStatus.FAILED if too_many else ItemStatus.WARNING if broken or few else ItemStatus.OK,
            words=f"{samples:,} {summary.get('unit', 'samples')}" if samples else str(summary.get("note", "found")),
            cause=f"{broken} of {counted(total, 'recording')} cannot be read" if broken else few,
            fix=LEAVE_OUT if too_many else "they are left out" if broken else "",
        ),
        salvageable=salvageable and too_many,
    )


def selection_of(profile: Profile, outside: Outside, tell: Tell) -> Selection:
    """Make a data set of the recordings that can be read, in a folder beside those of a profile or, if that is
    read-only, at home.

    Raises:
        BadInput: nothing can be read, or nothing can be written there.
    """
    source = Path(profile.data.dataset_path).expanduser()
    beside = source.absolute().with_name(f"{source.stem if source.is_file() else source.name}-readable")
    folder = beside if os.access(beside.parent, os.W_OK) else Path.home() / beside.name
    made = outside.select_readable(str(source), str(folder), profile.data.text_column, tell)
    reasons = [f"{count} {reason}, such as {made['examples'][reason]}" for reason, count in made["left_out"].items()]
    used = sum(int(size["clips"]) for size in made["splits"].values())
    return Selection(relative_path(folder), used, tuple(reasons))


def _unusable(words: str, cause: str, fix: str) -> DataSummary:
    return DataSummary(assessment=Assessment(status=ItemStatus.FAILED, words=words, cause=cause, fix=fix))


# -------------------------------------------------------------------------------------------------------------- memory


def fits_of(machines: Sequence[MachineRow], profile: Profile, health: Mapping[str, Health]) -> list[Fit]:
    """Return for each machine whether training fits its memory, by the rule of its check, and the changes this needs.

    Args:
        health: of the machines that were examined, by key.
    """
    size = size_for(profile)
    return [_fit(row, profile, size, _memory(row, profile, health)) for row in machines]


def _memory(row: MachineRow, profile: Profile, health: Mapping[str, Health]) -> FreeMemory:
    if row.key in health:
        return free_memory(health[row.key], profile.training.device)
    if not row.here:
        return FreeMemory()
    import psutil  # 20 ms, not needed if only other machines train

    return FreeMemory(int(psutil.virtual_memory().available), total_memory()[0])


def _fit(row: MachineRow, profile: Profile, size: ModelSize | None, memory: FreeMemory) -> Fit:
    needed, free = memory.need(profile, size) if size is not None else 0, memory.free
    fit = Fit(row.key, row.name, needed, free, status=ItemStatus.OK)
    if not needed or not free:
        missing = "the model's size" if not needed else "its free memory"
        return replace(fit, words="not known yet", cause=f"{missing} is not known before it has been measured")
    try:
        fitted = fit_to_budgets(profile, size, [memory.budget(row.name)], alone=False)
    except BadInput as error:
        return replace(fit, status=ItemStatus.FAILED, words="does not fit", cause=error.message, fix=error.hint)
    fit = replace(fit, needed=fitted.bytes_after or needed, words="fits", cause=fitted.line)
    if memory_level(fit.needed, free, memory.total, estimated=True) == "warning":
        less = ", ".join(["a smaller batch_size", *memory_saving_settings(profile.model.task)])
        cause, fix = "other programs use the memory that it needs", f"close programs there, or {less}"
        return replace(fit, status=ItemStatus.WARNING, words="tight", cause=cause, fix=fix)
    return fit
