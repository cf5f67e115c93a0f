"""Strategies by name: every other file of this folder registers one. Nothing here imports torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TypeVar

from profiles.declarations import declare, import_all, withdraw
from profiles.errors import BadInput
from profiles.options import hint_for
from training.exchange.codecs import one_of_each
from training.strategies.base import Strategy
from training.strategies.checked_costs import CheckedCosts
from training.strategies.costs import BATCH_SOURCE, CostModel

S = TypeVar("S", bound=Strategy)

_PARTS = ("base", "checked_costs", "costs", "registry", "weights")
"""Files of this folder that hold no strategy."""
_known: dict[str, type[Strategy]] = {}


def register(strategy: type[S]) -> type[S]:
    """Make a strategy known under its name, with its options: a decorator.

    Raises:
        ValueError: the name is taken.
    """
    declare("strategy", strategy.name, strategy.summary, strategy.options)
    _known[strategy.name] = strategy
    return strategy


def forget(name: str) -> None:
    """Take a strategy out again."""
    del _known[name]
    withdraw("strategy", name)


@functools.cache
def load() -> None:
    """Import every strategy of this folder.

    Raises:
        BadInput: one of them cannot be imported.
    """
    import_all(Path(__file__).parent, __package__, besides=_PARTS)


def strategies() -> dict[str, type[Strategy]]:
    """Return all strategies by name."""
    load()
    return dict(sorted(_known.items()))


def check_strategy(name: str) -> str:
    """Return ``name`` if it is a known strategy.

    Raises:
        BadInput: unknown; names the nearest known one.
    """
    if name not in strategies():
        hint = hint_for(name, strategies(), f"known strategies: {', '.join(strategies())}")
        raise BadInput(f"unknown strategy '{name}'", hint)
    return name


def strategy_class(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Raises:
        BadInput: see :func:`check_strategy`.
    """
    return strategies()[check_strategy(name)]


def cost_model(name: str) -> CostModel | None:
    """Return what a strategy costs; ``None`` where that is not known, or the strategy is not.

    Raises:
        BadInput: what it states cannot be.
    """
    found = strategies().get(name)
    return _checked(found) if found is not None else None


@functools.cache
def _checked(strategy: type[Strategy]) -> CostModel | None:
    return None if strategy.costs is None else CheckedCosts(strategy.costs, strategy.name)


def interval_options() -> tuple[str, ...]:
    """Return the options that hold the steps between exchanges, of all strategies that have one."""
    models = (strategy.costs for strategy in strategies().values())
    return tuple(model.interval_option for model in models if model is not None and model.interval_option)


def loss_sources() -> dict[str, str]:
    """Return where the figures of learning are from, by their keys: of all strategies and codecs."""
    models = [strategy.costs for strategy in strategies().values() if strategy.costs is not None]
    sources = [*(model.sources for model in models), *(codec.sources for codec in one_of_each())]
    return {key: said for some in (BATCH_SOURCE, *sources) for key, said in some.items()}


def usual_strategy() -> str:
    """Return the strategy of workers between whom links cost nothing, and of one machine alone."""
    return next(name for name, strategy in strategies().items() if strategy.is_usual)
