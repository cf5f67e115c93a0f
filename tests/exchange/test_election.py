"""Members whose coordinator is gone elect another one among them, and go on without losing a result."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from coordinated_lab import Lab, cut, lab, means

from tests.waiting import until
from training.exchange.base import ExchangeError
from training.exchange.group import succession
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.join_config import Allegiance
from training.exchange.mean import mesh_member
from training.exchange.mean.mesh_member import MeshMember

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("ELECT_AFTER", 1.5), ("LOST_AFTER", 1.2), ("ASK_AGAIN_AFTER", 0.3), ("PREPARE_AFTER", 0.2)):
        monkeypatch.setattr(succession, name, seconds)


class StandInHere:
    """Coordinators of this process."""

    def __init__(self, running: Lab, rank: int) -> None:
        self._lab, self._rank = running, rank
        self.coordinator: Coordinator | None = None

    def prepare(self) -> None: ...

    def discard(self) -> None: ...

    def start(self, term: int) -> int:
        keys = self._lab.certificates and self._lab.certificates / f"member-{self._rank}"
        changes = {"term": term, "certificates": keys, "port": 0, "local": frozenset({self._rank})}
        self.coordinator = Coordinator(self._lab.config.model_copy(update=changes))
        return self.coordinator.start()

    def stop(self) -> None:
        if self.coordinator is not None:
            vanish(self.coordinator)

    def release(self) -> None:
        if self.coordinator is not None:
            self.coordinator.stop()


def vanish(coordinator: Coordinator) -> None:
    """End a coordinator as a kill does: its members hear nothing."""

    def end() -> None:
        for writer in coordinator._connections:
            writer.transport.abort()
        if coordinator._accepting is not None and coordinator._listening is not None:
            coordinator._accepting.cancel()
            coordinator._listening.close()
        coordinator.group.members.clear()

    coordinator._loop.call_soon_threadsafe(end)


def connected(running: Lab) -> tuple[list[MeshMember], list[StandInHere]]:
    stand_ins = [StandInHere(running, rank) for rank in range(running.size)]
    with ThreadPoolExecutor(running.size) as pool:
        return list(
            pool.map(lambda rank: running.connect(rank, stand_in=stand_ins[rank]), range(running.size))
        ), stand_ins


def mean_of(members: list[MeshMember], name: str) -> list[float]:
    vectors = [torch.tensor([float(member.rank)]) for member in members]
    return [float(result.mean[0]) for result in means(members, name, vectors, "fp32", weight=1.0)]


def test_two_of_three_go_on_and_take_a_newcomer_that_is_told_whom_they_follow(tmp_path: Path) -> None:
    with lab(tmp_path, 3, tls=True, elects=True, spare=1) as running:
        members, stand_ins = connected(running)
        assert mean_of(members, "a") == [1.0] * 3
        until(lambda: running.coordinator.group._quorum.committed is not None)
        running.coordinator.ban(3)
        until(lambda: all(member._client.succession.allegiance.barred == {3} for member in members))
        vanish(running.coordinator)
        cut(members[0])
        assert mean_of(members[1:], "b") == [1.5] * 2
        assert [stand_in.coordinator is not None for stand_in in stand_ins] == [False, True, False]
        group = stand_ins[1].coordinator.group
        until(lambda: group._quorum.committed is not None and group._quorum.committed.members == (1, 2))
        del running.members[0]
        elected = members[2]._client.succession.allegiance.followed
        newcomer = functools.partial(running.connect, 3, allegiance=Allegiance(elected, ["127.0.0.1"], elected))
        with pytest.raises(ExchangeError, match="it was dropped from the run"):
            newcomer()
        for member in members[1:]:  # the supervisor has come back, and lets it in
            member._client.succession.allegiance.readmitted.add(3)
        until(lambda: not group._bans.ranks)
        assert newcomer().is_newcomer
        for member in members[1:]:  # and drops it for good again
            allegiance = member._client.succession.allegiance
            allegiance.banned, allegiance.readmitted = {3}, set()
        until(lambda: 3 not in group.members)
        with pytest.raises(ExchangeError, match="it was dropped from the run"):
            newcomer()


def test_one_of_three_waits_and_ends_without_going_on(tmp_path: Path) -> None:
    with lab(tmp_path, 3, elects=True) as running:
        members, _ = connected(running)
        assert mean_of(members, "a") == [1.0] * 3
        vanish(running.coordinator)
        for member in members[:2]:
            cut(member)
        members[2]._client._redial_for = members[2]._client._deadline = 0.0
        with pytest.raises(Exception, match="the machine that holds the run together"):
            mean_of(members[2:], "b")
        assert not members[2]._client.succession.allegiance.followed


def test_whom_nobody_can_connect_with_is_dropped_and_not_who_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_member, "_FORM_SECONDS", 2.0)
    with lab(tmp_path, 3, tls=True) as running, ThreadPoolExecutor(3) as pool:
        transports = {0: "tls"}  # which the others do not take
        joined = [pool.submit(running.connect, rank, transport=transports.get(rank, "auto")) for rank in range(3)]
        with pytest.raises(ExchangeError, match="dropped from the group"):
            joined[0].result()
        assert mean_of([joined[rank].result() for rank in (1, 2)], "a") == [1.5] * 2
