"""User-defined strategies: ``strategy = "path/to/file.py:Class"``, or ``package.module:Class``.

The file may be anywhere, and nothing registers it. Its code is run only where a run is planned or trained; before that
the file is parsed, not executed. So its options are a text, ``strategy_options = "share = 0.3, interval = 10"``, which
becomes a settings section once the class is loaded.
"""

from __future__ import annotations

import functools
import inspect
import symtable
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from profiles.declarations import Section, owners
from profiles.errors import BadInput
from profiles.locations import user_code_in
from profiles.options import as_text, explain_error, hint_for
from profiles.schema import StrategySettings
from training.lazy import lazy
from training.strategies.base import ChosenStrategy, Strategy, StrategyContext
from training.strategies.composition import component_names
from training.strategies.costs import SyncSchedule
from training.strategies.registry import Form, forget, installed, register_form, strategies, strategy_class

if TYPE_CHECKING:
    from training.tasks import user_code
else:
    user_code = lazy("training.tasks.user_code")


def is_user_strategy(text: str) -> bool:
    """Return whether a text names a single user-defined strategy."""
    return len(component_names(text)) == 1 and bool(user_code_in(text))


def check(text: str) -> str:
    """Return the normalized ``text`` if its file defines the class; modules are looked up only when loaded.

    Raises:
        BadInput: the file does not exist, is not Python, or has no such class.
    """
    text = text.strip()
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        return text
    try:
        table = symtable.symtable(Path(path).expanduser().read_text(encoding="utf-8"), path, "exec")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "check strategy") from error
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"{path} is not Python: {error}", "repair it") from error
    bound = [symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()]
    if name not in bound:
        classes = [inner.get_name() for inner in table.get_children() if inner.get_type() == "class"]
        hint = hint_for(name, classes, f"it has {', '.join(classes) or 'none'}")
        raise BadInput(f"{path} has no class '{name}'", hint)
    return text


@functools.cache
def load_class(text: str) -> type[Strategy]:
    """Load the class, which runs its file.

    Raises:
        BadInput: it cannot be imported, or is no usable strategy.
    """
    registered = strategies().keys()
    loaded = user_code.find_factory(check(text), "strategy")
    for name in strategies().keys() - registered:  # a registered name would own options on this machine only
        forget(name)
    if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
        raise BadInput(f"{text} is no strategy", "derive it from training.strategies.base.Strategy")
    if inspect.isabstract(loaded):
        raise BadInput(f"{text} lacks {', '.join(sorted(loaded.__abstractmethods__))}", "see docs/how-to/extending.md")
    if not str(getattr(loaded, "name", "")).isidentifier() or not isinstance(getattr(loaded, "summary", None), str):
        raise BadInput(f"{text} needs a name and a summary", 'for example name = "mine"')
    return loaded


def settings_name(kind: type[Strategy]) -> str:
    """Return the name of a class in settings: its registered name, else ``file.py:Class``."""
    if strategies().get(kind.name) is kind:
        return kind.name
    try:
        return f"{Path(inspect.getfile(kind)).resolve()}:{kind.__qualname__}"
    except (OSError, TypeError) as error:
        raise BadInput(f"{kind.__qualname__} is in no file", "put it into a .py file") from error


def settings_for(strategy: object) -> tuple[str, dict[str, Any]]:
    """Return the name in settings of a strategy that a script passes, and the options of an instance.

    Args:
        strategy: a name, a class, an instance (``DiLoCo(sync_interval=50)``), or a list of these.

    Raises:
        BadInput: it is none of these, or an instance that was not made from settings.
    """
    if isinstance(strategy, str):
        return strategy, {}
    if isinstance(strategy, list | tuple) and strategy:
        descriptions = [settings_for(part) for part in strategy]
        return " + ".join(text for text, _ in descriptions), {
            name: value for _, options in descriptions for name, value in options.items()
        }
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return settings_name(strategy), {}
    if isinstance(strategy, ChosenStrategy):
        return settings_name(strategy.kind), _options_chosen(strategy)
    if isinstance(strategy, Strategy):
        return settings_name(type(strategy)), _options_of(strategy)
    hint = f"a class derived from Strategy, an instance of one, a list, or a name: {', '.join(strategies())}"
    raise BadInput(f"strategy is {type(strategy).__name__}, which is no strategy here", hint)


def _options_chosen(chosen: ChosenStrategy) -> dict[str, Any]:
    """Return the options of a choice by their names in settings."""
    kind, values = chosen.kind, dict(chosen.options)
    owned = {field: values.pop(field) for field in kind.options.model_fields if field in values}
    if settings_name(kind) in strategies():
        return values | {f"{kind.name}.{field}": value for field, value in owned.items()}
    texts = ", ".join(f"{field} = {as_text(value)}" for field, value in owned.items())
    return values | ({"strategy_options": texts} if texts else {})


def _options_of(strategy: Strategy) -> dict[str, Any]:
    """Return the settings of an instance that differ from their defaults."""
    context, kind = getattr(strategy, "context", None), type(strategy)
    if not isinstance(context, StrategyContext):
        hint = "give the class, and its values as options of fit()"
        raise BadInput(f"an object of {kind.__name__} was not made with a StrategyContext, as workers make it", hint)
    settings, name = context.settings, settings_name(kind)
    defaults, options = StrategySettings(), settings.of(kind.options)
    fields = {field for field in type(defaults).model_fields if field not in ("strategy", "owned", "strategy_options")}
    values = {
        field: getattr(settings, field) for field in fields if getattr(settings, field) != getattr(defaults, field)
    }
    changed = {field: value for field, value in options if value != getattr(kind.options(), field)}
    if name in strategies():
        return values | {f"{name}.{field}": value for field, value in changed.items()}
    texts = ", ".join(f"{field} = {as_text(value)}" for field, value in changed.items())
    return values | ({"strategy_options": texts} if texts else {})


def user_classes(settings: StrategySettings) -> list[type[Strategy]]:
    """Return the user-defined classes that settings name.

    Raises:
        BadInput: see :func:`load_class`.
    """
    return [load_class(text) for text in user_code_in(settings.strategy)]


def load_user_strategy(settings: StrategySettings) -> StrategySettings:
    """Load user-defined strategies, and return settings in which their options are sections like those of others.

    Raises:
        BadInput: an option does not exist, or a value is invalid.
    """
    options, sections, kinds = _parse_options(settings.strategy_options), dict(settings.owned), user_classes(settings)
    for kind in kinds:
        section_name = _section_name(settings, kind)
        own_options = {
            full: value for full, value in options.items() if _option_name(full, kind) in kind.options.model_fields
        }
        options = {full: value for full, value in options.items() if full not in own_options}
        current_values = sections[section_name].model_dump() if section_name in sections else {}
        sections[section_name] = _validated(
            kind, current_values | {_option_name(full, kind): value for full, value in own_options.items()}
        )
    for name in options:
        known_options = [field for kind in kinds for field in kind.options.model_fields]
        hint = hint_for(name, known_options, f"it has {', '.join(known_options) or 'none'}")
        raise BadInput(f"strategy_options: {settings.strategy} has no option '{name}'", hint)
    return settings.model_copy(update={"owned": sections}) if kinds else settings


def unload_user_strategy(settings: StrategySettings) -> StrategySettings:
    """Undo :func:`load_user_strategy`: return settings that can be written to a document."""
    texts = [
        f"{kind.name}.{field} = {as_text(getattr(section, field))}"
        for kind in user_classes(settings)
        if (section_name := _section_name(settings, kind)) not in owners("strategy")
        for section in [settings.owned[section_name]]
        for field in kind.options.model_fields
    ]
    sections = {name: section for name, section in settings.owned.items() if name in owners("strategy")}
    options_text = ", ".join(texts) or settings.strategy_options
    return settings.model_copy(update={"owned": sections, "strategy_options": options_text})


def as_user_code(settings: StrategySettings) -> StrategySettings:
    """Return settings for machines that may lack packages with strategies which are installed here.

    Strategies of such packages are named as user code, and own no options.
    """
    installed_strategies, texts, option_texts = (
        installed(),
        [],
        [settings.strategy_options] if settings.strategy_options else [],
    )
    for name in component_names(settings.strategy):
        texts.append(installed_strategies.get(name, name))
        if name in installed_strategies and name in settings.owned:
            options_of_strategy = settings.owned[name]
            option_texts += [
                f"{name}.{field} = {as_text(getattr(options_of_strategy, field))}"
                for field in type(options_of_strategy).model_fields
            ]
    sections = {
        name: options_of_strategy
        for name, options_of_strategy in settings.owned.items()
        if name not in installed_strategies
    }
    updates = {"strategy": " + ".join(texts), "owned": sections, "strategy_options": ", ".join(option_texts)}
    return settings.model_copy(update=updates) if installed_strategies else settings


def sync_schedule_of(settings: StrategySettings) -> SyncSchedule:
    """Return how often members synchronise."""
    return strategy_class(settings.strategy).sync_schedule(load_user_strategy(settings))


def shortened_for_trial(settings: StrategySettings, interval: int) -> StrategySettings:
    """Return settings for a short trial, with synchronisations at most ``interval`` steps apart."""
    return unload_user_strategy(
        strategy_class(settings.strategy).shortened_for_trial(load_user_strategy(settings), interval)
    )


def _section_name(settings: StrategySettings, kind: type[Strategy]) -> str:
    """Return the section name of a class's options: a subclass may use the options of its base class."""
    same_section = (name for name, section in settings.owned.items() if type(section) is kind.options is not Section)
    return next(same_section, kind.name)


def _option_name(name: str, kind: type[Strategy]) -> str:
    return name.removeprefix(f"{kind.name}.")


def _parse_options(text: str) -> dict[str, str]:
    pairs = {}
    for assignment in filter(None, (assignment.strip() for assignment in text.split(","))):
        name, sign, value = assignment.partition("=")
        if not sign or not name.strip():
            raise BadInput(
                f"strategy_options: '{assignment}' is not name = value", "for example: share = 0.3, interval = 10"
            )
        pairs[name.strip()] = value.strip()
    return pairs


def _validated(kind: type[Strategy], values: Mapping[str, object]) -> Section:
    try:
        return kind.options.model_validate(values)
    except ValidationError as error:
        name, problem = explain_error(error.errors()[0], kind.name)
        raise BadInput(f"strategy_options: {name}: {problem}", "see the options of its class") from error


register_form(Form("FILE.py:CLASS", is_user_strategy, check, load_class))
