"""The options as data, one :class:`OptionSpec` each, and the messages about invalid values.

The command line, forms, INI comments and the reference page are all generated from :func:`options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from profiles.declarations import OptionError, Section, changes, forms, invalid_choice, nearest, owners
from profiles.locations import user_code_in
from profiles.quantities import figure_text, setting_text, three_digits
from profiles.run_settings import FITTED
from profiles.schema import Profile

OptionType = Literal["text", "path", "location", "code", "flag", "integer", "number", "choice"]
_SYMBOLS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class OptionSpec:
    """The declaration of one option."""

    name: str
    """Name in settings; ``owner.field`` if it has an owner."""
    section: str
    """Field of :class:`profiles.schema.Profile` that holds it: ``model``, ``data``, ``training``, ..."""
    type: OptionType
    """``location`` is a path, a hub name or ``module:factory``."""
    default: str
    """As written in an INI file."""
    help: str
    unit: str
    choices: tuple[str, ...]
    """Values of a ``choice``, else empty."""
    bounds: Mapping[str, float]
    """Any of ``gt``, ``ge``, ``lt``, ``le``."""
    advanced: bool
    """Not shown in forms unless asked for."""
    tasks: tuple[str, ...] = ()
    """Tasks that read it; empty: all."""
    owner: str = ""
    """Strategy or task that declares it; empty: the section."""
    alias: str = ""
    """Second name of it; empty: none."""
    usual: float | None = None
    """Largest usual value; ``None``: there is none."""

    @property
    def field(self) -> str:
        """Name within its section or owner."""
        return self.name.rpartition(".")[2]

    def value_in(self, profile: Profile) -> Any:
        """Return the value that a profile gives it."""
        section = getattr(profile, self.section)
        return getattr(section.owned[self.owner] if self.owner else section, self.field)

    def is_read_by(self, task: str) -> bool:
        """Whether the option has an effect on a task."""
        return not self.tasks or task in self.tasks

    def is_read_with(self, strategy: str) -> bool:
        """Whether the option has an effect with a strategy, as written in settings; user code may read any option."""
        applies_by_name = self.section != "strategy" or not self.owner or self.owner in strategies_in(strategy)
        return applies_by_name or strategy == "auto" or bool(user_code_in(strategy))

    def shown(self, value: str) -> str:
        """Return a value as people read it: of epochs, which may be a share of one, at most three digits."""
        try:
            return three_digits(float(value)) if self.unit == "epochs" else value
        except ValueError:
            return value

    @property
    def limits(self) -> str:
        """The bounds or choices in words: ``> 0, <= 10``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return ", ".join(f"{_SYMBOLS[kind]} {setting_text(bound)}" for kind, bound in self.bounds.items())

    @property
    def about(self) -> str:
        """Help, unit, limits and tasks in one line."""
        unit = f"in {self.unit}" if self.unit and self.unit not in self.help else ""
        only = f"(task {' or '.join(self.tasks)})" if self.tasks else ""
        return " ".join([", ".join(part for part in (self.help, unit, self.limits) if part), only]).strip()


def as_text(value: object) -> str:
    """Return ``value`` as an INI file would hold it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def sections() -> dict[str, type[Section]]:
    """Return the sections of a profile by field name, in order."""
    section_types = {}
    for name, field in Profile.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            section_types[name] = field.annotation
    return section_types


def groups() -> dict[tuple[str, str], type[Section]]:
    """Return all option classes by section and owner, in order; the owner is empty for a section's own options."""
    option_groups = {}
    for section, model in sections().items():
        option_groups[section, ""] = model
        option_groups |= {(section, name): owner.options for name, owner in owners(section).items()}
    return option_groups


def options() -> tuple[OptionSpec, ...]:
    """Return every option, in the order of declaration."""
    return _options(changes())


@lru_cache(maxsize=1)
def _options(_: int) -> tuple[OptionSpec, ...]:
    specs = tuple(
        _spec(name, section, owner, field)
        for (section, owner), model in groups().items()
        for name, field in model.model_fields.items()
        if isinstance(field.json_schema_extra, dict)
    )
    by_name: dict[str, str] = {}
    for spec in specs:
        for name in filter(None, (spec.name, spec.alias)):
            if name in by_name:  # or one of the two could not be set
                raise ValueError(f"'{name}' is an option of {by_name[name]} and of {spec.owner or spec.section}")
            by_name[name] = spec.owner or spec.section
    return specs


def options_by_name() -> dict[str, OptionSpec]:
    """Return the options by name; names are unique over all sections."""
    return _by_name(changes())[0]


def auxiliary_models(profile: Profile) -> dict[str, str]:
    """Return the values of the options besides ``model_path`` that name a model: a teacher, a part of the model."""
    named = [spec for spec in options() if spec.section == "model" and spec.type == "location" and not spec.owner]
    return {spec.name: spec.value_in(profile) for spec in named if spec.name != "model_path"}


def canonical(name: str) -> str:
    """Return the option's own name, which differs from ``name`` if that is an alias."""
    return _by_name(changes())[1].get(name, name)


def strategies_in(strategy: str) -> list[str]:
    """Return the known strategies in the setting ``strategy``, which may combine several: ``a + b``."""
    return [name for part in strategy.split("+") if (name := part.strip()) in owners("strategy")]


def option_names(name: str, strategy: str) -> list[str]:
    """Return the options that ``name`` means in settings with a strategy.

    The alias of a strategy's option means the option of this name of every chosen strategy that has one.
    """
    spec = options_by_name().get(canonical(name))
    if spec is None or spec.name == name or spec.section != "strategy" or not spec.owner:
        return [canonical(name)]
    qualified_names = [f"{owner}.{spec.field}" for owner in strategies_in(strategy)]
    return [option for option in qualified_names if option in options_by_name()] or [spec.name]


def has_effect(name: str, strategy: str) -> bool:
    """Return whether the options that ``name`` means have an effect with a strategy; true if it is no option."""
    specs = (options_by_name().get(option) for option in option_names(name, strategy))
    return all(spec is None or spec.is_read_with(strategy) for spec in specs)


@lru_cache(maxsize=1)
def _by_name(version: int) -> tuple[dict[str, OptionSpec], dict[str, str]]:
    specs = _options(version)
    return {spec.name: spec for spec in specs}, {spec.alias: spec.name for spec in specs if spec.alias}


def memory_saving_settings(task: str) -> tuple[str, ...]:
    """Return the settings, other than the batch size, that reduce the memory of a step of ``task``."""
    candidates = {"gradient_checkpointing": "true", "tuning": "lora"}
    return tuple(f"{name} = {value}" for name, value in candidates.items() if options_by_name()[name].is_read_by(task))


def hint_for(word: str, choices: Iterable[str], otherwise: str) -> str:
    """Return ``did you mean 'x'?``, or ``otherwise`` when nothing is near."""
    suggestion = nearest(word, choices)
    return f"did you mean '{suggestion}'?" if suggestion else otherwise


def _qualified_name(field: str, owner: str) -> str:
    return f"{owner}.{field}" if owner else field


def check_value(name: str, value: str) -> str | None:
    """Return the problem with ``value`` as the option ``name``, looked at by itself; ``None`` if it is valid."""
    spec = options_by_name()[canonical(name)]
    if spec.name in FITTED and value.strip().lower() == "auto":
        return None
    try:
        groups()[spec.section, spec.owner].model_validate({spec.field: value})
    except ValidationError as error:
        errors = [details for details in error.errors() if details["loc"] == (spec.field,)]
        return explain_error(errors[0], spec.owner)[1] if errors else None
    return None


def unusual_value(name: str, value: str) -> str | None:
    """Return the remark on a valid ``value`` of the option ``name`` that is probably a slip; ``None`` for others."""
    usual = options_by_name()[canonical(name)].usual
    try:
        return f"unusually large: {figure_text(usual)} or less is usual" if usual and float(value) > usual else None
    except ValueError:  # such as ``auto``
        return None


def explain_error(details: ErrorDetails, owner: str) -> tuple[str, str]:
    """Return option and problem of a pydantic error in the options of a section or an owner."""
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, OptionError):
        return _qualified_name(cause.option, owner), cause.problem
    name = _qualified_name(str(details["loc"][-1]), owner)
    spec = options_by_name().get(name)
    if spec is None:
        return name, details["msg"]
    return name, f"{_problem(spec, details)} ({spec.about})"


def _problem(spec: OptionSpec, details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in ("greater_than", "greater_than_equal"):
        return "too small"
    if kind in ("less_than", "less_than_equal"):
        return "too large"
    if spec.type == "choice":
        return invalid_choice(str(details["input"]), spec.choices)
    return {"integer": "not a whole number", "number": "not a number", "flag": "not true or false"}.get(
        spec.type, details["msg"]
    )


def _spec(name: str, section: str, owner: str, field: FieldInfo) -> OptionSpec:
    extra, kind = cast("dict[str, Any]", field.json_schema_extra), field.annotation
    choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
    if extra["names"]:
        choices = tuple(owners(extra["names"]))
    numbers: dict[object, OptionType] = {bool: "flag", int: "integer", float: "number"}
    return OptionSpec(
        name=_qualified_name(name, owner),
        section=section,
        owner=owner,
        alias=extra["alias"],
        usual=extra["usual"],
        type="choice" if choices else numbers.get(kind) or extra["kind"] or "text",
        default=as_text(field.default),
        help=re.sub(r"\{(\w+)\}", lambda match: ", ".join(forms(match[1])), field.description or ""),
        unit=extra["unit"],
        choices=choices,
        bounds={limit: getattr(rule, limit) for rule in field.metadata for limit in _SYMBOLS if hasattr(rule, limit)},
        advanced=extra["advanced"],
        tasks=extra["tasks"] or ((owner,) if owner and section == "model" else ()),
    )
