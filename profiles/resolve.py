"""From a profile's name to validated settings that know where every value came from; and profiles that are saved.

A saved profile is ``profiles/saved/<name>.ini``, a file that can be sent to somebody and rerun by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from profiles.declarations import check_together, forms, is_written, nearest
from profiles.errors import BadInput
from profiles.ini import IniFile, parse_ini, read_text, with_section, write_atomically
from profiles.layers import (
    COMMAND_LINE,
    DEFAULT,
    Merged,
    Setting,
    SettingOrigin,
    as_meant,
    is_automatic,
    layer_of,
    left_open,
    merge,
    override_layer,
)
from profiles.library import Found, Library, check_headings, check_name, saved_folder
from profiles.locations import absolute_location, absolute_path, path_there, with_files
from profiles.options import (
    OptionSpec,
    as_text,
    canonical,
    check_value,
    explained,
    groups,
    hint_for,
    meant,
    options,
    options_by_name,
    strategies_in,
)
from profiles.schema import Profile, StrategySettings

NO_OVERRIDES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Resolved:
    """A validated profile."""

    profile: Profile
    origins: dict[str, SettingOrigin]
    """Of every option by name."""
    stand_in: str = ""
    """The profile to train where this one's model cannot be had; empty: none."""

    def value(self, option: str) -> str:
        """Return the value of an option as an INI file would hold it."""
        return as_text(options_by_name()[canonical(option)].of(self.profile))


@dataclass(frozen=True)
class ProfileEntry:
    """A profile in a list."""

    name: str
    description: str
    source: Path
    error: str = ""
    """Why it cannot be used; empty when it can."""
    needs: str = ""
    """What must be given with it (``dataset``, ``model``); empty when it is complete."""


def load_profile(
    name: str, overrides: Mapping[str, str] = NO_OVERRIDES, config: Path | None = None, *, complete: bool = True
) -> Resolved:
    """Find, merge and validate a profile.

    Args:
        overrides: options and references by name, as text (the command line's); paths relative to the current folder.
        config: another ``config.ini``; its saved profiles are in ``profiles/saved`` beside it.
        complete: refuse a profile that leaves its model or data set to the command line.

    Raises:
        BadInput: an unknown name, section or option, or a value that does not fit; says where and what is near.
    """
    resolved = resolve(Library.open(config), name, overrides)
    missing = _needs(resolved.profile)
    if complete and missing:
        what = {"model": "model", "dataset": "data set"}[missing]
        example = {"model": "--set model=FOLDER", "dataset": "--dataset FOLDER"}[missing]
        hint = f"pass {example}, or set '{missing}' in [profile:{name}]"
        raise BadInput(f"profile '{name}' names no {what}", hint)
    return resolved


def list_profiles(config: Path | None = None) -> list[ProfileEntry]:
    """Return all profiles: those of ``config.ini``, then the saved ones, with the error of each that has one.

    Raises:
        BadInput: ``config.ini`` cannot be read.
    """
    return _entries(Library.open(config))


def validate_config(path: Path | None = None) -> list[str]:
    """Return every problem of ``config.ini`` and its saved profiles, one line each; empty when all is well."""
    try:
        library = Library.open(path)
    except BadInput as error:
        return [str(error)]
    problems: list[str] = []
    for file in library.files():
        for section in file.sections.values():
            problems += _section_problems(Found(file, section))
    problems += [entry.error for entry in _entries(library) if entry.error]
    return list(dict.fromkeys(problems))


def profile_from_options(name: str, values: Mapping[str, Any]) -> Profile:
    """Make a profile from options by name, without any file.

    Raises:
        BadInput: an unknown option or a value that does not fit.
    """
    layer = override_layer({key: as_text(value) for key, value in values.items()}, SettingOrigin("options"))
    return _validated(name, Merged(as_meant(layer)[0], {}))


def resolve(library: Library, name: str, overrides: Mapping[str, str]) -> Resolved:
    """Merge and validate a profile of ``library``.

    Raises:
        BadInput: see :func:`load_profile`.
    """
    if library.find("profile", name) is None:
        raise _unknown_profile(library, name)
    merged = merge(library, name, override_layer(overrides, COMMAND_LINE))
    profile = _validated(name, merged)
    origins = {
        spec.name: merged.settings[spec.name].origin if spec.name in merged.settings else DEFAULT for spec in options()
    }
    return Resolved(profile, origins, _stand_in(library, name))


def _stand_in(library: Library, name: str) -> str:
    setting = layer_of(library.find("profile", name)).get("stand_in")
    if setting is None or not setting.value:
        return ""
    others = [other for other in library.names("profile") if other != name]
    if setting.value not in others:
        hint, place = hint_for(setting.value, others, ""), setting.describe("stand_in")
        raise BadInput("there is no other profile of this name", hint, option="stand_in", place=place)
    return setting.value


def _validated(name: str, merged: Merged) -> Profile:
    given: dict[tuple[str, str], dict[str, Any]] = {place: {} for place in groups()}
    stays = "local_data" in merged.settings and _differs(
        options_by_name()["local_data"], merged.settings["local_data"].value
    )
    for key, setting in merged.settings.items():
        if is_automatic(key, setting):
            continue
        spec = options_by_name()[key]
        there = key == "dataset_path" and stays
        text = path_there(setting.value, setting.origin.folder) if there else _located(spec, setting)
        given[spec.section, spec.owner][spec.field] = text
    parts: dict[str, Any] = {}
    for (section, owner), model in sorted(groups().items(), key=lambda item: not item[0][1]):  # a section holds owners
        try:
            found = model.model_validate(given[section, owner])
        except ValidationError as error:
            option, problem = explained(error.errors()[0], owner)
            setting = merged.settings.get(option, Setting("", DEFAULT))
            raise BadInput(problem, option=option, place=setting.describe(option)) from error
        if owner:
            given[section, ""].setdefault("owned", {})[owner] = found
        else:
            parts[section] = found
    _refuse_unknown_strategy(parts["strategy"].strategy, merged)
    _refuse_ignored(parts["model"].task, parts["strategy"].strategy, merged)
    _refuse_together(parts["strategy"], merged)
    parts["run"] = parts["run"].model_copy(update={"fit_memory": left_open(merged)})
    names = {
        f"{kind}_name": merged.references[kind].value for kind in ("model", "dataset") if kind in merged.references
    }
    return Profile(name=name, **names, **parts)


def _refuse_unknown_strategy(name: str, merged: Merged) -> None:
    """Refuse it before machines are asked for anything: only they would meet it."""
    if name == "auto":
        return
    place = merged.settings["strategy"].describe("strategy")
    try:
        if is_written("strategy", name):
            return
    except BadInput as error:
        raise BadInput(error.message, error.hint, option="strategy", place=place) from error
    known = ["auto", *forms("strategy")]
    hint = hint_for(name, known, f"known: {', '.join(known)}")
    raise BadInput(f"unknown strategy '{name}'", hint, option="strategy", place=place)


def _refuse_together(strategy: StrategySettings, merged: Merged) -> None:
    """Refuse what the strategy would refuse when machines begin to train."""
    try:
        check_together("strategy", strategy)
    except BadInput as error:
        setting = merged.settings.get(error.option, Setting("", DEFAULT))
        place = setting.describe(error.option)
        raise BadInput(error.problem, error.hint, option=error.option, place=place) from error


def _refuse_ignored(task: str, strategy: str, merged: Merged) -> None:
    """Refuse what a person has set for this job and neither its task nor its strategy reads.

    What is inherited (from a group, a model, ...) may be meant for others, and so is a profile's own where the command
    line has changed the task or the strategy. Files from before strategies had names of their own stay readable.
    """
    first = {spec.owner for spec in options() if spec.alias}
    changed = {key for key, setting in merged.settings.items() if setting.origin.file is None}
    for name, setting in merged.settings.items():
        spec, origin, hint = options_by_name()[name], setting.origin, ""
        earlier = origin.file is not None and setting.written_as == spec.alias and strategy in first
        if not spec.is_read_by(task):
            decides, what = "task", f"task = {task} does not read it, only {' and '.join(spec.tasks)}"
        elif not spec.is_read_with(strategy) and not earlier:
            decides, what = "strategy", f"an option of {spec.owner}, which strategy = {strategy} does not read"
            hint = _of_the_chosen(spec, strategy, setting)
        else:
            continue
        own = decides not in changed and origin.section.startswith(("profile:", "distributed:"))
        if (origin.file is None or own) and _differs(spec, setting.value):
            raise BadInput(what, hint or "leave it out", option=name, place=setting.describe(name))


def _of_the_chosen(spec: OptionSpec, strategy: str, setting: Setting) -> str:
    """Return what to write instead, where an option of the chosen strategy has such a name; else nothing."""
    own = {name: option for name, option in options_by_name().items() if option.owner in strategies_in(strategy)}
    near = nearest(spec.field, [option.field for option in own.values()])
    found = next((name for name, option in own.items() if option.field == near), "")
    if found and setting.origin == COMMAND_LINE:
        return f"write --set {found}={setting.value}"
    return found and f"write {found} = {setting.value}"


def _differs(spec: OptionSpec, value: str) -> bool:
    try:
        read = groups()[spec.section, spec.owner].model_validate({spec.field: value})
    except ValidationError:  # alone it does not go with the others' defaults, so it is none itself
        return True
    return as_text(getattr(read, spec.field)) != spec.default


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
    places = [file for file in library.files() if f"profile:{name}" in file.sections]
    entries = places[-1].sections[f"profile:{name}"].entries
    description = entries["description"].value if "description" in entries else ""
    try:
        return ProfileEntry(name, description, places[-1].path, needs=_needs(resolve(library, name, {}).profile))
    except BadInput as error:
        return ProfileEntry(name, description, places[-1].path, str(error))


def _unknown_profile(library: Library, name: str) -> BadInput:
    for path, error in library.broken.items():
        if path.stem == name:
            return error
    known = library.names("profile")
    return BadInput(f"there is no profile '{name}'", hint_for(name, known, f"known: {', '.join(known)}"))


def _section_problems(found: Found) -> list[str]:
    try:
        layer = layer_of(found)
    except BadInput as error:
        return [str(error)]
    known = [(key, setting) for key, setting in layer.items() if canonical(key) in options_by_name()]
    checked = [(key, setting, check_value(key, setting.value)) for key, setting in known]
    return [f"{setting.describe(key)}: {problem}" for key, setting, problem in checked if problem]


def save_profile(name: str, values: Mapping[str, str], config: Path | None = None) -> Path:
    """Write ``[profile:name]`` so that it holds exactly ``values``, and return the file.

    Comments, other sections and every other byte of an existing file stay. Nothing is written unless the profile can
    be loaded afterwards with just these values.

    Args:
        values: options and references by name, as text; relative paths are relative to the current folder.
        config: another ``config.ini``; the profile is saved in ``profiles/saved`` beside it.

    Raises:
        BadInput: a bad name, a name taken by another file, an unknown option, a value that does not fit, or a folder
            that cannot be written.
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
    """Return a path so that it means the same seen from the saved file: relative within the project, else absolute."""
    spec = options_by_name().get(canonical(key))
    if not value or (spec is None and library.find(key, value)):
        return value

    def seen_from_there(target: str) -> str:
        root = os.path.abspath(library.config.path.parent)
        inside = target == root or target.startswith(root + os.sep)
        return os.path.relpath(target, os.path.abspath(path.parent)) if inside else target

    if spec is not None and spec.type == "path":
        return seen_from_there(absolute_path(value, Path.cwd()))
    if spec is not None and spec.type == "code":
        return with_files(value, lambda file: seen_from_there(absolute_path(file, Path.cwd())))
    if spec is None or spec.type == "location":
        return seen_from_there(absolute_location(value, Path.cwd()))
    return value


def _check_result(library: Library, name: str, written: IniFile) -> None:
    """Check that the profile loads from ``written`` and that nothing else in it overrules the saved values."""
    path = written.path
    check_headings(written, saved=True)
    others = [file for file in library.saved if file.path != path]
    broken = {place: error for place, error in library.broken.items() if place != path}
    library = Library(library.config, [*others, written], broken)
    for other in [*library.names("profile"), *(place.stem for place in broken)]:
        if other != name and other.casefold() == name.casefold():
            raise BadInput(f"'{name}' differs from the profile '{other}' only in case", "choose another name")
    resolved = resolve(library, name, {})
    strategy = resolved.profile.strategy.strategy
    for key in chain(*(meant(key, strategy) for key in written.sections[f"profile:{name}"].entries)):
        if key in resolved.origins and resolved.origins[key].section != f"profile:{name}":
            winner = resolved.origins[key].describe(key, resolved.value(key))
            raise BadInput(f"{winner} would win over the saved value", "remove it there first")
