"""The options as data: one :class:`OptionSpec` each, and what is told to a person whose value does not fit.

Whatever shows options (command line, forms, INI comments, the reference page) draws them from :func:`options`.
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

from profiles.declarations import OptionError, Section, changes, forms, nearest, no_choice, owners
from profiles.locations import own_code_in
from profiles.schema import FITTED, Profile

OptionType = Literal["text", "path", "location", "code", "flag", "integer", "number", "choice"]
_SYMBOLS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class OptionSpec:
    """One option as it was declared."""

    name: str
    """As in settings; ``owner.field`` where it has an owner."""
    section: str
    """Field of :class:`profiles.schema.Profile` that holds it: ``model``, ``data``, ``training``, ..."""
    type: OptionType
    """``location`` is a path, a hub name or ``module:factory``."""
    default: str
    """As it would be written in an INI file."""
    help: str
    unit: str
    choices: tuple[str, ...]
    """Of a ``choice``, else empty."""
    bounds: Mapping[str, float]
    """Any of ``gt``, ``ge``, ``lt``, ``le``."""
    advanced: bool
    """Not shown in forms unless asked for."""
    tasks: tuple[str, ...] = ()
    """Tasks that read it; none: all of them."""
    owner: str = ""
    """The strategy or task that it belongs to; empty: the section."""
    alias: str = ""
    """Another name that stands for it; empty: none."""

    @property
    def field(self) -> str:
        """Its name within its section or owner."""
        return self.name.rpartition(".")[2]

    def of(self, profile: Profile) -> Any:
        """Return its value in a profile."""
        section = getattr(profile, self.section)
        return getattr(section.owned[self.owner] if self.owner else section, self.field)

    def is_read_by(self, task: str) -> bool:
        """Whether the option has an effect on a task."""
        return not self.tasks or task in self.tasks

    def is_read_with(self, strategy: str) -> bool:
        """Whether the option has an effect with a strategy, as settings name it; one's own code may read any."""
        named = self.section != "strategy" or not self.owner or self.owner in strategies_in(strategy)
        return named or strategy == "auto" or bool(own_code_in(strategy))

    @property
    def limits(self) -> str:
        """The bounds or choices in words: ``> 0, <= 10``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return ", ".join(f"{_SYMBOLS[kind]} {bound:.10g}" for kind, bound in self.bounds.items())

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
    found = {}
    for name, field in Profile.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = field.annotation
    return found


def groups() -> dict[tuple[str, str], type[Section]]:
    """Return whatever declares options by its section and owner, in order; the owner of a section's own is empty."""
    found = {}
    for section, model in sections().items():
        found[section, ""] = model
        found |= {(section, name): owner.options for name, owner in owners(section).items()}
    return found


def options() -> tuple[OptionSpec, ...]:
    """Return every option, in the order of declaration."""
    return _options(changes())


@lru_cache(maxsize=1)
def _options(_: int) -> tuple[OptionSpec, ...]:
    found = tuple(
        _spec(name, section, owner, field)
        for (section, owner), model in groups().items()
        for name, field in model.model_fields.items()
        if isinstance(field.json_schema_extra, dict)
    )
    by_name: dict[str, str] = {}
    for spec in found:
        for name in filter(None, (spec.name, spec.alias)):
            if name in by_name:  # one of the two could not be set
                raise ValueError(f"'{name}' is an option of {by_name[name]} and of {spec.owner or spec.section}")
            by_name[name] = spec.owner or spec.section
    return found


def options_by_name() -> dict[str, OptionSpec]:
    """Return the options by name; names are unique over all sections."""
    return _by_name(changes())[0]


def canonical(name: str) -> str:
    """Return the name of the option that ``name`` stands for: another one where it is an alias."""
    return _by_name(changes())[1].get(name, name)


def strategies_in(strategy: str) -> list[str]:
    """Return the known strategies that a text in settings (``a + b``) puts together."""
    return [name for part in strategy.split("+") if (name := part.strip()) in owners("strategy")]


def meant(name: str, strategy: str) -> list[str]:
    """Return the options that ``name`` stands for in settings with a strategy.

    An alias of a strategy's option means that of each strategy which is chosen and has one of this name.
    """
    spec = options_by_name().get(canonical(name))
    if spec is None or spec.name == name or spec.section != "strategy" or not spec.owner:
        return [canonical(name)]
    found = [f"{owner}.{spec.field}" for owner in strategies_in(strategy)]
    return [option for option in found if option in options_by_name()] or [spec.name]


def applies(name: str, strategy: str) -> bool:
    """Return whether what ``name`` stands for, an option or not, has an effect with a strategy."""
    specs = (options_by_name().get(option) for option in meant(name, strategy))
    return all(spec is None or spec.is_read_with(strategy) for spec in specs)


@lru_cache(maxsize=1)
def _by_name(state: int) -> tuple[dict[str, OptionSpec], dict[str, str]]:
    every = _options(state)
    return {spec.name: spec for spec in every}, {spec.alias: spec.name for spec in every if spec.alias}


def less_memory(task: str) -> tuple[str, ...]:
    """Return the settings by which a step of ``task`` needs less memory, beside its batch size."""
    ways = {"gradient_checkpointing": "true", "tuning": "lora"}
    return tuple(f"{name} = {value}" for name, value in ways.items() if options_by_name()[name].is_read_by(task))


def hint_for(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return ``did you mean 'x'?``, or ``otherwise`` when nothing is near."""
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near else otherwise


def _full(field: str, owner: str) -> str:
    return f"{owner}.{field}" if owner else field


def check_value(name: str, value: str) -> str | None:
    """Return what is wrong with ``value`` for the option ``name`` by itself, or ``None``."""
    spec = options_by_name()[canonical(name)]
    if spec.name in FITTED and value.strip().lower() == "auto":
        return None
    try:
        groups()[spec.section, spec.owner].model_validate({spec.field: value})
    except ValidationError as error:
        own = [explained(details, spec.owner)[1] for details in error.errors() if details["loc"] == (spec.field,)]
        return own[0] if own else None
    return None


def explained(details: ErrorDetails, owner: str) -> tuple[str, str]:
    """Return option and problem of an error that pydantic found in a section's options, or in an owner's."""
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, OptionError):
        return _full(cause.option, owner), cause.problem
    name = _full(str(details["loc"][-1]), owner)
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
        return no_choice(str(details["input"]), spec.choices)
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
        name=_full(name, owner),
        section=section,
        owner=owner,
        alias=extra["alias"],
        type="choice" if choices else numbers.get(kind) or extra["kind"] or "text",
        default=as_text(field.default),
        help=re.sub(r"\{(\w+)\}", lambda match: ", ".join(forms(match[1])), field.description or ""),
        unit=extra["unit"],
        choices=choices,
        bounds={limit: getattr(part, limit) for part in field.metadata for limit in _SYMBOLS if hasattr(part, limit)},
        advanced=extra["advanced"],
        tasks=extra["tasks"] or ((owner,) if owner and section == "model" else ()),
    )
