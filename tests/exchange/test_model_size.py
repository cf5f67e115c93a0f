"""How large the model is, is what most members say; the hub's limits follow it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.seat import ModelSize
from training.exchange.wire import HubLimits, WireError


def said(*elements: int) -> ModelSize:
    size = ModelSize(None, 8)
    for rank, number in enumerate(elements):
        size.say(rank, number)
    return size


@pytest.mark.parametrize(("elements", "right"), [((5, 9), 5), ((5, 9, 9), 9), ((9, 5, 9, 5), 9), ((7, 8, 9), 7)])
def test_most_are_right_or_else_the_lowest_rank(elements: tuple[int, ...], right: int) -> None:
    size = said(*elements)
    wrong = size.settle(list(range(len(elements))))
    assert wrong is not None and sorted(wrong) == [rank for rank, number in enumerate(elements) if number != right]
    assert size.limits == HubLimits.for_model(right, 8) and size.settle([0, 1]) is None


def test_a_few_do_not_decide_for_all() -> None:
    size = said(5, 5)
    assert size.silent([0, 1, 2]) == [2]
    with pytest.raises(WireError, match="before all members have reported"):
        size.settle([0, 1, 2])
    assert size.settle([0, 1]) == {} and size.silent([0, 1, 2]) == []


def test_who_comes_later_has_the_same_model() -> None:
    size = said(5, 5)
    size.settle([0, 1])
    size.say(2, 5)
    with pytest.raises(WireError, match="its model has 6"):
        size.say(3, 6)


def test_nothing_is_taken_before_the_model_is_known() -> None:
    size = said(5)
    size.require(0)
    with pytest.raises(WireError, match="before its model"):
        size.require(1)
    with pytest.raises(WireError, match="twice"):
        size.say(0, 5)
    size.forget(0)
    size.say(0, 5)


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_limits_are_a_few_models_and_a_constant(elements: int, members: int) -> None:
    limits = HubLimits.for_model(elements, members)
    held = limits.member_bytes + limits.kept_bytes + limits.queued_bytes
    assert held <= 6 * 4 * elements + (54 + 4 * members << 20)
