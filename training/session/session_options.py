"""The options that a script gives its session, and what cannot be combined with a loop of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.options import canonical, options_by_name
from profiles.schema import Profile, StrategySettings
from training.strategies.base import Strategy
from training.strategies.registry import default_strategy, strategy_class
from training.strategies.user_strategy import load_user_strategy, settings_for

_READ = ("max_steps", "max_grad_norm", "seed", "device")
"""Options that a session reads, besides those of strategies and snapshots; the script does the rest by itself."""
_UNREAD = ("engine", "transport", "coordinator_port", "round_deadline", "quorum")
"""Options of strategies that a launched script has no use for: its group is its own."""

StrategyChoice = str | type[Strategy] | Strategy | Sequence[str | type[Strategy] | Strategy]


def session_profile(strategy: StrategyChoice, options: Mapping[str, Any]) -> Profile:
    """Return the options of a session as a profile.

    Raises:
        BadInput: an unknown option, or one that a session does not read.
    """
    name, strategy_options = settings_for(strategy)
    for option in options:
        spec = options_by_name().get(canonical(option))
        is_read = spec is None or spec.name in _READ or spec.section in ("strategy", "snapshot")
        if not is_read or (spec is not None and spec.name in _UNREAD):
            raise BadInput(f"a session does not read {option}", "set it where the script sets its own", option=option)
    chosen = default_strategy() if name == "auto" else name
    usual = {"task": "custom", "strategy": chosen, "max_grad_norm": 0, "warmup_steps": 0, "lr_schedule": "constant"}
    return profile_from_options("session", {**usual, **strategy_options, **options})


def strategy_of_loop(profile: Profile) -> tuple[StrategySettings, type[Strategy]]:
    """Return the settings of the strategy and its class.

    Raises:
        BadInput: a loop cannot have it.
    """
    settings = load_user_strategy(profile.strategy)
    kind = strategy_class(settings.strategy)
    kind.check(settings)
    if kind.segment_steps(settings):
        why = "lets each machine make a number of steps of its own, and a loop makes the same on all"
        raise BadInput(f"{kind.name} {why}", "take another strategy, such as diloco", option="strategy")
    return settings, kind
