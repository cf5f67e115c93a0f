"""Weights that differ become those that most members hold, whatever one of them says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Vectors, attached, in_a_group

from tests.training.memory_exchange import RoomExchange, together
from training.exchange.base import ExchangeError
from training.strategies.allreduce import AllReduce
from training.strategies.diloco import DiLoCo
from training.strategies.weights import broadcast_from, majority, weight_hash


def test_most_members_are_right_and_else_the_lowest_rank() -> None:
    assert majority({0: b"x", 1: b"a", 2: b"a"}) == 1
    assert majority({1: b"a", 2: b"b"}) == 1


@pytest.mark.parametrize(
    ("weights", "digest"),
    [
        (torch.empty(0), "c77b3abb6f87acd9"),
        (torch.tensor([1.0, -2.5, 0.1]), "2aa1073eb9e544fa"),
        (torch.arange(8.0)[::2], "3ba50cfb455d0794"),
        (torch.arange(0.0, 8.0, 2.0), "3ba50cfb455d0794"),
        (torch.arange(1.0, 5000.0), "329639c91f9c0fef"),
        (torch.arange(0.0, 5000.0)[1:], "329639c91f9c0fef"),
    ],
)
def test_the_hash_of_weights_is_the_written_one(weights: torch.Tensor, digest: str) -> None:
    assert weight_hash(weights) == digest


@given(place=st.integers(0, 299_999), bit=st.integers(0, 31))
def test_one_other_bit_is_another_hash(place: int, bit: int) -> None:
    weights = torch.ones(300_000)
    weights.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert weight_hash(weights) != weight_hash(torch.ones(300_000))


@pytest.mark.parametrize("make", [AllReduce, DiLoCo])
def test_one_of_three_does_not_set_the_others_weights(make: Any) -> None:
    def body(member: RoomExchange) -> torch.Tensor:
        model, warnings = Vectors(), list[str]()
        strategy = attached(make, member, model, warnings, verify_interval=1, sync_interval=1, codec="fp32")
        if member.rank == 0:
            with torch.no_grad():
                model.first += 5.0
                model.second += 5.0
            if isinstance(strategy, DiLoCo):
                strategy.tensors()["anchor"] += 5.0  # as of a member that did another outer step
        strategy.begin_step(0, 1.0)
        strategy.gradients()
        strategy.end_step()
        return torch.cat([model.first, model.second]).detach()

    found = in_a_group(3, body)
    assert all(torch.equal(weights, torch.zeros_like(weights)) for weights in found)


def test_a_round_whose_repair_is_cut_short_is_merged_once() -> None:
    def body(member: RoomExchange) -> tuple[torch.Tensor, int]:
        model = Vectors()
        strategy = attached(DiLoCo, member, model, [], verify_interval=1, sync_interval=1, codec="fp32")
        assert isinstance(strategy, DiLoCo)
        (fragment,) = strategy._fragments
        with torch.no_grad():
            model.first += 1.0
            fragment.anchor += 5.0 * (member.rank == 0)
        strategy.begin_step(0, 1.0)
        strategy.gradients()
        gather, anchor = member.gather, fragment.anchor.clone()

        def cut(name: str, payload: bytes) -> dict[int, bytes]:
            raise ExchangeError("the group is lost")

        member.gather = cut  # type: ignore[method-assign]
        with pytest.raises(ExchangeError):
            strategy.end_step()
        assert fragment.round == 0 and torch.equal(fragment.anchor, anchor)
        member.gather = gather  # type: ignore[method-assign]
        strategy.merge(fragment)
        return fragment.anchor.clone(), fragment.round

    anchors, rounds = zip(*in_a_group(3, body))
    assert all(torch.equal(anchor, anchors[1]) for anchor in anchors) and rounds == (1, 1, 1)


@pytest.mark.parametrize(
    ("size", "piece", "word"),
    [
        (b"x", b"", "did not hand over"),
        (b"9" * 30, b"", "did not hand over"),
        (b"4096", b"", "did not hand over"),
        (b"8", bytes(7), "did not hand over"),
        (b"4", bytes(4), "another 'w'"),
        (b"8", b"\xff" * 8, "not finite"),
    ],
)
def test_what_a_member_hands_over_is_checked(size: bytes, piece: bytes, word: str) -> None:
    def body(member: RoomExchange) -> Any:
        if member.rank:
            return broadcast_from(0, torch.ones(2), member, "w")
        member.gather("w/size", size)
        return member.start_gather("w/0", piece) if size in (b"4", b"8") else None

    found = together(2, body)[0][1]
    assert isinstance(found, ExchangeError) and word in str(found)


@pytest.mark.parametrize("lie", [b"x", b"nan", b"-1", b"1e999"])
def test_a_distance_that_is_none_is_not_believed(lie: bytes) -> None:
    def body(member: RoomExchange) -> Any:
        if member.rank == 0:
            return broadcast_from(0, torch.ones(2), member, "w")[1]
        member.gather("w/size", b"0")
        member.gather("w/0", b"")
        return member.gather("w/drift", lie)

    assert together(2, body)[0][0] == 0.0
