"""Members of several devices that are lost and come back, in whatever order their processes and coordinators say so."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed.run import returning_run
from distributed.run.returning_run import ReturningRun
from profiles.errors import BadInput, ExitCode
from tests.runs.run_stage import Script, Stage
from training.exchange.torch_backend.store_server import StoreServer
from training.records.events import ErrorEvent, MemberEvent, RunEvent
from training.records.plan import MemberPlan
from training.run import meeting_point
from training.run.intake import COORDINATOR

DEVICES, LOST = range(2, 6), "its connection broke"
MOVES = st.tuples(st.sampled_from(["dies", "ends", "is_lost", "is_let_in", "joins", "look"]), st.sampled_from(DEVICES))


class History:
    """A run of three members of two devices each, of which the first one trains all the time."""

    def __init__(self, folder: Path) -> None:
        kind = partial(ReturningRun, take_back=self._take_back, is_back=lambda machines: True)
        options = {"strategy": "diloco", "layout": "pipeline", "stages": 2, "batch_size": 6}
        self._stage = Stage(folder, workers=6, kind=kind, **options)
        self.running, self.joining = {*range(6)}, set[int]()
        self._stage.take(0, RunEvent(status="running"))

    @property
    def run(self) -> ReturningRun:
        assert isinstance(self._stage.run, ReturningRun)
        return self._stage.run

    def close(self) -> None:
        self._stage.run.kill()
        self._stage.folder.close()

    def do(self, move: str, rank: int) -> None:
        """Make a move, if it is possible now."""
        if move == "look":
            self.run.look()
        elif rank in self.running:
            getattr(self, move)(rank)
        self._note_killed()
        self.check()

    def dies(self, rank: int) -> None:
        self._ended(rank, -signal.SIGKILL)

    def ends(self, rank: int) -> None:
        """A device ends as another one of its member has."""
        if rank ^ 1 not in self.running:
            self._stage.take(rank, ErrorEvent(message=f"worker-{rank // 2}: the connection is lost", lost_others=True))
            self._ended(rank, ExitCode.RUN_FAILED)

    def is_lost(self, rank: int) -> None:
        """The coordinator of its column loses a device that still runs."""
        self._stage.take(COORDINATOR, MemberEvent(member=rank, status="lost", message=LOST))

    def is_let_in(self, rank: int) -> None:
        if rank in self.joining:
            self._stage.take(COORDINATOR, MemberEvent(member=rank, status="joined", message="joins a running group"))

    def joins(self, rank: int) -> None:
        if rank in self.joining and rank ^ 1 in self.running:
            self.joining.discard(rank)
            for status in ("joined", "ready"):
                self._stage.take(rank, MemberEvent(status=status))

    def come_back(self) -> None:
        """All that is left of lost members ends, and they come back one by one."""
        for _ in range(8):
            for rank in sorted(self.running & self.run.members.detached - self.joining):
                self.dies(rank)  # its column has dropped it
            for rank in DEVICES:
                self.do("ends", rank)
            for rank in sorted(self.joining):
                self.do("is_let_in", rank)
                self.do("joins", rank)
            lost = [rank for rank in self.run.members.lost_members if not self.running & {2 * rank, 2 * rank + 1}]
            if lost and not self.run.members.joining:
                self._take_back(self.run.plan.members[lost[0]])

    def check(self) -> None:
        members, named = self.run.members, {rank // 2 for rank in self.run.members.active_ranks}
        assert not named & {*members.lost_members}, "a lost member counts"
        assert {*members.active_ranks} <= self.running and members.joining <= members.detached
        assert len({rank // 2 for rank in members.joining}) < 2, "two members join at once"
        for member in (1, 2):
            statuses = [status for status, _ in self._stage.told(member)]
            assert ("lost", "lost") not in pairwise(statuses), "a loss is told twice"

    def _take_back(self, member: MemberPlan) -> None:
        ranks = self.run.plan.processes_of(member.rank)
        self.run.members.check_can_join(member.rank)
        for rank in ranks:
            self._stage.workers[rank] = Script()
        self.run.admit(member.rank)
        self.running |= {*ranks}
        self.joining |= {*ranks}
        for rank in ranks:
            self._stage.take(rank, MemberEvent(status="started"))

    def _ended(self, rank: int, code: int) -> None:
        self.running.discard(rank)
        self.joining.discard(rank)
        self._stage.ends(rank, code)

    def _note_killed(self) -> None:
        for rank in sorted(self.running):
            if self._stage.workers[rank].signals:
                self.running.discard(rank)
                self.joining.discard(rank)
                self.run.note_end(rank)


@pytest.fixture(scope="module", autouse=True)
def no_keys() -> Iterator[None]:
    """Nobody connects; and looks for lost members are moves here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting_point, "issue_run_certificates", lambda *arguments: None)
        patch.setattr(StoreServer, "admit", lambda *arguments: None)
        patch.setattr(returning_run, "_LOOKS_EVERY", 3600.0)
        yield


@given(moves=st.lists(MOVES, max_size=40))
def test_whatever_happens_lost_members_count_again_once_they_are_back(
    moves: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    history = History(tmp_path_factory.mktemp("run"))
    try:
        for move, rank in moves:
            try:
                history.do(move, rank)
            except BadInput:
                pass
        history.come_back()
        assert history.run.members.active_ranks == [*range(6)]
        assert not history.run.members.joining and not history.run.members.lost_members
    finally:
        history.close()
