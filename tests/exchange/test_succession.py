"""Where a member turns that has lost its coordinator; the others' answers are given."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from training.exchange.coordinator_protocol import GroupStatus, MeshStart, Peer, Report, Standing
from training.exchange.group import succession
from training.exchange.group.election import Neighbour, Successor
from training.exchange.group.join_config import JoinConfig
from training.exchange.group.succession import Succession

REPORT = Report(epoch=1, mesh=1, members=(0, 1, 2))
PEERS = {rank: Peer(name=f"m{rank}", addresses=((f"10.0.0.{rank}", 7),)) for rank in range(3)}
LATER = 4096 + 2


class StandIn:
    """Starts nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (self.calls.append(name), 7)[1]


@pytest.fixture
def one() -> Succession:
    """That of rank 1, which has been in a group of three."""
    joining = JoinConfig("10.0.0.9:1", None, "r", 1, 3, "m1", stand_in=StandIn())
    joining.allegiance.peers = dict(PEERS)
    made = Succession(joining, lambda: REPORT)
    made.settle()
    return made


def search(one: Succession, *answers: Neighbour, monkeypatch: pytest.MonkeyPatch) -> Successor | None:
    async def ask_all(*arguments: object) -> list[Neighbour]:
        return list(answers)

    monkeypatch.setattr(succession, "ask_all", ask_all)
    one._settled_at = time.monotonic() - 100.0
    return asyncio.run(one._find_successor(one._stand_in, True))


def ended_search(one: Succession, chosen: Successor, is_held: bool) -> Successor | None:
    async def ended() -> Successor | None:
        one._searching = asyncio.get_running_loop().create_future()
        one._searching.set_result(chosen)
        return one.result(is_held)

    return asyncio.run(ended())


def test_it_goes_back_from_a_coordinator_that_never_answers(one: Succession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "STANDS_FOR", 0.0)
    one.follow(Successor(LATER, 2, 8))
    assert one.endpoints[0] == "10.0.0.2:8"
    one.rotate()
    assert one.endpoints[0] == "10.0.0.9:1" and one.allegiance.followed is None
    one.follow(Successor(LATER, 2, 8))
    one.note_vote()
    one.rotate()
    assert one.endpoints[0] == "10.0.0.2:8"


def test_a_coordinator_on_a_machine_that_it_does_not_know_is_none(one: Succession) -> None:
    assert ended_search(one, Successor(LATER, 9, 8), True) is None


def test_one_that_was_started_while_the_group_came_back_is_ended(one: Succession) -> None:
    assert ended_search(one, Successor(LATER, 1, 8), False) is None
    assert one._stand_in.calls == ["stop"]


def test_whoever_reaches_too_few_keeps_nobody_from_being_elected(
    one: Succession, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Neighbour(2, Standing(report=REPORT, lost=True, able=True))
    assert search(one, monkeypatch=monkeypatch) is None and not one._standing.able
    assert search(one, two, monkeypatch=monkeypatch) == Successor(4096 + 1, 1, 7)
    assert one._standing.able and one._stand_in.calls == ["start"]


def test_members_of_an_earlier_mesh_are_asked_too(one: Succession) -> None:
    left = {rank: PEERS[rank] for rank in (1, 2)}
    one.meet(GroupStatus(epoch=2, form=MeshStart(peers=left, stand=0, donor=1)))
    assert sorted(one.allegiance.peers) == [0, 1, 2]
