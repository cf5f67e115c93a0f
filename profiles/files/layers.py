"""The layers of a profile: which sections apply, in which order, and where each value was set.

Sections inherit, later wins::

    [DEFAULT] -> [dataset_defaults] -> [group:G] -> [model:M] -> [dataset:D] -> [profile:P] -> [distributed:P]
    -> variables -> command line

``group``, ``model`` and ``dataset`` select sections; ``group`` may name several, separated by commas. A model or data
set without a section of its own is a path or a hub name. Selecting a model or data set also selects its path, so
``dataset = mine`` on the command line replaces a ``dataset_path`` that the profile sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from profiles.errors import BadInput
from profiles.files.ini import label_of
from profiles.files.library import SELECTORS, FoundSection, Library, check_keys, unknown_option_hint
from profiles.locations import is_location
from profiles.options import canonical, hint_for, option_names, options_by_name
from profiles.run_settings import FITTED
from profiles.schema import Profile

_PATHS = {"model": "model_path", "dataset": "dataset_path"}


@dataclass(frozen=True)
class SettingOrigin:
    """Origin of a value: a line of a file, a variable or the command line (no file), or a declaration (``default``)."""

    section: str
    file: Path | None = None
    line: int = 0

    def __str__(self) -> str:
        return f"{label_of(self.file)} [{self.section}] line {self.line}" if self.file else self.section

    @property
    def folder(self) -> Path:
        """Base folder of relative paths."""
        return self.file.parent if self.file else Path.cwd()

    @property
    def is_variable(self) -> bool:
        return self.file is None and self.section.startswith(VARIABLE)

    def describe(self, name: str, value: str) -> str:
        """Return the prefix of a message about a value: ``config.ini [profile:demo] learning_rate = "fast"``."""
        location = f"{label_of(self.file)} [{self.section}]" if self.file else self.section
        return f'{location} {name} = "{value}"'


COMMAND_LINE = SettingOrigin("command line")
VARIABLE = "variable "
"""Beginning of the section of a value that an environment variable sets."""
DEFAULT = SettingOrigin("default")


@dataclass(frozen=True)
class Setting:
    """A value as written, and its origin."""

    value: str
    origin: SettingOrigin
    written_as: str = ""
    """The key it was written under; empty: the option's own name."""

    def describe(self, name: str) -> str:
        """Return the prefix of a message about it: ``config.ini [profile:demo] learning_rate = "fast"``."""
        return self.origin.describe(self.written_as or name, self.value)


Layer = dict[str, Setting]
NO_SETTINGS: Layer = {}


@dataclass(frozen=True)
class Merged:
    """The result of merging all layers."""

    settings: Layer
    """Options that any layer sets, by name, with aliases resolved for the chosen strategy."""
    references: Layer
    """The selected ``group``, ``model`` and ``dataset``."""


def merge(library: Library, name: str, overrides: Layer, variables: Layer = NO_SETTINGS) -> Merged:
    """Merge the layers of the profile ``name``.

    Args:
        overrides: of the command line.
        variables: of the environment, below the command line.

    Raises:
        BadInput: an unknown reference or key.
    """
    layers, references = _layers(library, name, variables, overrides)
    merged: Layer = {}
    for layer in resolve_aliases(*layers):
        merged.update({key: setting for key, setting in layer.items() if key in options_by_name()})
        for reference, option in _PATHS.items():
            chosen_here = reference in layer and layer[reference] is references[reference]
            if chosen_here and option not in layer:
                merged.update(_path_of(library, reference, references[reference]))
    return Merged(merged, references)


def resolve_aliases(*layers: Layer) -> list[Layer]:
    """Return the layers, in order, with each alias replaced by the options it means with the chosen strategy.

    Raises:
        BadInput: a layer sets an option twice, under two names.
    """
    strategy = next((layer["strategy"].value for layer in reversed(layers) if "strategy" in layer), "auto")
    return [_layer_without_aliases(layer, strategy) for layer in layers]


def _layer_without_aliases(layer: Layer, strategy: str) -> Layer:
    settings: Layer = {}
    for key, setting in layer.items():
        for name in option_names(key, strategy):
            if name in settings and settings[name].value != setting.value:
                problem = f"'{name}' is set twice: {settings[name].value} and {setting.value}"
                raise BadInput(problem, "give it once", option=name, place=setting.describe(key))
            settings[name] = setting
    return settings


def _layers(library: Library, name: str, variables: Layer, overrides: Layer) -> tuple[list[Layer], Layer]:
    """Return the layers, in order, and the references that selected them."""
    default, profile = layer_of(library.find("DEFAULT")), layer_of(library.find("profile", name))
    references = _references(default, profile, variables, overrides)
    model = layer_of(_referenced(library, references, "model"))
    references = _references(default, model, profile, variables, overrides)
    layers = [default, layer_of(library.find("dataset_defaults"))]
    layers += [layer_of(group) for group in _groups(library, references)]
    layers += [model, layer_of(_referenced(library, references, "dataset")), profile]
    return [*layers, layer_of(library.find("distributed", name)), variables, overrides], references


def layer_of(located: FoundSection | None) -> Layer:
    """Return the entries of a section with their origins, by key; empty without a section.

    Raises:
        BadInput: a key that is not allowed there.
    """
    if located is None:
        return {}
    check_keys(located)
    path, heading = located.file.path, located.section.name
    entries = located.section.entries.items()
    return {key: Setting(entry.value, SettingOrigin(heading, path, entry.line), key) for key, entry in entries}


def override_layer(overrides: Mapping[str, str], origin: SettingOrigin) -> Layer:
    """Return options and references as a layer.

    Raises:
        BadInput: an unknown option; names the nearest one.
    """
    for key in overrides:
        if canonical(key) not in options_by_name() and key not in SELECTORS:
            raise BadInput(f"{origin}: unknown option '{key}'", unknown_option_hint(key, SELECTORS))
    return {key: Setting(value.strip(), origin, key) for key, value in overrides.items()}


def without_sections(layer: Layer) -> Layer:
    """Return the layer of a job that has no files: a model or data set is a path or a hub name, and a variable that
    selects a group selects nothing.

    Raises:
        BadInput: a group is chosen.
    """
    group = layer.get("group")
    if group is not None and not group.origin.is_variable:
        problem = "it chooses a section of config.ini, and this job has no profile"
        raise BadInput(problem, "leave it out", option="group", place=group.describe("group"))
    paths = {_PATHS[key]: setting for key, setting in layer.items() if key in _PATHS}
    return paths | {key: setting for key, setting in layer.items() if key not in SELECTORS}


def _references(*layers: Layer) -> Layer:
    return {key: layer[key] for layer in layers for key in SELECTORS if key in layer}


def _groups(library: Library, references: Layer) -> list[FoundSection]:
    if "group" not in references:
        return []
    names = [name.strip() for name in references["group"].value.split(",") if name.strip()]
    groups = [(name, library.find("group", name)) for name in names]
    for name, section in groups:
        if section is None:
            hint = hint_for(name, library.names("group"), f"add a section [group:{name}]")
            prefix = references["group"].describe("group")
            raise BadInput(f"there is no group '{name}'", hint, option="group", place=prefix)
    return [group for _, group in groups if group is not None]


def _referenced(library: Library, references: Layer, kind: str) -> FoundSection | None:
    """Return the section that a reference names; ``None`` for a path or hub name, or without a reference."""
    setting = references.get(kind)
    if setting is None or not setting.value:
        return None
    section = library.find(kind, setting.value)
    if section is None and not is_location(setting.value, setting.origin.folder):
        otherwise = f"write a folder, owner/name of a hub, or add [{kind}:NAME]"
        message = f"neither a [{kind}:NAME] section nor a path or hub name"
        hint = hint_for(setting.value, library.names(kind), otherwise)
        raise BadInput(message, hint, option=kind, place=setting.describe(kind))
    return section


def _path_of(library: Library, reference: str, setting: Setting) -> Layer:
    """Return the path option that a selected model or data set implies."""
    option = _PATHS[reference]
    section = library.find(reference, setting.value) if setting.value else None
    if section is None:
        return {option: setting}
    layer = layer_of(section)
    return {option: layer[option]} if option in layer else {}


# ---------------------------------------------------------- settings that are fitted to the machines' memory

_INHERITED, _PROFILE, _COMMAND_LINE = range(3)
"""Level at which a setting is made: a shared section (group, model, data set) or none; a profile; the command line."""
AUTO = "auto"
"""Value of a setting that is to be fitted to the machines' memory."""
_WITH = {"batch_size": ("batch_size", "gradient_accumulation")}
"""Options that are fitted together, as one choice."""


def settings_to_fit(merged: Merged) -> str:
    """Return the settings to fit to the machines' memory in the syntax of ``fit_memory``; ``off`` for none.

    A setting that ``fit_memory`` names is fitted unless it is set at a higher level than ``fit_memory`` itself.
    """
    setting = merged.settings.get("fit_memory")
    value = setting.value if setting is not None else "auto"
    if value.strip() == "off":
        return "off"
    named = FITTED if value.strip() == "auto" else tuple(name.strip() for name in value.split(","))
    level = _level(setting) if setting is not None and value.strip() != "auto" else _INHERITED
    fitted = [
        name
        for name in FITTED
        if is_automatic(name, merged.settings.get(name))
        or (name in named and all(_level(merged.settings.get(option)) <= level for option in _WITH.get(name, (name,))))
    ]
    return ", ".join(fitted) or "off"


def is_automatic(name: str, setting: Setting | None) -> bool:
    """Whether a setting that can be fitted to the memory is set to ``auto``."""
    return name in FITTED and setting is not None and setting.value.strip().lower() == AUTO


def _level(setting: Setting | None) -> int:
    if setting is None:
        return _INHERITED
    if setting.origin.file is None:
        return _COMMAND_LINE
    return _PROFILE if setting.origin.section.startswith(("profile:", "distributed:")) else _INHERITED


def fittable_settings(profile: Profile) -> frozenset[str]:
    """Return the settings of a profile that may be fitted to memory; of one made without files: those not set."""
    fit_memory = profile.run.fit_memory
    if fit_memory == "auto":
        explicit = set.union(
            *(set(section.model_fields_set) for section in (profile.model, profile.training, profile.evaluation))
        )
        return frozenset(name for name in FITTED if not explicit & set(_WITH.get(name, (name,))))
    return frozenset() if fit_memory == "off" else frozenset(name.strip() for name in fit_memory.split(","))
