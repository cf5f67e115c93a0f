"""The rule by which never two groups go on as one run: who needs whose votes."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.exchange.coordinator_protocol import MAX_UNCOMMITTED, Configuration, MeshStart, Report, Standing
from training.exchange.group.coordinator_state import CoordinatorConfig, quorum_of
from training.exchange.group.election import Neighbour, Successor, choose
from training.exchange.group.quorum import Quorum, has_votes, may_elect, next_term, term_of

RUN = "r"


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


def test_meshes_that_never_count_are_refused_in_plain_words_before_no_message_can_hold_them() -> None:
    warnings: list[str] = []
    quorum = Quorum(warn=warnings.append)
    quorum.begin(range(3))
    group = [voter(rank) for rank in range(3)]
    formed = [quorum.form(Configuration.of(epoch, range(3)), group) for epoch in range(2, 2 + MAX_UNCOMMITTED)]
    MeshStart(peers={}, stand=0, donor=0, earlier=formed[-1])
    assert not warnings and not quorum.may_form(group) and not quorum.may_form(group)
    assert len(warnings) == 1 and f"{MAX_UNCOMMITTED} meshes" in warnings[0]
    elected = Report(epoch=70, mesh=70, members=(0, 1, 2), earlier=formed[-1])
    assert not Quorum().may_form([Neighbour(rank, Standing(report=elected)) for rank in range(3)])


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


def test_a_mesh_that_may_be_committed_is_not_forgotten_for_a_later_one() -> None:
    earlier = Configuration.of(2, range(5))  # of 7; 0, 3 and 4 may go on by it
    first = Configuration.of(1, range(7))
    report = Report(epoch=3, mesh=3, members=(1, 2, 3, 4, 5, 6), committed=first)
    group = [Neighbour(rank, Standing(report=report)) for rank in (1, 2, 5, 6)]
    assert may_elect(group)
    remembers = Neighbour(1, Standing(report=report.model_copy(update={"earlier": (earlier,)})))
    assert not may_elect([remembers, *group[1:]])
    quorum = Quorum()
    quorum.begin(range(4))
    second, third = Configuration.of(2, (0, 1)), Configuration.of(3, (0, 2))
    group = [voter(rank, members=(0, 1, 2, 3)) for rank in range(4)]
    quorum.form(second, group[:2])
    assert [configuration.epoch for configuration in quorum.form(third, [group[0], group[2]])] == [1, 2]
    assert not quorum.may_form(group[2:]) and quorum.may_form(group[1:3])
    quorum.note_full(group[0].report.model_copy(update={"committed": third}))
    assert quorum.committed == third and not quorum.record.formed


def test_the_lowest_rank_starts_a_coordinator_and_the_others_go_there() -> None:
    able = [Neighbour(n.rank, n.standing.model_copy(update={"able": True})) for n in (voter(1), voter(2))]
    assert choose(able[1], able[:1]) is None
    chosen = choose(able[0], able[1:])
    assert chosen == Successor(next_term(0, 1), 1) and term_of(chosen.term << 16) == chosen.term
    carrier = able[0].standing.model_copy(update={"term": chosen.term, "carrier": 1, "port": 7})
    assert choose(able[1], [Neighbour(1, carrier)]) == Successor(chosen.term, 1, 7)
    assert choose(Neighbour(1, carrier), able[1:]) is None  # it waits for them
