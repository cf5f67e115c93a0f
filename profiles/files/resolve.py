"""Resolving a profile's name to validated settings with the origin of every value, and saving profiles.

A saved profile is ``profiles/saved/<name>.ini``, a file that can be shared and rerun by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from profiles.declarations import check_together, forms, is_valid_choice, nearest
from profiles.errors import BadInput
from profiles.files.environment import environment_layer
from profiles.files.ini import IniFile, parse_ini, read_text, with_section, write_atomically
from profiles.files.layers import (
    COMMAND_LINE,
    DEFAULT,
    NO_SETTINGS,
    Layer,
    Merged,
    Setting,
    SettingOrigin,
    is_automatic,
    layer_of,
    merge,
    override_layer,
    resolve_aliases,
    settings_to_fit,
    without_sections,
)
from profiles.files.library import FoundSection, Library, check_headings, check_name, saved_folder
from profiles.locations import absolute_location, absolute_path, remote_path, with_files
from profiles.options import (
    OptionSpec,
    as_text,
    canonical,
    check_value,
    explain_error,
    groups,
    hint_for,
    option_names,
    options,
    options_by_name,
    strategies_in,
)
from profiles.schema import Profile

NO_OVERRIDES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Resolved:
    """A validated profile."""

    profile: Profile
    origins: dict[str, SettingOrigin]
    """Origin of every option, by name."""
    stand_in: str = ""
    """Profile to train instead if this one's model is unavailable; empty: none."""

    def value(self, option: str) -> str:
        """Return the value of an option as written in an INI file."""
        return as_text(options_by_name()[canonical(option)].value_in(self.profile))


@dataclass(frozen=True)
class ProfileEntry:
    """A profile as listed."""

    name: str
    description: str
    source: Path
    error: str = ""
    """Why it cannot be used; empty when it can."""
    needs: str = ""
    """What must be given with it: ``dataset`` or ``model``; empty when it is complete."""


def load_profile(
    name: str, overrides: Mapping[str, str] = NO_OVERRIDES, config: Path | None = None, *, complete: bool = True
) -> Resolved:
    """Find, merge and validate a profile.

    Args:
        overrides: options and references by name, as text (the command line's); paths relative to the current folder.
        config: another ``config.ini``; its saved profiles are in ``profiles/saved`` next to it.
        complete: refuse a profile that leaves its model or data set to the command line.

    Raises:
        BadInput: an unknown name, section or option, or an invalid value; says where, and names the closest valid one.
    """
    resolved = resolve(Library.open(config), name, overrides, environment_layer())
    missing = _needs(resolved.profile)
    if complete and missing:
        missing_noun = {"model": "model", "dataset": "data set"}[missing]
        example = {"model": "--set model=FOLDER", "dataset": "--dataset FOLDER"}[missing]
        hint = f"pass {example}, or set '{missing}' in [profile:{name}]"
        raise BadInput(f"profile '{name}' names no {missing_noun}", hint)
    return resolved


def list_profiles(config: Path | None = None) -> list[ProfileEntry]:
    """Return all profiles: those of ``config.ini``, then the saved ones; invalid ones with their error.

    Raises:
        BadInput: ``config.ini`` cannot be read.
    """
    return _entries(Library.open(config))


def validate_config(path: Path | None = None) -> list[str]:
    """Return every problem of ``config.ini`` and its saved profiles, one line each."""
    try:
        library = Library.open(path)
    except BadInput as error:
        return [str(error)]
    problems: list[str] = []
    for file in library.files():
        for section in file.sections.values():
            problems += _section_problems(FoundSection(file, section))
    problems += [entry.error for entry in _entries(library) if entry.error]
    return list(dict.fromkeys(problems))


def profile_from_options(name: str, values: Mapping[str, Any], variables: Layer = NO_SETTINGS) -> Profile:
    """Make a profile from options by name, without any file.

    Args:
        variables: of the environment, below the options.

    Raises:
        BadInput: an unknown option or an invalid value.
    """
    layer = override_layer({key: as_text(value) for key, value in values.items()}, SettingOrigin("options"))
    below, above = resolve_aliases(without_sections(variables), without_sections(layer))
    return _validated(name, Merged(below | above, {}))


def resolve(library: Library, name: str, overrides: Mapping[str, str], variables: Layer = NO_SETTINGS) -> Resolved:
    """Merge and validate a profile of ``library``.

    Args:
        variables: the options that environment variables set; none where a profile is looked at for itself.

    Raises:
        BadInput: see :func:`load_profile`.
    """
    if library.find("profile", name) is None:
        raise _unknown_profile(library, name)
    merged = merge(library, name, override_layer(overrides, COMMAND_LINE), variables)
    profile = _validated(name, merged)
    origins = {
        spec.name: merged.settings[spec.name].origin if spec.name in merged.settings else DEFAULT for spec in options()
    }
    return Resolved(profile, origins, _stand_in(library, name))


def _stand_in(library: Library, name: str) -> str:
    setting = layer_of(library.find("profile", name)).get("stand_in")
    if setting is None or not setting.value:
        return ""
    others = [profile for profile in library.names("profile") if profile != name]
    if setting.value not in others:
        hint, prefix = hint_for(setting.value, others, ""), setting.describe("stand_in")
        raise BadInput("there is no other profile of this name", hint, option="stand_in", place=prefix)
    return setting.value


def _validated(name: str, merged: Merged) -> Profile:
    values_by_group: dict[tuple[str, str], dict[str, Any]] = {group: {} for group in groups()}
    data_are_remote = "local_data" in merged.settings and _differs(
        options_by_name()["local_data"], merged.settings["local_data"].value
    )
    for key, setting in merged.settings.items():
        if is_automatic(key, setting):
            continue
        spec = options_by_name()[key]
        is_remote = key == "dataset_path" and data_are_remote
        text = remote_path(setting.value, setting.origin.folder) if is_remote else _located(spec, setting)
        values_by_group[spec.section, spec.owner][spec.field] = text
    section_values: dict[str, Any] = {}
    # Owners first: a section holds their options.
    for (section, owner), model in sorted(groups().items(), key=lambda item: not item[0][1]):
        try:
            validated = model.model_validate(values_by_group[section, owner])
        except ValidationError as error:
            option, problem = explain_error(error.errors()[0], owner)
            setting = merged.settings.get(option, Setting("", DEFAULT))
            raise BadInput(problem, option=option, place=setting.describe(option)) from error
        if owner:
            values_by_group[section, ""].setdefault("owned", {})[owner] = validated
        else:
            section_values[section] = validated
    _refuse_unknown_strategy(section_values["strategy"].strategy, merged)
    _refuse_ignored(section_values["model"].task, section_values["strategy"].strategy, merged)
    _refuse_together("strategy", section_values["strategy"], merged)
    section_values["run"] = section_values["run"].model_copy(update={"fit_memory": settings_to_fit(merged)})
    names = {
        f"{kind}_name": merged.references[kind].value for kind in ("model", "dataset") if kind in merged.references
    }
    profile = Profile(name=name, **names, **section_values)
    _refuse_together("run", profile, merged)
    return profile


def _refuse_unknown_strategy(name: str, merged: Merged) -> None:
    """Refuse an unknown strategy now: otherwise only the machines would notice it."""
    if name == "auto":
        return
    prefix = merged.settings["strategy"].describe("strategy")
    try:
        if is_valid_choice("strategy", name):
            return
    except BadInput as error:
        raise BadInput(error.message, error.hint, option="strategy", place=prefix) from error
    choices = ["auto", *forms("strategy")]
    hint = hint_for(name, choices, f"known: {', '.join(choices)}")
    raise BadInput(f"unknown strategy '{name}'", hint, option="strategy", place=prefix)


def _refuse_together(section: str, settings: BaseModel, merged: Merged) -> None:
    """Refuse now what would be refused when the machines are ready, or begin to train."""
    try:
        check_together(section, settings)
    except BadInput as error:
        setting = merged.settings.get(error.option, Setting("", DEFAULT))
        prefix = setting.describe(error.option)
        raise BadInput(error.problem, error.hint, option=error.option, place=prefix) from error


def _refuse_ignored(task: str, strategy: str, merged: Merged) -> None:
    """Refuse options that were set for this job but that neither its task nor its strategy reads.

    Inherited options (from a group, a model, a variable, ...) are exempt, as they may be meant for other jobs; so are
    those of the profile if the command line has changed the task or the strategy. Aliases from before strategies had
    options of their own stay readable.
    """
    aliased_owners = {spec.owner for spec in options() if spec.alias}
    overridden = {key for key, setting in merged.settings.items() if setting.origin.file is None}
    for name, setting in merged.settings.items():
        spec, origin, hint = options_by_name()[name], setting.origin, ""
        uses_alias = origin.file is not None and setting.written_as == spec.alias and strategy in aliased_owners
        if not spec.is_read_by(task):
            decided_by, problem = "task", f"task = {task} does not read it, only {' and '.join(spec.tasks)}"
        elif not spec.is_read_with(strategy) and not uses_alias:
            decided_by, problem = "strategy", f"an option of {spec.owner}, which strategy = {strategy} does not read"
            hint = _similar_option(spec, strategy, setting)
        else:
            continue
        set_by_profile = decided_by not in overridden and origin.section.startswith(("profile:", "distributed:"))
        is_for_this_job = origin.file is None and not origin.is_variable
        if (is_for_this_job or set_by_profile) and _differs(spec, setting.value):
            raise BadInput(problem, hint or "leave it out", option=name, place=setting.describe(name))


def _similar_option(spec: OptionSpec, strategy: str, setting: Setting) -> str:
    """Return the hint to set the option of the chosen strategy that has a similar name; empty if none has."""
    owners = strategies_in(strategy)
    strategy_options = {name: option for name, option in options_by_name().items() if option.owner in owners}
    nearest_field = nearest(spec.field, [option.field for option in strategy_options.values()])
    suggestion = next((name for name, option in strategy_options.items() if option.field == nearest_field), "")
    if suggestion and setting.origin == COMMAND_LINE:
        return f"write --set {suggestion}={setting.value}"
    return suggestion and f"write {suggestion} = {setting.value}"


def _differs(spec: OptionSpec, value: str) -> bool:
    try:
        settings = groups()[spec.section, spec.owner].model_validate({spec.field: value})
    except ValidationError:  # it conflicts with the others' defaults, so it is not the default itself
        return True
    return as_text(getattr(settings, spec.field)) != spec.default


def _located(spec: OptionSpec, setting: Setting) -> str:
    kind = spec.type
    if kind == "path":
        return absolute_path(setting.value, setting.origin.folder)
    if kind == "code":
        return with_files(setting.value, lambda file: absolute_path(file, setting.origin.folder))
    return absolute_location(setting.value, setting.origin.folder) if kind == "location" else setting.value


def _needs(profile: Profile) -> str:
    if not profile.model.model_path:
        return "model"
    return "dataset" if not profile.data.dataset_path and profile.model.trait in ("speech", "texts") else ""


def _entries(library: Library) -> list[ProfileEntry]:
    entries = [_entry(library, name) for name in library.names("profile")]
    return entries + [ProfileEntry(path.stem, "", path, str(error)) for path, error in library.broken.items()]


def _entry(library: Library, name: str) -> ProfileEntry:
    files = [file for file in library.files() if f"profile:{name}" in file.sections]
    entries = files[-1].sections[f"profile:{name}"].entries
    description = entries["description"].value if "description" in entries else ""
    try:
        return ProfileEntry(name, description, files[-1].path, needs=_needs(resolve(library, name, {}).profile))
    except BadInput as error:
        return ProfileEntry(name, description, files[-1].path, str(error))


def _unknown_profile(library: Library, name: str) -> BadInput:
    for path, error in library.broken.items():
        if path.stem == name:
            return error
    profiles = library.names("profile")
    return BadInput(f"there is no profile '{name}'", hint_for(name, profiles, f"known: {', '.join(profiles)}"))


def _section_problems(section: FoundSection) -> list[str]:
    try:
        layer = layer_of(section)
    except BadInput as error:
        return [str(error)]
    entries = [(key, setting) for key, setting in layer.items() if canonical(key) in options_by_name()]
    checked = [(key, setting, check_value(key, setting.value)) for key, setting in entries]
    return [f"{setting.describe(key)}: {problem}" for key, setting, problem in checked if problem]


def save_profile(name: str, values: Mapping[str, str], config: Path | None = None) -> Path:
    """Write ``[profile:name]`` so that it holds exactly ``values``, and return the file.

    The rest of an existing file is preserved byte for byte. Nothing is written unless the profile can be loaded
    afterwards with just these values.

    Args:
        values: options and references by name, as text; relative paths are relative to the current folder.
        config: another ``config.ini``; the profile is saved in ``profiles/saved`` next to it.

    Raises:
        BadInput: a bad name, a name taken by another file, an unknown option, an invalid value, or a folder that cannot
            be written.
    """
    library = Library.open(config)
    path = saved_folder(library.config.path) / f"{check_name(name)}.ini"
    override_layer(values, COMMAND_LINE)
    section = {key: _portable(library, key, value.strip(), path) for key, value in values.items()}
    for key, value in section.items():
        if not value.isprintable() or " #" in value or value.startswith("#"):
            raise BadInput(f"{key} = {value!r} cannot be kept in an INI file", "one line, without ' #'")
    old = read_text(path) if path.exists() else f"# A saved profile: run it by its name, {name}.\n"
    parse_ini(old, path)
    text = with_section(old, f"profile:{name}", section)
    _check_result(library, name, parse_ini(text, path))
    write_atomically(path, text)
    return path


def _portable(library: Library, key: str, value: str, path: Path) -> str:
    """Return a path for use in the saved file: relative to it within the project, else absolute."""
    spec = options_by_name().get(canonical(key))
    if not value or (spec is None and library.find(key, value)):
        return value

    def relative_to_file(target: str) -> str:
        root = os.path.abspath(library.config.path.parent)
        inside = target == root or target.startswith(root + os.sep)
        return os.path.relpath(target, os.path.abspath(path.parent)) if inside else target

    if spec is not None and spec.type == "path":
        return relative_to_file(absolute_path(value, Path.cwd()))
    if spec is not None and spec.type == "code":
        return with_files(value, lambda file: relative_to_file(absolute_path(file, Path.cwd())))
    if spec is None or spec.type == "location":
        return relative_to_file(absolute_location(value, Path.cwd()))
    return value


def _check_result(library: Library, name: str, written: IniFile) -> None:
    """Check that the profile loads from ``written`` and that no other section overrides the saved values."""
    path = written.path
    check_headings(written, saved=True)
    others = [file for file in library.saved if file.path != path]
    broken = {file: error for file, error in library.broken.items() if file != path}
    library = Library(library.config, [*others, written], broken)
    for other_name in [*library.names("profile"), *(file.stem for file in broken)]:
        if other_name != name and other_name.casefold() == name.casefold():
            raise BadInput(f"'{name}' differs from the profile '{other_name}' only in case", "choose another name")
    resolved = resolve(library, name, {})
    strategy = resolved.profile.strategy.strategy
    for key in chain(*(option_names(key, strategy) for key in written.sections[f"profile:{name}"].entries)):
        if key in resolved.origins and resolved.origins[key].section != f"profile:{name}":
            winner = resolved.origins[key].describe(key, resolved.value(key))
            raise BadInput(f"{winner} would win over the saved value", "remove it there first")
