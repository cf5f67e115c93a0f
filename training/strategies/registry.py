"""Registry of strategies by name; the files of this folder register them. Nothing here imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from profiles.declarations import OptionsByOwner, declare, declare_check, declare_form, forms, import_all, withdraw
from profiles.errors import BadInput, where_it_failed
from profiles.locations import user_code_in
from profiles.options import hint_for
from profiles.schema import StrategySettings
from training.exchange.codecs import CastCodec, codec_by_name, example_codecs
from training.numerics.schedule import AskedRule, scaling_rule
from training.strategies.base import Strategy
from training.strategies.checked_costs import CheckedCosts
from training.strategies.costs import BATCH_SOURCE, CostModel, Start

S = TypeVar("S", bound=Strategy)

ENTRY_POINTS = "muster.strategies"
"""The group in which an installed package names its strategies."""
_registered: dict[str, type[Strategy]] = {}
_installed: dict[str, str] = {}


def register(strategy: type[S]) -> type[S]:
    """Register a strategy and its options under its name; a decorator.

    Raises:
        ValueError: the name is taken.
    """
    declare("strategy", strategy.name, strategy.summary, strategy.options)
    _registered[strategy.name] = strategy
    return strategy


def forget(name: str) -> None:
    """Unregister a strategy."""
    del _registered[name]
    _installed.pop(name, None)
    withdraw("strategy", name)


@dataclass(frozen=True)
class Form:
    """A syntax for strategies other than a name, such as ``A + B``."""

    notation: str
    """How it is shown in lists."""
    matches: Callable[[str], bool]
    check: Callable[[str], str]
    """Returns the normalized text, or raises BadInput. Runs no user code."""
    make: Callable[[str], type[Strategy]]
    """Returns the class, or raises BadInput."""


_forms: list[Form] = []


def register_form(form: Form) -> None:
    """Register a form: its texts are then accepted as strategies."""

    def accepts(text: str) -> bool:
        if form.matches(text):
            form.check(text)
            return True
        return False

    declare_form("strategy", form.notation, accepts)
    _forms.append(form)


def _form_of(text: str) -> Form | None:
    load()
    return next((form for form in _forms if form.matches(text)), None)


@functools.cache
def load() -> None:
    """Import every strategy of this folder, and those of installed packages (entry points ``muster.strategies``).

    Raises:
        BadInput: one of them cannot be imported.
    """
    import_all(Path(__file__).parent, __package__)
    for point in entry_points(group=ENTRY_POINTS):
        register_installed(point)


def register_installed(point: EntryPoint) -> None:
    """Register the strategy of an installed package.

    Raises:
        BadInput: it cannot be imported, is no strategy, or its name is taken.
    """
    package = point.dist.name if point.dist is not None else point.module
    problem, hint = f"package {package}: its strategy '{point.name}' cannot be used", "repair the package, or remove it"
    try:
        loaded = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
            raise TypeError(f"{point.value} is no Strategy")
        if _registered.get(loaded.name) is not loaded:
            register(loaded)
    except Exception as error:  # user code may raise anything
        raise BadInput(f"{problem}: {where_it_failed(error)}", hint) from error
    _installed[loaded.name] = point.value


def installed() -> dict[str, str]:
    """Return the strategies of installed packages, ``module:Class`` by name; other machines may lack them."""
    load()
    return dict(_installed)


def strategies() -> dict[str, type[Strategy]]:
    """Return all strategies by name."""
    load()
    return dict(sorted(_registered.items()))


def check_strategy(name: str) -> str:
    """Return the normalized ``name`` of a strategy.

    Raises:
        BadInput: it is unknown; suggests the nearest name.
    """
    if (form := _form_of(name)) is not None:
        return form.check(name)
    if name not in strategies():
        known_names = forms("strategy")
        raise BadInput(
            f"unknown strategy '{name}'", hint_for(name, known_names, f"known strategies: {', '.join(known_names)}")
        )
    return name


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Raises:
        BadInput: see :func:`check_strategy`.
    """
    form = _form_of(name)
    return form.make(name) if form is not None else strategies()[check_strategy(name)]


def check_settings(settings: StrategySettings) -> None:
    """Reject settings that the strategy does not work with; user code is not run here.

    Raises:
        BadInput: names the option.
    """
    if settings.strategy != "auto" and not user_code_in(settings.strategy):
        strategy_class(settings.strategy).check(settings)


declare_check("strategy", check_settings)


def segment_steps_of(settings: StrategySettings) -> int:
    """Return :meth:`Strategy.segment_steps`; 0 for a user-defined strategy, whose code is run only where it trains."""
    return 0 if settings.user_strategy else strategy_class(settings.strategy).segment_steps(settings)


def refusal_in_parts(settings: StrategySettings) -> str:
    """Return why a strategy cannot work on parts of a model, as words after what is refused; empty: it can, or it is
    user code, which only workers run."""
    if settings.user_strategy:
        return ""
    reason = strategy_class(settings.strategy).why_not_in_parts(settings)
    return f"does not work with {settings.strategy}, which {reason}" if reason else ""


def keeps_copies_alike(settings: StrategySettings) -> bool:
    """Whether two devices of a member that hold one weight, each in its part, compute the same for it."""
    kind = strategy_class(settings.strategy)
    return kind.acts_elementwise(settings) and isinstance(codec_by_name(kind.codec(settings)), CastCodec)


def scaling_rule_of(asked: AskedRule, strategy: str, start: Start) -> AskedRule:
    """Return how the learning rate is scaled with the batch; ``auto`` stays for user code, which only workers run."""
    return (
        asked if user_code_in(strategy) else scaling_rule(asked, start in strategy_class(strategy).scales_learning_rate)
    )


def cost_model(name: str, settings: OptionsByOwner | None = None) -> CostModel | None:
    """Return a strategy's cost model; ``None``: it has none, or the strategy is unknown.

    Args:
        settings: hold the strategy's options; ``None``: their defaults.

    Raises:
        BadInput: it states impossible costs.
    """
    if name not in strategies() and _form_of(name) is None:
        return None
    model = _checked(strategy_class(name))
    return model if model is None or settings is None else model.with_options(settings)


@functools.cache
def _checked(strategy: type[Strategy]) -> CostModel | None:
    return None if strategy.costs is None else CheckedCosts(strategy.costs, strategy.name)


def interval_options() -> tuple[str, ...]:
    """Return the options with the steps between exchanges, of all strategies that have one."""
    models = (strategy.costs for strategy in strategies().values())
    return tuple(model.interval_option for model in models if model is not None and model.interval_option)


def loss_sources() -> dict[str, str]:
    """Return the sources of learning figures of all strategies and codecs, by key."""
    models = [strategy.costs for strategy in strategies().values() if strategy.costs is not None]
    sources = [*(model.sources for model in models), *(codec.sources for codec in example_codecs())]
    return {key: line for lines in (BATCH_SOURCE, *sources) for key, line in lines.items()}


def default_strategy() -> str:
    """Return the default strategy: for links that cost nothing, and for a single machine."""
    return next(name for name, strategy in strategies().items() if strategy.is_default)
