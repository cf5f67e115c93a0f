"""A strategy of one's own: ``strategy = "path/to/file.py:Class"``, or ``package.module:Class``.

The file need not lie in this folder, and nothing registers it. What only its code knows (its options, when it
exchanges) is asked for where a run is planned or trained; until then its file is read, and nothing of it runs. So its
options are a text, ``strategy_options = "share = 0.3, interval = 10"``, that becomes a section when the class is there.
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
from profiles.locations import own_code_in
from profiles.options import as_text, explained, hint_for
from profiles.schema import StrategySettings
from training.lazy import lazy
from training.strategies.base import Strategy, StrategyContext
from training.strategies.composition import component_names
from training.strategies.costs import Rhythm
from training.strategies.registry import Form, forget, installed, register_form, strategies, strategy_class

if TYPE_CHECKING:
    from training.tasks import user_code
else:
    user_code = lazy("training.tasks.user_code")


def is_own(text: str) -> bool:
    """Whether a text names one strategy of somebody's own."""
    return len(component_names(text)) == 1 and bool(own_code_in(text))


def check(text: str) -> str:
    """Return ``text`` if its file has such a class; a module is looked for when it is needed.

    Raises:
        BadInput: there is no such file, it is not Python, or it has no such class.
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
def class_of(text: str) -> type[Strategy]:
    """Return the class, whose file is run for it.

    Raises:
        BadInput: it cannot be imported, or is no strategy that can be used.
    """
    registered = strategies().keys()
    loaded = user_code.find_factory(check(text), "strategy")
    for name in strategies().keys() - registered:  # registered it would be an owner of options here, and nowhere else
        forget(name)
    if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
        raise BadInput(f"{text} is no strategy", "derive it from training.strategies.base.Strategy")
    if inspect.isabstract(loaded):
        raise BadInput(f"{text} lacks {', '.join(sorted(loaded.__abstractmethods__))}", "see docs/how-to/extending.md")
    if not str(getattr(loaded, "name", "")).isidentifier() or not isinstance(getattr(loaded, "summary", None), str):
        raise BadInput(f"{text} needs a name and a summary", 'for example name = "mine"')
    return loaded


def text_of(kind: type[Strategy]) -> str:
    """Return how settings name a class: by its name if it is registered, else by its file."""
    if strategies().get(kind.name) is kind:
        return kind.name
    try:
        return f"{Path(inspect.getfile(kind)).resolve()}:{kind.__qualname__}"
    except (OSError, TypeError) as error:
        raise BadInput(f"{kind.__qualname__} is in no file", "put it into a .py file") from error


def described(strategy: object) -> tuple[str, dict[str, Any]]:
    """Return how settings name what a script gives for a strategy (a name, a class, an instance, or a list of these),
    and the options that an instance was made with.

    Raises:
        BadInput: it is nothing of that, or made of what settings do not hold.
    """
    if isinstance(strategy, str):
        return strategy, {}
    if isinstance(strategy, list | tuple) and strategy:
        descriptions = [described(part) for part in strategy]
        return " + ".join(text for text, _ in descriptions), {
            name: value for _, options in descriptions for name, value in options.items()
        }
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return text_of(strategy), {}
    if isinstance(strategy, Strategy):
        return text_of(type(strategy)), _options_of(strategy)
    hint = f"a class derived from Strategy, an instance of one, a list, or a name: {', '.join(strategies())}"
    raise BadInput(f"strategy is {type(strategy).__name__}, which is no strategy here", hint)


def _options_of(strategy: Strategy) -> dict[str, Any]:
    """Return the options of the settings that an instance was made with, as far as they are not at their defaults."""
    context, kind = getattr(strategy, "context", None), type(strategy)
    if not isinstance(context, StrategyContext):
        hint = "give the class, and its values as options of fit()"
        raise BadInput(f"an object of {kind.__name__} was not made with a StrategyContext, as workers make it", hint)
    settings, name = context.settings, text_of(kind)
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


def own_classes(settings: StrategySettings) -> list[type[Strategy]]:
    """Return the classes of one's own among those that settings name.

    Raises:
        BadInput: see :func:`class_of`.
    """
    return [class_of(text) for text in own_code_in(settings.strategy)]


def opened(settings: StrategySettings) -> StrategySettings:
    """Return settings in which the options of strategies of one's own are sections, as those of all others.

    Raises:
        BadInput: there is no such option, or a value does not fit.
    """
    options, sections, kinds = _pairs(settings.strategy_options), dict(settings.owned), own_classes(settings)
    for kind in kinds:
        section_name = _place(settings, kind)
        own_options = {
            full: value for full, value in options.items() if _field(full, kind) in kind.options.model_fields
        }
        options = {full: value for full, value in options.items() if full not in own_options}
        current_values = sections[section_name].model_dump() if section_name in sections else {}
        sections[section_name] = _read(
            kind, current_values | {_field(full, kind): value for full, value in own_options.items()}
        )
    for name in options:
        known_options = [field for kind in kinds for field in kind.options.model_fields]
        hint = hint_for(name, known_options, f"it has {', '.join(known_options) or 'none'}")
        raise BadInput(f"strategy_options: {settings.strategy} has no option '{name}'", hint)
    return settings.model_copy(update={"owned": sections}) if kinds else settings


def closed(settings: StrategySettings) -> StrategySettings:
    """Return opened settings as a document can hold them: :func:`opened` undone."""
    texts = [
        f"{kind.name}.{field} = {as_text(getattr(section, field))}"
        for kind in own_classes(settings)
        if (section_name := _place(settings, kind)) not in owners("strategy")
        for section in [settings.owned[section_name]]
        for field in kind.options.model_fields
    ]
    sections = {name: section for name, section in settings.owned.items() if name in owners("strategy")}
    options_text = ", ".join(texts) or settings.strategy_options
    return settings.model_copy(update={"owned": sections, "strategy_options": options_text})


def as_own_code(settings: StrategySettings) -> StrategySettings:
    """Return settings for machines that may lack the packages with strategies which are installed here: none of them
    is an owner of options there, and one that is used is named as code of one's own."""
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


def rhythm_of(settings: StrategySettings) -> Rhythm:
    """Return when members synchronise."""
    return strategy_class(settings.strategy).rhythm(opened(settings))


def rehearsed(settings: StrategySettings, interval: int) -> StrategySettings:
    """Return settings with which synchronisations are at most ``interval`` steps apart."""
    return closed(strategy_class(settings.strategy).rehearsed(opened(settings), interval))


def _place(settings: StrategySettings, kind: type[Strategy]) -> str:
    """Return under which name the options of a class are: a class may have those of one that it is derived from."""
    same_section = (name for name, section in settings.owned.items() if type(section) is kind.options is not Section)
    return next(same_section, kind.name)


def _field(name: str, kind: type[Strategy]) -> str:
    return name.removeprefix(f"{kind.name}.")


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for assignment in filter(None, (assignment.strip() for assignment in text.split(","))):
        name, sign, value = assignment.partition("=")
        if not sign or not name.strip():
            raise BadInput(
                f"strategy_options: '{assignment}' is not name = value", "for example: share = 0.3, interval = 10"
            )
        pairs[name.strip()] = value.strip()
    return pairs


def _read(kind: type[Strategy], values: Mapping[str, object]) -> Section:
    try:
        return kind.options.model_validate(values)
    except ValidationError as error:
        name, problem = explained(error.errors()[0], kind.name)
        raise BadInput(f"strategy_options: {name}: {problem}", "see the options of its class") from error


register_form(Form("FILE.py:CLASS", is_own, check, class_of))
