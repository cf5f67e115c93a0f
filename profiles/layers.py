"""The layers of a profile: which sections take part, in which order, and where every value stands.

Sections inherit, later wins::

    [DEFAULT] -> [dataset_defaults] -> [group:G] -> [model:M] -> [dataset:D] -> [profile:P] -> [distributed:P]
    -> command line

``group``, ``model`` and ``dataset`` say which sections take part; ``group`` may name several by comma. A model or
data set without a section of its own is a path or a hub name. Choosing a model or data set also chooses its path, so
``dataset = mine`` on the command line replaces a ``dataset_path`` that the profile sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from profiles.errors import BadInput
from profiles.ini import label_of
from profiles.library import CHOOSING, Found, Library, check_keys, unknown_option_hint
from profiles.locations import is_location
from profiles.options import canonical, hint_for, meant, options_by_name
from profiles.schema import FITTED, Profile

_PATHS = {"model": "model_path", "dataset": "dataset_path"}


@dataclass(frozen=True)
class SettingOrigin:
    """Where a value came from: a line of a file, the command line (no file), or the declaration (``default``)."""

    section: str
    file: Path | None = None
    line: int = 0

    def __str__(self) -> str:
        return f"{label_of(self.file)} [{self.section}] line {self.line}" if self.file else self.section

    @property
    def folder(self) -> Path:
        """What a relative path of this origin is relative to."""
        return self.file.parent if self.file else Path.cwd()

    def describe(self, name: str, value: str) -> str:
        """Return the start of a message about a value: ``config.ini [profile:demo] learning_rate = "fast"``."""
        place = f"{label_of(self.file)} [{self.section}]" if self.file else self.section
        return f'{place} {name} = "{value}"'


COMMAND_LINE = SettingOrigin("command line")
DEFAULT = SettingOrigin("default")


@dataclass(frozen=True)
class Setting:
    """A value as it was written, and where."""

    value: str
    origin: SettingOrigin
    written_as: str = ""
    """The name before its value; empty: the option's own."""

    def describe(self, name: str) -> str:
        """Return the start of a message about it: ``config.ini [profile:demo] learning_rate = "fast"``."""
        return self.origin.describe(self.written_as or name, self.value)


Layer = dict[str, Setting]


@dataclass(frozen=True)
class Merged:
    """The outcome of all layers."""

    settings: Layer
    """Options by name, those that any layer sets, as they are meant with the chosen strategy."""
    references: Layer
    """``group``, ``model`` and ``dataset``, those that are chosen."""


def merge(library: Library, name: str, overrides: Layer) -> Merged:
    """Merge the layers of the profile ``name``.

    Raises:
        BadInput: an unknown reference or key.
    """
    layers, references = _layers(library, name, overrides)
    merged: Layer = {}
    for layer in as_meant(*layers):
        merged.update({key: setting for key, setting in layer.items() if key in options_by_name()})
        for reference, option in _PATHS.items():
            chosen_here = reference in layer and layer[reference] is references[reference]
            if chosen_here and option not in layer:
                merged.update(_path_of(library, reference, references[reference]))
    return Merged(merged, references)


def as_meant(*layers: Layer) -> list[Layer]:
    """Return layers, first to last, with the options that their names stand for with the chosen strategy.

    Raises:
        BadInput: one is set twice in a layer, by two names.
    """
    strategy = next((layer["strategy"].value for layer in reversed(layers) if "strategy" in layer), "auto")
    return [_as_meant(layer, strategy) for layer in layers]


def _as_meant(layer: Layer, strategy: str) -> Layer:
    found: Layer = {}
    for key, setting in layer.items():
        for name in meant(key, strategy):
            if name in found and found[name].value != setting.value:
                said = f"'{name}' is set twice: {found[name].value} and {setting.value}"
                raise BadInput(said, "give it once", option=name, place=setting.describe(key))
            found[name] = setting
    return found


def _layers(library: Library, name: str, overrides: Layer) -> tuple[list[Layer], Layer]:
    """Return the layers, first to last, and the references that chose them."""
    default, own = layer_of(library.find("DEFAULT")), layer_of(library.find("profile", name))
    references = _references(default, own, overrides)
    model = layer_of(_referenced(library, references, "model"))
    references = _references(default, model, own, overrides)
    layers = [default, layer_of(library.find("dataset_defaults"))]
    layers += [layer_of(group) for group in _groups(library, references)]
    layers += [model, layer_of(_referenced(library, references, "dataset")), own]
    return [*layers, layer_of(library.find("distributed", name)), overrides], references


def layer_of(found: Found | None) -> Layer:
    """Return the entries of a section with their origins, by the names that they have there.

    Raises:
        BadInput: a key that does not exist there.
    """
    if found is None:
        return {}
    check_keys(found)
    path, heading = found.file.path, found.section.name
    entries = found.section.entries.items()
    return {key: Setting(entry.value, SettingOrigin(heading, path, entry.line), key) for key, entry in entries}


def override_layer(overrides: Mapping[str, str], origin: SettingOrigin) -> Layer:
    """Return options and references by name as a layer.

    Raises:
        BadInput: an unknown option; names the nearest.
    """
    for key in overrides:
        if canonical(key) not in options_by_name() and key not in CHOOSING:
            raise BadInput(f"{origin}: unknown option '{key}'", unknown_option_hint(key, CHOOSING))
    return {key: Setting(value.strip(), origin, key) for key, value in overrides.items()}


def _references(*layers: Layer) -> Layer:
    return {key: layer[key] for layer in layers for key in CHOOSING if key in layer}


def _groups(library: Library, references: Layer) -> list[Found]:
    if "group" not in references:
        return []
    names = [name.strip() for name in references["group"].value.split(",") if name.strip()]
    groups = [(name, library.find("group", name)) for name in names]
    for name, group in groups:
        if group is None:
            hint = hint_for(name, library.names("group"), f"add a section [group:{name}]")
            place = references["group"].describe("group")
            raise BadInput(f"there is no group '{name}'", hint, option="group", place=place)
    return [group for _, group in groups if group is not None]


def _referenced(library: Library, references: Layer, kind: str) -> Found | None:
    """Return the section that a reference names; ``None`` for a path or hub name, or without a reference."""
    setting = references.get(kind)
    if setting is None or not setting.value:
        return None
    found = library.find(kind, setting.value)
    if found is None and not is_location(setting.value, setting.origin.folder):
        otherwise = f"write a folder, owner/name of a hub, or add [{kind}:NAME]"
        message = f"neither a [{kind}:NAME] section nor a path or hub name"
        hint = hint_for(setting.value, library.names(kind), otherwise)
        raise BadInput(message, hint, option=kind, place=setting.describe(kind))
    return found


def _path_of(library: Library, reference: str, setting: Setting) -> Layer:
    """Return the path option that a chosen model or data set stands for."""
    option = _PATHS[reference]
    found = library.find(reference, setting.value) if setting.value else None
    if found is None:
        return {option: setting}
    own = layer_of(found)
    return {option: own[option]} if option in own else {}


# ------------------------------------------------------- which settings may follow the memory of the machines

_NOBODY, _PROFILE, _COMMAND = range(3)
"""Who has said something: a group, model or data set that is shared; a profile; the person who starts it."""
AUTO = "auto"
"""Of a setting that may follow the memory: its default, and what fits once the machines are known."""
_WITH = {"batch_size": ("batch_size", "gradient_accumulation")}
"""Options that are one choice."""


def left_open(merged: Merged) -> str:
    """Return the settings that may follow the memory, as ``fit_memory`` has them; ``off`` for none.

    Who names them there opens what stands in the same file, or before it in the order of the layers.
    """
    said = merged.settings.get("fit_memory")
    wanted = said.value if said is not None else "auto"
    if wanted.strip() == "off":
        return "off"
    parts = FITTED if wanted.strip() == "auto" else tuple(part.strip() for part in wanted.split(","))
    last = _who(said) if said is not None and wanted.strip() != "auto" else _NOBODY
    found = [
        name
        for name in FITTED
        if is_automatic(name, merged.settings.get(name))
        or (name in parts and all(_who(merged.settings.get(option)) <= last for option in _WITH.get(name, (name,))))
    ]
    return ", ".join(found) or "off"


def is_automatic(name: str, setting: Setting | None) -> bool:
    """Whether the layers leave a setting that may follow the memory to it, whoever has set it before."""
    return name in FITTED and setting is not None and setting.value.strip().lower() == AUTO


def _who(setting: Setting | None) -> int:
    if setting is None:
        return _NOBODY
    if setting.origin.file is None:
        return _COMMAND
    return _PROFILE if setting.origin.section.startswith(("profile:", "distributed:")) else _NOBODY


def open_settings(profile: Profile) -> frozenset[str]:
    """Return the settings of a profile that may be changed; of one that was made without files: those not given."""
    wanted = profile.run.fit_memory
    if wanted == "auto":
        given = set.union(
            *(set(part.model_fields_set) for part in (profile.model, profile.training, profile.evaluation))
        )
        return frozenset(name for name in FITTED if not given & set(_WITH.get(name, (name,))))
    return frozenset() if wanted == "off" else frozenset(part.strip() for part in wanted.split(","))
