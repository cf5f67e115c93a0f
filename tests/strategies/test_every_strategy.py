"""What holds for every strategy, whoever wrote it: the registry says which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract import CHECKS
from members import overlapping, settings_of

from profiles.schema import StrategySettings
from training.strategies.registry import strategies


def names() -> Iterator[str]:
    """Yield all strategies, and those with which members stay apart together with the one that merges all."""
    yield from strategies()
    apart = [name for name, kind in strategies().items() if kind.merges == "weights" and kind.equal == "never"]
    yield from (f"{name} + diloco" for name in apart)


def in_every_way() -> Iterator[Any]:
    """Yield the settings of every strategy: as usual, and with exchanges that overlap with training."""
    for name in names():
        codec = "fp32" if " + " in name else "auto"  # one for all, so that bytes can be told
        yield pytest.param(settings_of(name, codec=codec), id=name)
        if (more := overlapping(name)) is not None:
            yield pytest.param(more, id=f"{name}, overlapping")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("settings", list(in_every_way()))
def test_it_keeps_the_contract(settings: StrategySettings, check: Callable[[StrategySettings], None]) -> None:
    check(settings)
