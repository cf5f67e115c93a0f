"""What options are declared with, and whose they are.

An option belongs to a section of a profile (:mod:`profiles.schema`), or to something which is found by name: a
strategy, a task. Whoever writes such a thing declares its options beside it, and its registry tells them here. Forms,
the command line, INI files and the reference page then know them as ``owner.option`` (``diloco.sync_interval``). This
floor imports nothing of the rooms above: it knows their registries as text, and loads them when somebody first asks.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from profiles.errors import BadInput, where_it_failed

if TYPE_CHECKING:
    from typing_extensions import Self


class OptionError(ValueError):
    """A value that is well-formed by itself but cannot be used.

    Args:
        option: the option to change.
        problem: what is wrong and what would be right.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(problem)
        self.option = option
        self.problem = problem


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` probably stands for."""
    by_case = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return by_case[found[0]] if found else None


def no_choice(word: str, known: Iterable[str]) -> str:
    """Return that a word is none of the known ones, with the one that it probably stands for."""
    near = nearest(word, known)
    return f"not a choice, did you mean '{near}'?" if near else "not a choice"


def option(
    default: Any,
    help: str,
    *,
    unit: str = "",
    advanced: bool = False,
    kind: Literal["", "path", "location", "code"] = "",
    tasks: tuple[str, ...] = (),
    alias: str = "",
    names: str = "",
    **bounds: Any,
) -> Any:
    """Declare one option.

    ``bounds`` are pydantic's (``ge``, ``gt``, ``le``, ``lt``). ``kind`` marks text that names a file: ``path`` always
    does, ``location`` may be a hub name or ``module:factory`` as well, and ``code`` names, some of them with a
    ``file.py:name``. In an INI file all are relative to its folder.
    ``tasks`` are those that read it, none: all; another one refuses it where a person has set it. ``alias`` is a
    short name that a person may write for it. ``names``: a section of which it holds an owner's name.
    """
    extra: dict[str, Any] = {"unit": unit, "advanced": advanced, "kind": kind, "tasks": tasks, "alias": alias}
    extra["names"] = names
    return Field(default=default, description=help, json_schema_extra=extra, **bounds)


class Section(BaseModel):
    """A group of options that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


_REGISTRIES = {
    "strategy": "training.strategies.registry",
    "codec": "training.exchange.codecs.registry",
    "model": "training.tasks.registry",
}
"""By the section of a profile to which the options belong; those of codecs have none."""


Trait = Literal["speech", "texts", "own code"]
"""What others need to know of a task: it hears recordings that have transcripts; it reads texts or conversations; its
model and data are made by Python code that ``model_path`` names."""


@dataclass(frozen=True)
class Owner:
    """Something with options of its own."""

    summary: str
    """What it is, in one line."""
    options: type[Section]
    form: str
    """How it is written in settings: its name, and what else belongs to it."""
    accepts: Callable[[str], bool]
    """Whether a text in settings means it and can be used."""
    trait: Trait | None = None


_declared: dict[str, dict[str, Owner]] = {section: {} for section in _REGISTRIES}
_forms: dict[str, list[tuple[str, Callable[[str], bool]]]] = {section: [] for section in _REGISTRIES}
_checks: dict[str, Callable[[Any], None]] = {}
_loaded: set[str] = set()
_changes = 0


def declare(
    section: str,
    name: str,
    summary: str,
    options: type[Section],
    form: str = "",
    accepts: Callable[[str], bool] | None = None,
    trait: Trait | None = None,
) -> None:
    """Let a profile know something with options of its own.

    Args:
        section: field of a profile.
        name: its name in settings.
        summary: what it is, in one line.
        options: may be :class:`Section` itself, which has none.
        form: how it is written in settings; empty: as its name.
        accepts: whether a text in settings means it and can be used; ``None``: its name does.
        trait: of a task.

    Raises:
        ValueError: the name is taken, or would make ``owner.option`` ambiguous.
    """
    global _changes
    if not name.isidentifier() or any(name in owners for owners in _declared.values()):
        raise ValueError(f"options of '{name}': no new name")
    _declared[section][name] = Owner(summary, options, form or name, accepts or name.__eq__, trait)
    _changes += 1


def declare_form(section: str, form: str, accepts: Callable[[str], bool]) -> None:
    """Let a profile know texts that stand in a section for something which is made of them.

    Args:
        form: how they are written.
        accepts: whether a text is one of them; raises :class:`BadInput` for one that cannot be used.
    """
    global _changes
    _forms[section].append((form, accepts))
    _changes += 1


def declare_check(section: str, check: Callable[[Any], None]) -> None:
    """Let a profile know what looks at all settings of a section together; it raises :class:`BadInput`, with the option
    that does not go with the others."""
    _checks[section] = check


def check_together(section: str, settings: BaseModel) -> None:
    """Refuse settings of a section that do not go together.

    Raises:
        BadInput: names the option.
    """
    _load(section)
    if section in _checks:
        _checks[section](settings)


def withdraw(section: str, name: str) -> None:
    """Forget what was declared."""
    global _changes
    del _declared[section][name]
    _changes += 1


def owners(section: str) -> dict[str, Owner]:
    """Return all that have options of their own in a section, by name; none in a section without a registry."""
    _load(section)
    return dict(sorted(_declared.get(section, {}).items()))


def trait_of(task: str) -> Trait | None:
    """Return what others need to know of a task; nothing of one that is not known."""
    owner = owners("model").get(task)
    return owner.trait if owner else None


def _load(section: str) -> None:
    """Let a section's registry declare what it knows; more than one thread may."""
    if section in _REGISTRIES and section not in _loaded:
        importlib.import_module(_REGISTRIES[section]).load()
        _loaded.add(section)


def import_all(folder: Path, package: str) -> None:
    """Import all modules of a folder, whose registry they are in; anybody may put one there.

    Args:
        package: what the folder is called in imports.

    Raises:
        BadInput: one of them cannot be imported.
    """
    for module in pkgutil.iter_modules([str(folder)]):
        try:
            importlib.import_module(f"{package}.{module.name}")
        except Exception as error:  # code of somebody's own may raise anything
            file = folder / f"{module.name}.py"
            said = error.message if isinstance(error, BadInput) else where_it_failed(error)
            raise BadInput(f"cannot be used: {said}", "repair it, or take it out of this folder", file=file) from error


def forms(section: str) -> list[str]:
    """Return how all of them are written in settings."""
    return [owner.form for owner in owners(section).values()] + [form for form, _ in _forms[section]]


def is_written(section: str, text: str) -> bool:
    """Return whether a text in settings means one of them and can be used.

    Raises:
        BadInput: it cannot, for a reason of its own.
    """
    named = any(owner.accepts(text) for owner in owners(section).values())
    return named or any(accepts(text) for _, accepts in _forms[section])


def changes() -> int:
    """Return a number that changes with every declaration, for whoever keeps what follows from them."""
    for section in _REGISTRIES:
        _load(section)
    return _changes


S = TypeVar("S", bound=Section)


class Owning(BaseModel):
    """A document that holds the options of all owners of a section, in :attr:`owned`."""

    owned_section: ClassVar[str] = "strategy"
    owned: dict[str, SerializeAsAny[Section]] = Field(default_factory=dict)
    """By the owner's name; all of them."""

    def of(self, options: type[S]) -> S:
        """Return the options of the owner who declared ``options``; its defaults where it was declared later."""
        return next((found for found in self.owned.values() if isinstance(found, options)), None) or options()

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the options that are not at their defaults, by owner."""
        changed = {}
        for owner, options in self.owned.items():
            defaults = type(options)().model_dump(mode="json")
            values = options.model_dump(mode="json").items()
            changed[owner] = {field: value for field, value in values if value != defaults[field]}
        return {owner: values for owner, values in changed.items() if values}

    def with_own(self, name: str, **values: Any) -> Self:
        """Return a copy with other options of the owner ``name``."""
        changed = self.owned[name].model_copy(update=values)
        return self.model_copy(update={"owned": {**self.owned, name: changed}})

    @model_validator(mode="before")
    @classmethod
    def _by_owner(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given, owned = dict(values.get("owned") or {}), {}
        for name, owner in owners(cls.owned_section).items():
            options = given.pop(name, {})
            owned[name] = _read(name, owner.options, options) if isinstance(options, dict) else options
        for name in given:
            raise OptionError(name, f"unknown name; known are {', '.join(owned)}")
        return {**values, "owned": owned}

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document = handler(self)
        owned = {owner: options for owner, options in document.pop("owned", {}).items() if options}
        return {**document, "owned": owned} if owned else document


def _read(owner: str, options: type[Section], values: dict[str, Any]) -> Section:
    try:
        return options.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(".".join([owner, *map(str, first["loc"])]), str(first["msg"])) from error
