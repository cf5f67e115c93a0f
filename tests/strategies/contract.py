"""What holds for every strategy, whoever wrote it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from members import INTERVAL, Member, Shapes, settings_of
from small_models import in_a_group

from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.exchange.base import SoloExchange
from training.exchange.codecs import codec_by_name
from training.strategies.registry import cost_model, default_strategy, strategy_class
from training.strategies.user_strategy import load_user_strategy

BY_SHAPE = ("demo",)
"""What these give follows from the tensors' shapes; their own tests count it."""


def one_member_alone_trains_as_without_a_strategy(settings: StrategySettings) -> None:
    if strategy_class(settings.strategy).replaces_optimizer:
        pytest.skip("it is the optimizer as well")
    alone = Member(settings, SoloExchange(), start="scratch")  # where outer rates are not those of a plain mean
    plain = Member(settings_of(default_strategy()), SoloExchange())
    for member in (alone, plain):
        member.until(12)
        member.strategy.finish()
    torch.testing.assert_close(alone.weights(), plain.weights(), atol=1e-6, rtol=1e-6)


def members_are_equal_where_the_strategy_says_so(settings: StrategySettings) -> None:
    def body(exchange: RoomExchange) -> Any:
        member, found = Member(settings, exchange), list[tuple[int, str, str]]()
        while member.goes_on(13):
            at_sync = member.one_step()
            own = member.hash()
            if at_sync:
                with member.strategy.consensus():
                    found.append((member.step, "consensus", member.hash()))
            if member.strategy.equal == "always" or (
                member.strategy.equal == "synchronised" and member.strategy.synchronised
            ):
                found.append((member.step, "own", own))
        assert all(member.step >= step for step, *_ in found)
        report = member.strategy.finish()
        with member.strategy.consensus():
            found.append((member.step, "end", member.hash()))
        reports = [*member.reports, *([report] if report else [])]
        apart = bool(member.stretch)  # then each member tells of other versions
        told = [] if apart else [one.weight_hash for one in reports if one.weight_hash]
        return found, told, member.strategy.members

    (found, told, members), *others = in_a_group(3, body)
    assert all(other == (found, told, members) for other in others)
    assert members == (0, 1, 2)
    assert len({digest for *_, digest in found}) > 2, "nothing is learnt"


def the_same_bits_after_a_snapshot_at_any_step(settings: StrategySettings) -> None:
    def body(exchange: RoomExchange) -> Any:
        member, saved = Member(settings, exchange), []
        while member.goes_on(13):
            if 4 <= member.step < 4 + INTERVAL and (not member.stretch or member.strategy.synchronised):
                saved.append(member.snapshot())
            member.one_step()
        return saved, member.hash()

    whole = in_a_group(3, body)
    for index in range(len(whole[0][0])):

        def go_on(exchange: RoomExchange, index: int = index) -> str:
            member = Member(settings, exchange, saved=whole[exchange.rank][0][index])
            member.until(13)
            return member.hash()

        assert in_a_group(3, go_on) == [digest for _, digest in whole], f"after step {4 + index}"


def a_newcomer_takes_part(settings: StrategySettings) -> None:
    def body(exchange: RoomExchange) -> Any:
        if exchange.is_newcomer:
            member = Member(settings, exchange, joining=exchange.fetch_state())
            begun = member.step
        else:
            member = Member(settings, exchange)
            member.until_synchronised(begun := 5)
            if exchange.rank == 0:
                member.admit()
        member.until(20)
        member.strategy.finish()
        with member.strategy.consensus():
            agreed = member.hash()
        return begun > 4, member.strategy.members, agreed, member.hash() if member.strategy.equal != "never" else ""

    found = in_a_group(3, body, newcomers=1)
    assert found == [(True, (0, 1, 2), *found[0][2:])] * 3


def the_others_go_on_without_a_member(settings: StrategySettings) -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Member(settings, exchange)
        member.until_synchronised(5)
        if exchange.rank == 1:
            exchange.room.leave(1)
            return None
        member.until(20)
        member.strategy.finish()
        with member.strategy.consensus():
            agreed = member.hash()
        return member.strategy.members, agreed, member.hash() if member.strategy.equal != "never" else ""

    first, _, last = in_a_group(3, body)
    assert first == last and first[0] == (0, 2)


def consensus_leaves_everybody_as_it_was(settings: StrategySettings) -> None:
    def body(exchange: RoomExchange, looks: bool) -> str:
        member = Member(settings, exchange)
        while member.goes_on(13):
            if member.one_step() and looks:
                before = member.weights()
                with member.strategy.consensus():
                    pass
                assert torch.equal(member.weights(), before)
                if exchange.rank == 0:
                    with member.strategy.for_newcomer():
                        pass
                    assert torch.equal(member.weights(), before)
        return member.hash()

    assert in_a_group(3, lambda one: body(one, looks=True)) == in_a_group(3, lambda one: body(one, looks=False))


def as_many_bytes_are_given_as_the_costs_say(settings: StrategySettings) -> None:
    kind, settings, steps = strategy_class(settings.strategy), load_user_strategy(settings), 20
    costs = cost_model(settings.strategy, settings)
    if costs is None or settings.strategy in BY_SHAPE:
        pytest.skip("its costs are not known by the number of parameters")

    def body(exchange: RoomExchange) -> tuple[int, int]:
        member = Member(settings, exchange, make=lambda: Shapes(width=3000))
        member.until(8)
        before = exchange.traffic.bytes_sent
        member.until(8 + steps)
        return exchange.traffic.bytes_sent - before, member.weights().numel()

    codec, interval = codec_by_name(kind.codec(settings)), kind.sync_schedule(settings).interval
    for given, elements in in_a_group(2, body):
        expected = codec.expected_bytes(costs.elements(elements)) * steps / interval
        assert given == pytest.approx(expected, rel=0.03)


CHECKS = (
    one_member_alone_trains_as_without_a_strategy,
    members_are_equal_where_the_strategy_says_so,
    the_same_bits_after_a_snapshot_at_any_step,
    a_newcomer_takes_part,
    the_others_go_on_without_a_member,
    consensus_leaves_everybody_as_it_was,
    as_many_bytes_are_given_as_the_costs_say,
)
