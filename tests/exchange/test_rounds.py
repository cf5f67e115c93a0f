"""Round bookkeeping: every part closes exactly once, with those who are there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.rounds import Closing, Contribution, Round, RoundBook
from training.exchange.wire import HubLimits, WireError


def book(quorum: float = 1.0, kept: int = 1000, member: int = 1000, rounds: int = 10) -> RoundBook:
    return RoundBook(quorum, 10.0, 100.0, HubLimits(0, 0, member, 0, kept, rounds))


def add(
    b: RoundBook, rank: int, name: str = "r", part: int = 0, parts: int = 1, now: float = 0.0, size: int = 1
) -> Round:
    return b.add(rank, name, ("mean", parts), parts, part, Contribution(1.0, rank, size), now)


def ranks(closing: Closing | None) -> list[int] | None:
    return None if closing is None else [rank for rank, _ in closing.contributions]


def test_closes_when_all_live_members_have_sent_in_rank_order() -> None:
    b = book()
    current = add(b, 2)
    assert b.take(current, 0, {0, 2}, 0.0) is None
    add(b, 0)
    closing = b.take(current, 0, {0, 2}, 0.0)
    assert ranks(closing) == [0, 2] and closing is not None and closing.members == (0, 2)
    assert b.take(current, 0, {0, 2}, 0.0) is None


@pytest.mark.parametrize(("quorum", "needed"), [(0.0, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_quorum_counts_only_after_the_deadline(quorum: float, needed: int) -> None:
    b, live = book(quorum), {0, 1, 2, 3}
    for rank in range(needed):
        current = add(b, rank)
        assert rank == 3 or b.take(current, 0, live, 9.9) is None
        assert (b.take(current, 0, live, 10.0) is not None) == (rank + 1 == needed)


def test_a_lost_member_is_neither_waited_for_nor_counted() -> None:
    b = book()
    add(b, 0)
    add(b, 1)
    b.forget_member(1)
    assert [ranks(c) for c in b.take_all({0}, 0.0)] == [[0]]


def test_a_round_of_the_lost_alone_is_forgotten() -> None:
    b = book(rounds=1)
    add(b, 0, "a")
    b.forget_member(0)
    add(b, 1, "b")


def test_late_contributions_hold_no_memory_and_open_nothing() -> None:
    b = book(member=1)
    current = add(b, 0)
    closing = b.take(current, 0, {0}, 0.0)
    assert closing is not None
    b.publish(closing, [b"result"])
    assert add(b, 1, size=1) is current and add(b, 1, "other", size=1).name == "other"
    assert current.results[0] == [b"result"] and b.has_opened("r", 1)


def test_results_are_kept_up_to_the_limit() -> None:
    b = book(kept=10)
    for name in ("a", "b", "c"):
        closing = b.take(add(b, 0, name), 0, {0}, 0.0)
        assert closing is not None
        b.publish(closing, [b"12345"])
    add(b, 1, "b")
    with pytest.raises(WireError, match="too late"):
        add(b, 1, "a")


def test_a_name_that_was_used_is_refused_to_who_used_it() -> None:
    b = book()
    closing = b.take(add(b, 0), 0, {0}, 0.0)
    assert closing is not None
    b.publish(closing, [b"result"])
    with pytest.raises(WireError, match="a name belongs to one operation"):
        add(b, 0)
    assert add(b, 1).results[0] == [b"result"]


def test_misuse_is_refused() -> None:
    b = book(member=5, rounds=2)
    add(b, 0, parts=2, size=3)
    with pytest.raises(WireError, match="came twice"):
        add(b, 0, parts=2)
    with pytest.raises(WireError, match="another codec or length than before"):
        add(b, 0, parts=3)
    with pytest.raises(WireError, match="wait for the other members"):
        add(b, 0, "x", size=3)
    with pytest.raises(WireError, match="more than 2 operations"):
        add(b, 0, "y")
    with pytest.raises(WireError, match="weight changed"):
        b.add(0, "r", ("mean", 2), 2, 1, Contribution(2.0, 0, 0), 0.0)


def test_a_closing_that_came_to_nothing_can_be_tried_again() -> None:
    b = book()
    closing = b.take(add(b, 0), 0, {0}, 0.0)
    assert closing is not None
    b.reopen(closing)
    b.forget_member(0)
    assert ranks(b.take(add(b, 1), 0, {1}, 0.0)) == [1]


def test_a_round_that_cannot_close_is_given_up() -> None:
    b = book(member=1)
    add(b, 0)
    assert b.overdue(99.0) == []
    assert [r.name for r in b.overdue(100.0)] == ["r"]
    add(b, 0, "next")
    with pytest.raises(WireError, match="too late"):
        add(b, 1)


PARTS, RANKS = 3, 4
moves = st.permutations([("send", r, p) for r in range(RANKS) for p in range(PARTS)])


@given(moves, st.lists(st.tuples(st.integers(0, RANKS * PARTS), st.integers(0, RANKS - 1)), max_size=RANKS - 1))
def test_every_part_closes_once_with_exactly_the_live_members(
    sends: list[tuple[str, int, int]], losses: list[tuple[int, int]]
) -> None:
    b, live = book(), set(range(RANKS))
    closed: dict[int, list[int] | None] = {}

    def close(closing: Closing | None) -> None:
        if closing is not None:
            assert closing.part not in closed
            assert ranks(closing) == sorted(live) == list(closing.members)
            closed[closing.part] = ranks(closing)
            b.publish(closing, [b"x"])

    for moment, (_, rank, part) in enumerate(sends):
        for _, lost in [loss for loss in losses if loss[0] == moment]:
            live.discard(lost)
            b.forget_member(lost)
            for closing in b.take_all(live, 0.0):
                close(closing)
        if rank in live:
            close(b.take(add(b, rank, part=part, parts=PARTS), part, live, 0.0))
    assert sorted(closed) == list(range(PARTS))
    assert not list(b.take_all(live, 1000.0))


# --------------------------------------------------------------------------------------------------------- who is right


def sides(*parts: int) -> RoundBook:
    """A book in which rank *i* has sent the operation "r" with ``parts[i]`` parts."""
    b = book()
    for rank, number in enumerate(parts):
        add(b, rank, parts=number)
    return b


def dropped(b: RoundBook, live: set[int], now: float = 0.0) -> list[int]:
    return [rank for rank, _ in b.outvoted(live, now)]


@pytest.mark.parametrize(
    ("parts", "wrong"), [((1, 2), [1]), ((1, 2, 2), [0]), ((1, 1, 2, 2), [2, 3]), ((3, 2, 1), [1, 2]), ((2, 2, 2), [])]
)
def test_most_members_are_right_or_else_the_lowest_rank(parts: tuple[int, ...], wrong: list[int]) -> None:
    assert dropped(sides(*parts), set(range(len(parts)))) == wrong


def test_nobody_is_blamed_before_most_have_spoken_or_the_deadline_has_come() -> None:
    b = sides(1, 2)
    assert dropped(b, {0, 1, 2, 3}, now=9.9) == []
    assert dropped(b, {0, 1, 2, 3}, now=10.0) == [1]


@given(st.permutations([(0, 2), (1, 1), (2, 1), (3, 2), (4, 1)]))
def test_the_order_in_which_they_come_decides_nothing(sends: list[tuple[int, int]]) -> None:
    b, live = book(), set(range(5))
    for rank, parts in sends:
        if rank not in live:
            continue
        add(b, rank, parts=parts)
        for lost in dropped(b, live):
            live.discard(lost)
            b.forget_member(lost)
    assert live == {1, 2, 4}
    assert [ranks(closing) for closing in b.take_all(live, 0.0)] == [[1, 2, 4]]


def test_what_one_member_opens_costs_nobody_else_a_place() -> None:
    b = book(rounds=3)
    for number in range(3):
        add(b, 0, f"evil/{number}")
    with pytest.raises(WireError, match="more than 3 operations"):
        add(b, 0, "evil/3")
    for number in range(3):
        add(b, 1, f"good/{number}")
    b.forget_member(0)
    assert [ranks(closing) for closing in b.take_all({1}, 0.0)] == [[1]] * 3


def test_a_finished_operation_gives_its_place_back() -> None:
    b = book(rounds=1)
    for number in range(5):
        closing = b.take(add(b, 0, f"r/{number}"), 0, {0}, 0.0)
        assert closing is not None
        b.publish(closing, [b"x"])
