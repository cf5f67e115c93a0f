"""Strategies that somebody put there: they may not import, and may state costs that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profiles.declarations import import_all
from profiles.errors import BadInput
from training.strategies.allreduce import AllReduce, AllReduceCosts
from training.strategies.checked_costs import CheckedCosts
from training.strategies.costs import Compute, Learning, RunSpec, SyncSchedule
from training.strategies.registry import cost_model, forget, register


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_package", r"ModuleNotFoundError: No module named 'no_such_package' \(own\.py, line 1\)"),
        ("def (", r"SyntaxError: invalid syntax \(own\.py, line 1\) "),
        ("raise OSError('no disk')", r"OSError: no disk \(own\.py, line 1\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "own_parts").mkdir()
    (tmp_path / "own_parts" / "own.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=rf"own_parts/own\.py: cannot be used: {said}"):
        import_all(tmp_path / "own_parts", "own_parts")


class Lies(AllReduceCosts):
    """One part of it is replaced by each test."""


RUN, SCHEDULE, COMPUTE = RunSpec(100), SyncSchedule(), Compute(1.0, 1, 1000)
ASKS: dict[str, Any] = {
    "elements": lambda costs: costs.elements(1000),
    "sync_schedules": lambda costs: costs.sync_schedules(RUN),
    "hidden": lambda costs: costs.hidden(2.0, COMPUTE, SCHEDULE, None),
    "learning": lambda costs: costs.learning(RUN, SCHEDULE, 2.0),
    "why_not_ranked": lambda costs: costs.why_not_ranked(RUN),
}


def endless(run: RunSpec) -> Iterator[SyncSchedule]:
    while True:
        yield SyncSchedule()


@pytest.mark.parametrize(
    ("part", "lie"),
    [
        ("elements", lambda trainable: -1),
        ("elements", lambda trainable: float("nan")),
        ("sync_schedules", lambda run: [SyncSchedule(interval=0)]),
        ("sync_schedules", endless),
        ("hidden", lambda *given: 2.5),
        ("hidden", lambda *given: -1.0),
        ("hidden", lambda *given: None),
        ("learning", lambda *given: Learning(share=1.5)),
        ("learning", lambda *given: Learning(loss=float("nan"))),
        ("learning", lambda *given: 1 / 0),
        ("learning", lambda *given: 0.9),
        ("why_not_ranked", lambda run: True),
    ],
)
def test_costs_that_cannot_be_are_refused_with_the_strategy_s_name(part: str, lie: Any) -> None:
    costs = Lies()
    setattr(costs, part, lie)
    with pytest.raises(BadInput, match=f"strategy 'lies': its costs cannot be used: {part}"):
        ASKS[part](CheckedCosts(costs, "lies"))


@pytest.mark.parametrize(
    ("part", "value"), [("codecs", ()), ("codecs", ("fp31",)), ("merge_ns", -1.0), ("vectors", "6")]
)
def test_figures_that_cannot_be_are_refused(part: str, value: Any) -> None:
    costs = Lies()
    setattr(costs, part, value)
    with pytest.raises(BadInput, match=f"strategy 'lies': its costs cannot be used: {part}"):
        CheckedCosts(costs, "lies")


def test_costs_that_can_be_pass_as_they_are() -> None:
    stated, checked = AllReduceCosts(), cost_model("allreduce")
    assert checked is not None
    assert checked.learning(RUN, SCHEDULE, 2.0) == stated.learning(RUN, SCHEDULE, 2.0)
    assert (checked.codecs, checked.vectors, checked.exact) == (stated.codecs, stated.vectors, stated.exact)


def test_the_planner_asks_a_strategy_of_ones_own_through_the_check() -> None:
    lies = Lies()
    lies.merge_ns = -5.0
    register(type("Own", (AllReduce,), {"name": "own", "costs": lies}))
    try:
        with pytest.raises(BadInput, match="strategy 'own'"):
            cost_model("own")
    finally:
        forget("own")
