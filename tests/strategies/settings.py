"""Settings of strategies as a person writes them: an option of the chosen strategy by its plain name."""

from __future__ import annotations

from typing import Any

from profiles.options import canonical
from profiles.schema import StrategySettings


def strategy_settings(**options: Any) -> StrategySettings:
    """Return settings of which some options have the short names that the command line knows."""
    owned = {owner: dict(values) for owner, values in options.pop("owned", {}).items()}
    for name in list(options):
        owner, _, field = canonical(name).rpartition(".")
        if owner:
            owned.setdefault(owner, {})[field] = options.pop(name)
    return StrategySettings(**options, owned=owned)
