"""What goes wrong in a process group ends in time, with the name of who it was, and never in wrong numbers."""

from __future__ import annotations

from datetime import timedelta

import group_cases
import pytest
from group_members import Members
from torch._C._distributed_c10d import HashStore

from training.exchange.base import ExchangeTimeout
from training.exchange.links.listener import Identity, Listener
from training.exchange.torch_backend.group_base import GroupBase

pytestmark = pytest.mark.slow


def test_who_never_comes_is_named() -> None:
    listener = Listener("127.0.0.1", Identity("", 4, None))
    with pytest.raises(ExchangeTimeout, match="rank 7 did not connect within 0.1 s"):
        GroupBase(HashStore(), 0, 2, timedelta(seconds=0.1), [4, 7], listener)
    listener.close()


def test_members_that_disagree_are_told_and_get_no_numbers(members: Members) -> None:
    found = members.run("group_cases:disagree", "muster", 2)
    for name, *told in zip(group_cases.DISAGREE, *found):
        assert "the connection with rank" in told[0] or "the connection with rank" in told[1], name
        assert not any("nothing" in one for one in told), f"{name}: it ended because of the time"


def test_what_cannot_be_done_is_refused_and_the_group_goes_on(members: Members) -> None:
    for found in members.run("group_cases:refused", "muster", 2):
        assert found.pop() == ""
        assert all(found) and not any("lost" in one for one in found), found


def test_members_may_begin_and_wait_in_different_orders(members: Members) -> None:
    assert members.run("group_cases:own_order", "muster", 2) == [3.0, 3.0]


def test_callbacks_coalesced_operations_and_many_groups(members: Members) -> None:
    again, one, other, after, last = members.run("group_cases:own_groups", "muster", 2)[1]
    assert again == [2.0] * 3 and one == [1.0] * 2 and other == [1.0]
    assert after == [1024.0] * 2 and last == [4096.0] * 2


def test_who_stands_still_is_named_after_the_groups_time(members: Members) -> None:
    found = members.run("group_cases:stands_still", "muster", 3)[0]
    for kind, told in zip(group_cases.KINDS, found):
        assert "rank 2 is lost: it " in told or "no connection with rank 2" in told, (kind, told)


def test_waiting_for_a_while_ends_nothing(members: Members) -> None:
    waited, right, barrier = members.run("group_cases:patience", "muster", 2)[0]
    assert "it waits for rank 1" in waited and not right and "barrier: no result after 0.1 s" in barrier


@pytest.mark.parametrize("kind", ["small", "long", "all_to_all", "broadcast", "recv", "send"])
def test_who_dies_in_the_middle_is_named(members: Members, kind: str) -> None:
    """Also where it had forked: the children of a data loader keep no connection open."""
    case = f"group_cases:dies:{kind}"
    members.send(case, "muster", 3)
    good, told = members.answer(0, case)
    assert good and "rank 2 is lost" in told[0]
    members.answer(1, case)
    assert members.replace(2) == 3


def test_a_process_that_ends_without_a_word_neither_hangs_nor_aborts(members: Members) -> None:
    members.send("group_cases:leaves", "muster", 2)
    assert [members.replace(rank) for rank in range(2)] == [7, 7]
