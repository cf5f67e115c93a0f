"""Never two groups go on as one run, whoever cannot hear whom: members, coordinators and messages without a network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.exchange.coordinator_protocol import (
    PROTOCOL_VERSION,
    Configuration,
    GroupStatus,
    Hello,
    ProtocolError,
    Report,
    Standing,
    newest_of,
)
from training.exchange.group.coordinator_state import CoordinatorConfig, Member, quorum_of
from training.exchange.group.election import Neighbour, Successor, choose
from training.exchange.group.group_membership import GroupMembership
from training.exchange.group.quorum import Quorum, has_votes, may_elect, next_term, term_of

RUN = "r"


@dataclass(eq=False)
class Process:
    """A member: where it is registered, and what it has adopted."""

    rank: int
    report: Report = Report(elements=1)
    term: int = 0
    """The latest that it has followed."""
    inbox: list[GroupStatus] = field(default_factory=list)
    member: Member | None = None
    ended: bool = False

    def note(self, **news: object) -> None:
        self.report = self.report.model_copy(update=news)


class Network:
    """Members that hear only some of the coordinators: the first one, and those that they have elected."""

    def __init__(self, size: int) -> None:
        names = tuple(f"m{rank}" for rank in range(size))
        self.config = CoordinatorConfig(run_id=RUN, names=names, elects=True)
        self.coordinators = {0: GroupMembership(self.config, lambda event: None)}
        self.processes = [Process(rank) for rank in range(size)]
        for process in self.processes:
            self.dial(process.rank, 0)
        for _ in range(3):
            self.hear_all()

    def dial(self, rank: int, term: int) -> None:
        """A member goes to a coordinator, if that is not of an earlier term than one that it has followed."""
        process = self.processes[rank]
        if process.ended or term not in self.coordinators or term < process.term:
            return
        self.hang_up(rank)
        hello = Hello(
            version=PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=len(self.processes), name=f"m{rank}",
            incarnation=str(rank), port=1,
        )  # fmt: skip
        process.inbox.clear()
        member = Member(hello, process.inbox.append, lambda: None, report=process.report)
        process.term = term
        try:
            self.coordinators[term].register(member)
        except ProtocolError:
            return
        process.member = member

    def hang_up(self, rank: int, is_noticed: bool = True) -> None:
        """A member's connection breaks; its coordinator may not hear of that for long."""
        process = self.processes[rank]
        if process.member is not None and is_noticed:
            self.coordinators[process.term].lose(process.member, "its connection broke")
        process.member = None
        process.inbox.clear()

    def elect(self, rank: int, seen: Collection[int]) -> None:
        """A member that has lost its coordinator asks those that it can reach, and does what it decides."""
        reached = [Neighbour(p.rank, self._standing(p)) for p in self.processes if p.rank in {*seen, rank}]
        own = next(neighbour for neighbour in reached if neighbour.rank == rank)
        chosen = choose(own, [neighbour for neighbour in reached if neighbour is not own])
        if chosen is not None and chosen.term not in self.coordinators:
            config = self.config.model_copy(update={"term": chosen.term})
            self.coordinators[chosen.term] = GroupMembership(config, lambda event: None)
        if chosen is not None:
            self.dial(rank, chosen.term)

    def _standing(self, process: Process) -> Standing:
        carrier = process.term % 4096 if process.term else -1
        lost = process.member is None or not process.report.up
        standing = Standing(report=process.report, lost=lost, able=True, term=process.term)
        return standing.model_copy(update={"carrier": carrier, "port": 1 if process.term else 0})

    def hear(self, rank: int) -> None:
        process = self.processes[rank]
        while process.inbox and not process.ended:
            status = process.inbox.pop(0)
            report, form = process.report, status.form
            process.ended = bool(status.failed)
            if status.committed is not None:
                process.note(committed=newest_of(status.committed, report.committed))
            if form is None and status.epoch and (report.up or report.epoch < status.epoch):
                process.note(up=False, epoch=max(status.epoch, report.epoch))
            elif form is not None and status.epoch > report.epoch:
                members = tuple(form.peers)
                process.note(epoch=status.epoch, mesh=status.epoch, members=members, up=True, full=form.stand)
            else:
                continue
            self.say(rank)

    def say(self, rank: int) -> None:
        process = self.processes[rank]
        if process.member is not None:
            try:
                self.coordinators[process.term].on_report(process.member, process.report)
            except ProtocolError:
                self.hang_up(rank)

    def hear_all(self) -> None:
        for process in self.processes:
            self.hear(process.rank)

    def tick(self, term: int) -> None:
        for _ in range(30):
            self.coordinators[term].tick(0.3)

    def standing_meshes(self) -> list[tuple[int, ...]]:
        """Return the members of each mesh that can end an operation: all of them are in it."""
        up = {(p.report.mesh, p.report.members) for p in self.processes if p.report.up and not p.ended}
        return [m for epoch, m in up if all(self.processes[r].report.mesh == epoch and self._is_up(r) for r in m)]

    def _is_up(self, rank: int) -> bool:
        return self.processes[rank].report.up and not self.processes[rank].ended


RANKS = st.integers(0, 4)
MOVES = st.one_of(
    st.tuples(st.sampled_from(["hear", "say"]), RANKS),
    st.tuples(st.just("hang_up"), RANKS, st.booleans()),
    st.tuples(st.just("elect"), RANKS, st.frozensets(RANKS, min_size=1)),
    st.tuples(st.just("dial"), RANKS, st.sampled_from([0, *(4096 * n + rank for n in (1, 2) for rank in range(5))])),
    st.tuples(st.just("tick"), st.sampled_from([0, *(4096 * n + rank for n in (1, 2) for rank in range(5))])),
    st.tuples(st.just("hear_all")),
)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(2, 5), moves=st.lists(MOVES, max_size=60))
def test_never_do_two_groups_go_on(size: int, moves: list[tuple[object, ...]]) -> None:
    network = Network(size)
    assert network.standing_meshes() == [tuple(range(size))]
    for what, *arguments in moves:
        if what in ("hear", "say", "hang_up", "elect", "dial") and arguments[0] not in range(size):
            continue
        if what == "tick" and arguments[0] not in network.coordinators:
            continue
        getattr(network, str(what))(*arguments)
        assert len(network.standing_meshes()) < 2


def test_the_others_go_on_when_the_coordinator_is_gone_and_again_when_the_next_one_is() -> None:
    network = Network(5)
    alive = [0, 1, 2, 3, 4]
    for lost in (0, 1, 2):
        alive.remove(lost)
        network.processes[lost].ended = True
        for rank in alive:
            network.hang_up(rank, is_noticed=False)
            network.processes[rank].note(up=False)
        for rank in (*alive, *alive):
            network.elect(rank, alive)
        (term,) = {network.processes[rank].term for rank in alive}
        for _ in range(10):
            network.coordinators[term].tick(0.3)
            for rank in alive:
                network.say(rank)
            network.hear_all()
        if len(alive) > 2:
            assert network.standing_meshes() == [tuple(alive)]
    assert network.standing_meshes() == [(3, 4)]


def voter(rank: int, mesh: int = 1, members: tuple[int, ...] = (0, 1, 2), committed: int = 0) -> Neighbour:
    last = Configuration(epoch=committed, members=(0, 1, 2)) if committed else None
    return Neighbour(rank, Standing(report=Report(epoch=mesh, mesh=mesh, members=members, committed=last), lost=True))


@pytest.mark.parametrize(
    ("ranks", "needs_coordinator", "needs_election"),
    [((0, 1), True, True), ((1,), False, False), ((), False, False), ((0, 1, 2), True, True)],
)
def test_two_of_three_go_on_and_one_waits(
    ranks: tuple[int, ...], needs_coordinator: bool, needs_election: bool
) -> None:
    quorum = Quorum()
    quorum.begin(range(3))
    assert quorum.may_form([voter(rank) for rank in ranks]) is needs_coordinator
    assert may_elect([voter(rank) for rank in ranks]) is needs_election


def test_of_two_the_one_with_the_coordinator_goes_on() -> None:
    quorum, pair = Quorum(), Configuration(epoch=1, members=(0, 1))
    quorum.begin((0, 1))
    assert quorum.may_form([voter(0, members=(0, 1))]) and has_votes(pair, [0], breaks_tie=True)
    assert not may_elect([voter(1, members=(0, 1))])


def test_a_process_that_was_started_again_has_no_vote() -> None:
    quorum = Quorum()
    quorum.begin(range(3))
    assert not quorum.may_form([voter(0), Neighbour(2, Standing())])  # the one before may have voted elsewhere
    quorum.ended |= {2}
    quorum.note_return(Neighbour(2, Standing()))
    assert quorum.may_form([voter(0), Neighbour(2, Standing())])


def test_asking_changes_nothing() -> None:
    quorum = Quorum()
    quorum.begin(range(3))
    later = voter(2, mesh=next_term(0, 2) << 16 | 1, members=(1, 2))
    assert not quorum.may_form([voter(0), later]) and quorum.may_form([voter(0), voter(1)])


def test_a_coordinator_whose_disk_is_full_does_not_remember_an_earlier_vote(tmp_path: Path) -> None:
    path = tmp_path / "state" / "committed.json"
    path.parent.mkdir()
    config = CoordinatorConfig(run_id=RUN, names=("a", "b"), elects=True, state=path)
    quorum = quorum_of(config)
    quorum.begin((0, 1))
    quorum.form(Configuration(epoch=2, members=(0,)), [voter(0, members=(0, 1))])
    assert quorum_of(config).record == quorum.record
    assert not quorum_of(config).may_form([voter(1, members=(0, 1))])
    path.unlink()
    path.mkdir()  # nothing can be written there
    quorum.form(Configuration(epoch=3, members=(0,)), [voter(0, members=(0, 1))])
    assert quorum_of(config).committed is None


def test_a_process_that_is_known_to_have_ended_votes_for_nobody_else() -> None:
    quorum = Quorum()
    quorum.begin(range(3))
    quorum.ended |= {1}
    assert quorum.may_form([voter(2)])


def test_a_group_that_was_not_committed_needs_the_votes_of_the_one_before_too() -> None:
    proposed = {"mesh": 2, "members": (0, 1)}
    assert not may_elect([voter(1, **proposed), voter(2)])  # 0 may have gone on with the coordinator
    assert may_elect([voter(0, **proposed), voter(1, **proposed)])
    assert not may_elect([voter(0, 2, (0,)), voter(1)][1:])


def test_the_lowest_rank_starts_a_coordinator_and_the_others_go_there() -> None:
    able = [Neighbour(n.rank, n.standing.model_copy(update={"able": True})) for n in (voter(1), voter(2))]
    assert choose(able[1], able[:1]) is None
    chosen = choose(able[0], able[1:])
    assert chosen == Successor(next_term(0, 1), 1) and term_of(chosen.term << 16) == chosen.term
    carrier = able[0].standing.model_copy(update={"term": chosen.term, "carrier": 1, "port": 7})
    assert choose(able[1], [Neighbour(1, carrier)]) == Successor(chosen.term, 1, 7)
    assert choose(Neighbour(1, carrier), able[1:]) is None  # it waits for them
