"""What holds for every strategy, whoever wrote it: the registry says which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract import (
    CHECKS,
    as_many_bytes_are_given_as_the_costs_say,
    consensus_leaves_everybody_as_it_was,
    the_same_bits_after_a_snapshot_at_any_step,
)
from members import overlapping, settings_of

from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.strategies.base import StrategyContext
from training.strategies.costs import RunSpec, SyncSchedule
from training.strategies.registry import strategies, strategy_class
from training.strategies.user_strategy import shortened_for_trial, sync_schedule_of


def names() -> Iterator[str]:
    """Yield all strategies, and those with which members stay apart together with one that merges all."""
    yield from strategies()
    apart = [name for name, kind in strategies().items() if kind.merges == "weights" and kind.equal == "never"]
    yield from (f"{name} + {'local_sgd' if strategies()[name].anchored else 'diloco'}" for name in apart)


def in_every_way() -> Iterator[Any]:
    """Yield the settings of every strategy: as usual, and with exchanges that overlap with training."""
    for name in names():
        codec = "fp32" if " + " in name else "auto"  # one for all, so that bytes can be told
        marks = [pytest.mark.slow] if " + " in name else []
        yield pytest.param(settings_of(name, codec=codec), id=name, marks=marks)
        if (more := overlapping(name)) is not None:
            yield pytest.param(more, id=f"{name}, overlapping", marks=pytest.mark.slow)


LONG = (
    as_many_bytes_are_given_as_the_costs_say,
    consensus_leaves_everybody_as_it_was,
    the_same_bits_after_a_snapshot_at_any_step,
)


def checks() -> Iterator[Any]:
    """Yield what holds for all; what takes most of the time is left to the whole run."""
    for check in CHECKS:
        yield pytest.param(check, id=check.__name__, marks=[pytest.mark.slow] if check in LONG else [])


@pytest.mark.parametrize("check", list(checks()))
@pytest.mark.parametrize("settings", list(in_every_way()))
def test_it_keeps_the_contract(settings: StrategySettings, check: Callable[[StrategySettings], None]) -> None:
    check(settings)


LOSSY = {"codec": "mxfp4", "error_feedback": True, "verify_interval": 1}
STREAM = {"sync_interval": 4, "fragments": 2, "sync_delay": 3, "mixing": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own", "more"),
    [
        ("local_sgd", {"sync_interval": 4}, LOSSY | {"codec": "int8"}),
        ("fedavg", {"sync_interval": 4, "fraction": 0.5, "island_size": 2}, {}),
        ("sparta", {"share": 0.1, "delay": 3}, {}),
        ("sparta", {"share": 0.1, "interval": 2, "delay": 3, "weighting": "samples"}, {}),
        ("diloco", {"sync_interval": 4, "sync_delay": 2}, LOSSY),
        ("streaming_diloco", STREAM | {"merge": "rda", "outer_optimizer": "adamw"}, LOSSY),
        ("streaming_diloco", STREAM | {"weighting": "tokens-squared-per-step"}, LOSSY),
    ],
)
def test_a_snapshot_has_what_options_need(name: str, own: dict[str, Any], more: dict[str, Any]) -> None:
    the_same_bits_after_a_snapshot_at_any_step(StrategySettings(strategy=name, owned={name: own}, **more))


@pytest.mark.parametrize("name", strategies())
def test_a_rehearsal_synchronises_often_enough_and_not_more_often(name: str) -> None:
    usual = StrategySettings(strategy=name)
    assert sync_schedule_of(shortened_for_trial(usual, 5)).interval <= 5
    assert sync_schedule_of(shortened_for_trial(usual, 1000)) == sync_schedule_of(usual)


@pytest.mark.parametrize("name", ["demo", "noloco", "sparseloco", "sparta", "sparta + noloco", "zero1"])
def test_feeding_errors_back_is_refused_where_it_has_no_effect(name: str) -> None:
    with pytest.raises(BadInput, match=f"error_feedback: has no effect with {name.split(' + ')[0]}"):
        strategy_class(name).codec(StrategySettings(error_feedback=True))


def test_islands_feed_no_errors_back() -> None:
    own = {"fedavg": {"island_size": 2}}
    with pytest.raises(BadInput, match="has no effect with islands, which send fp32"):
        strategy_class("fedavg").codec(StrategySettings(error_feedback=True, owned=own))


@pytest.mark.parametrize("name", ["sparta + diloco", "diloco + sparta"])
def test_a_codec_that_one_part_refuses_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="codec = mxfp4 is made for differences"):
        strategy_class(name).codec(StrategySettings(codec="mxfp4"))


def test_a_part_that_cannot_feed_errors_back_leaves_that_to_the_other() -> None:
    settings = StrategySettings(strategy="sparta + diloco", error_feedback=True, codec="bf16")
    kind = strategy_class(settings.strategy)
    kind(StrategyContext(settings, total_steps=10, seed=1))
    assert kind.codec(settings) == "bf16"


@pytest.mark.parametrize(("codec", "planned"), [("topk:0.2", True), ("bf16", False)])
def test_a_plan_feeds_errors_back_where_a_part_wants_it(codec: str, planned: bool) -> None:
    costs = strategy_class("sparta + diloco").costs
    assert costs is not None
    assert costs.settings(RunSpec(1000, codec=codec), SyncSchedule(20))["error_feedback"] is planned


@pytest.mark.parametrize("name", ["noloco", "sparta"])
def test_codecs_for_differences_are_refused_for_weights(name: str) -> None:
    with pytest.raises(BadInput, match="codec = mxfp4 is made for differences") as caught:
        strategy_class(name).codec(StrategySettings(codec="mxfp4"))
    assert caught.value.hint == "one of fp32, bf16, fp16, or auto"
