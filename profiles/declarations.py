"""Declaration of options, and the registry of their owners.

An option belongs to a section of a profile (:mod:`profiles.schema`), or to an owner that is found by name: a strategy,
a codec, a task. An owner's module declares its options, and its registry passes them to :func:`declare`. Forms, the
command line, INI files and the reference page then know them as ``owner.option`` (``diloco.sync_interval``). This
package imports nothing of the packages above it: it knows their registries by module name and loads them on first use.
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


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that ``word`` is probably a misspelling of; ``None`` if none is close."""
    by_case = {name.casefold(): name for name in choices}
    matches = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return by_case[matches[0]] if matches else None


def invalid_choice(word: str, choices: Iterable[str]) -> str:
    """Return the message that ``word`` is not one of ``choices``, with the closest one."""
    nearest_choice = nearest(word, choices)
    return f"not a choice, did you mean '{nearest_choice}'?" if nearest_choice else "not a choice"


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
    usual: float | None = None,
    **bounds: Any,
) -> Any:
    """Declare one option.

    Args:
        default: value when unset.
        help: one line for the command line, forms and the reference page.
        unit: of the value.
        advanced: not shown in forms unless asked for.
        kind: of a text that names a file: ``path`` always does, ``location`` may also be a hub name or
            ``module:factory``, ``code`` is a list of names of which some may be ``file.py:name``. In an INI file they
            are relative to its folder.
        tasks: those that read it; empty: all. Another task refuses it if it was set explicitly.
        alias: short name that may be written for it in settings.
        names: section whose owners' names are its choices.
        usual: a number above which a value is probably a slip; it is allowed, but remarked on.
        bounds: pydantic's ``ge``, ``gt``, ``le``, ``lt``.
    """
    extra: dict[str, Any] = {"unit": unit, "advanced": advanced, "kind": kind, "tasks": tasks, "alias": alias}
    extra |= {"names": names, "usual": usual}
    return Field(default=default, description=help, json_schema_extra=extra, **bounds)


class Section(BaseModel):
    """A group of options that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


_REGISTRIES = {
    "strategy": "training.strategies.registry",
    "codec": "training.exchange.codecs.registry",
    "model": "training.tasks.registry",
    "run": "training.layouts.compatibility",
}
"""Module of the registry, by the section of a profile that holds the options; codecs have no section, and ``run`` has
only a check."""


Trait = Literal["speech", "texts", "own code"]
"""Kind of a task's data: recordings with transcripts; texts or conversations; model and data built by the Python code
that ``model_path`` names."""


@dataclass(frozen=True)
class OptionOwner:
    """A strategy, codec or task that declares options."""

    summary: str
    """One line."""
    options: type[Section]
    form: str
    """Syntax of its name in settings, with arguments: ``topk:SHARE``."""
    accepts: Callable[[str], bool]
    """Whether a text in settings names it and is valid."""
    trait: Trait | None = None


_declared: dict[str, dict[str, OptionOwner]] = {section: {} for section in _REGISTRIES}
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
    """Register an owner of options.

    Args:
        section: field of a profile.
        name: its name in settings.
        summary: one line.
        options: may be :class:`Section` itself, which has none.
        form: syntax in settings; empty: the bare name.
        accepts: whether a text in settings names it and is valid; ``None``: only the bare name does.
        trait: of a task.

    Raises:
        ValueError: the name is taken, or would make ``owner.option`` ambiguous.
    """
    global _changes
    if not name.isidentifier() or any(name in owners for owners in _declared.values()):
        raise ValueError(f"options of '{name}': no new name")
    _declared[section][name] = OptionOwner(summary, options, form or name, accepts or name.__eq__, trait)
    _changes += 1


def declare_form(section: str, form: str, accepts: Callable[[str], bool]) -> None:
    """Register a syntax for composed values of a section, such as ``a + b`` for strategies.

    Args:
        form: how such a value is written.
        accepts: whether a text has this syntax; raises :class:`BadInput` if it has but cannot be used.
    """
    global _changes
    _forms[section].append((form, accepts))
    _changes += 1


def declare_check(section: str, check: Callable[[Any], None]) -> None:
    """Register the check of a section's settings as a whole, for ``run`` of the whole profile; it raises
    :class:`BadInput`, which names the option that conflicts with the others."""
    _checks[section] = check


def check_together(section: str, settings: BaseModel) -> None:
    """Check that the settings of a section, for ``run`` those of a profile, are compatible with each other.

    Raises:
        BadInput: they are not; names the option.
    """
    _load(section)
    if section in _checks:
        _checks[section](settings)


def withdraw(section: str, name: str) -> None:
    """Remove the owner ``name`` from a section."""
    global _changes
    del _declared[section][name]
    _changes += 1


def owners(section: str) -> dict[str, OptionOwner]:
    """Return the owners of a section by name; none in a section without a registry."""
    _load(section)
    return dict(sorted(_declared.get(section, {}).items()))


def trait_of(task: str) -> Trait | None:
    """Return the trait of a task; ``None`` if the task is unknown."""
    owner = owners("model").get(task)
    return owner.trait if owner else None


def _load(section: str) -> None:
    """Load a section's registry, which declares its owners; safe to call from several threads."""
    if section in _REGISTRIES and section not in _loaded:
        importlib.import_module(_REGISTRIES[section]).load()
        _loaded.add(section)


def import_all(folder: Path, package: str) -> None:
    """Import all modules of a folder, which register themselves; users may add their own.

    Args:
        package: import path of the folder.

    Raises:
        BadInput: one of them cannot be imported.
    """
    for module in pkgutil.iter_modules([str(folder)]):
        try:
            importlib.import_module(f"{package}.{module.name}")
        except Exception as error:  # user code may raise anything
            file = folder / f"{module.name}.py"
            problem = error.message if isinstance(error, BadInput) else where_it_failed(error)
            raise BadInput(
                f"cannot be used: {problem}", "repair it, or take it out of this folder", file=file
            ) from error


def forms(section: str) -> list[str]:
    """Return the syntaxes that a section accepts in settings."""
    return [owner.form for owner in owners(section).values()] + [form for form, _ in _forms[section]]


def is_valid_choice(section: str, text: str) -> bool:
    """Return whether a text in settings names an owner of the section, or a composition of them, and is valid.

    Raises:
        BadInput: it has the right syntax but cannot be used.
    """
    is_owner = any(owner.accepts(text) for owner in owners(section).values())
    return is_owner or any(accepts(text) for _, accepts in _forms[section])


def changes() -> int:
    """Return a number that changes with every declaration: a key for caches of what is derived from them."""
    for section in _REGISTRIES:
        _load(section)
    return _changes


S = TypeVar("S", bound=Section)


class OptionsByOwner(BaseModel):
    """Base of documents that hold the options of all owners of a section, in :attr:`owned`."""

    owned_section: ClassVar[str] = "strategy"
    owned: dict[str, SerializeAsAny[Section]] = Field(default_factory=dict)
    """Options by the owner's name, for all owners."""

    def of(self, options: type[S]) -> S:
        """Return the options that the owner of ``options`` has; the defaults if it was declared after this document."""
        return next((owned for owned in self.owned.values() if isinstance(owned, options)), None) or options()

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the options that differ from their defaults, by owner."""
        changed = {}
        for owner, options in self.owned.items():
            defaults = type(options)().model_dump(mode="json")
            values = options.model_dump(mode="json").items()
            changed[owner] = {field: value for field, value in values if value != defaults[field]}
        return {owner: values for owner, values in changed.items() if values}

    def with_options_of(self, name: str, **values: Any) -> Self:
        """Return a copy with options of the owner ``name`` replaced by ``values``."""
        changed = self.owned[name].model_copy(update=values)
        return self.model_copy(update={"owned": {**self.owned, name: changed}})

    @model_validator(mode="before")
    @classmethod
    def _by_owner(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        unread, owned = dict(values.get("owned") or {}), {}
        for name, owner in owners(cls.owned_section).items():
            options = unread.pop(name, {})
            owned[name] = _read(name, owner.options, options) if isinstance(options, dict) else options
        for name in unread:
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
        details = error.errors()[0]
        raise OptionError(".".join([owner, *map(str, details["loc"])]), str(details["msg"])) from error
