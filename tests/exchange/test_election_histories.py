"""Whatever is cut, killed, restarted or added in whatever order: one group at most goes on, and its bits are equal."""

from __future__ import annotations

import pytest
from election_world import ElectionWorld, Worker
from hypothesis import given, settings
from hypothesis import strategies as st

from training.exchange.group.quorum import next_term

RANKS = st.integers(0, 5)
TERMS = st.sampled_from([0, *(4096 * n + rank for n in (1, 2) for rank in range(5))])
PAIRS = st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True).map(frozenset)
FAULTS = (
    st.tuples(st.sampled_from(["note_end", "lose_machine"]), RANKS),
    st.tuples(st.just("start_again"), RANKS, TERMS),
    st.tuples(st.just("kill"), RANKS, st.booleans()),
    st.tuples(st.just("restart"), st.just(0), st.booleans()),
)
MOVES = st.one_of(
    *FAULTS,
    st.tuples(st.sampled_from(["say", "finish", "connect"]), RANKS),
    st.tuples(st.just("hear"), RANKS, st.sampled_from([1, 100]), st.booleans()),
    st.tuples(st.just("hang_up"), RANKS, st.booleans()),
    st.tuples(st.just("elect"), RANKS, st.frozensets(RANKS, min_size=1)),
    st.tuples(st.just("break_link"), RANKS, RANKS),
    st.tuples(st.just("dial"), RANKS, TERMS),
    st.tuples(st.just("tick"), TERMS, st.sampled_from([1.0, 12.0])),
    st.tuples(st.just("hear_all")),
)
STRETCHES = st.one_of(
    *FAULTS,
    st.tuples(st.just("set_cuts"), st.lists(PAIRS, max_size=6)),
    st.tuples(st.just("go_on"), st.integers(1, 12), st.lists(RANKS, max_size=3)),
)


def cuts(*pairs: tuple[int, int]) -> list[frozenset[int]]:
    return list(map(frozenset, pairs))


def play(size: int, moves: list[tuple[object, ...]]) -> ElectionWorld:
    """Whatever happens, check after each move that one group at most goes on; what ends there has equal bits."""
    world = ElectionWorld(size, spare=1)
    assert world.standing_meshes() == {tuple(range(size))}
    for name, *arguments in moves:
        if name == "set_cuts":
            arguments = [[pair for pair in arguments[0] if max(pair) <= world.machines]]
        elif name == "go_on":
            arguments = [arguments[0], [rank for rank in arguments[1] if rank < world.machines]]
        elif name not in ("tick", "restart", "hear_all"):
            ranks = 2 if name == "break_link" else 1
            arguments = [*(min(rank, size) for rank in arguments[:ranks]), *arguments[ranks:]]
        getattr(world, str(name))(*arguments)
        assert len(world.standing_meshes()) < 2
    return world


def test_of_two_that_are_cut_off_by_turns_one_goes_on() -> None:
    world = ElectionWorld(2)
    world.hang_up(1)
    world.hear(0, 1)
    world.hear(0, answers=False)  # it goes on alone, and nobody hears of that
    assert world.standing_meshes() == {(0,)}
    world.hang_up(0)
    world.set_cuts(cuts((0, 1), (0, 2)))
    world.dial(1, 0)
    world.go_on(3)
    assert world.standing_meshes() == {(0,)}


def test_a_coordinator_that_is_started_again_does_not_vote_twice() -> None:
    world = ElectionWorld(4)
    for rank in (2, 3):
        world.hang_up(rank)
    for rank in (0, 1):
        world.hear(rank, 1)
    for rank in (0, 1):
        world.hear(rank, answers=False)
    assert world.standing_meshes() == {(0, 1)}
    world.restart(0)
    world.set_cuts(cuts(*((one, other) for one in (0, 1) for other in (2, 3, 4))))
    for rank in (2, 3):
        world.dial(rank, 0)
    world.go_on(20)
    assert world.standing_meshes() == {(0, 1)}


def test_a_member_that_comes_back_without_memory_does_not_vote_again() -> None:
    world = ElectionWorld(3)
    world.set_cuts(cuts((0, 1), (0, 2), (1, 3), (2, 3)))
    world.go_on(8)
    assert world.standing_meshes() == {(1, 2)}
    world.lose_machine(2)
    world.set_cuts(cuts((0, 1), (1, 2), (1, 3)))
    world.go_on(10)
    assert world.standing_meshes() == {(1,)}
    world.start_again(2)
    world.go_on(8)
    assert world.standing_meshes() == {(1,)}


def without_the_first(size: int, voters: tuple[int, ...] = (2, 3)) -> ElectionWorld:
    """The first coordinator and member 0 are gone for good, and 1 carries the one that it and ``voters`` elect."""
    world = ElectionWorld(size)
    world.set_cuts(cuts(*((size, rank) for rank in range(size))))
    world.lose_machine(0)
    for rank in range(1, size):
        world.hang_up(rank)
    world.elect(1, range(2, size))
    world.hear(1)
    for rank in voters:
        world.elect(rank, (1,))
        world.hear(rank)
    world.tick(next_term(0, 1), 2.0)
    return world


def test_the_others_go_on_when_the_coordinator_is_gone_and_again_when_the_next_one_is() -> None:
    world = ElectionWorld(5)
    world.set_cuts(cuts(*((5, rank) for rank in range(5))))
    for lost in (0, 1, 2):
        world.lose_machine(lost)
        world.go_on(12)
        assert world.standing_meshes() == {tuple(range(lost + 1, 5))}


@pytest.mark.parametrize("connected", [(), (3,), (2, 3)])
def test_members_elect_another_one_if_it_dies_once_one_of_them_knows_that_all_are_there(
    connected: tuple[int, ...],
) -> None:
    world = without_the_first(4)
    for rank in (1, 2, 3) * 20:
        if 0 in world.workers[rank].report.members:  # it has not adopted the next mesh
            world.hear(rank, 1)
    for rank in connected:
        world.connect(rank)
    assert {world.workers[rank].report.members for rank in (1, 2, 3)} == {(1, 2, 3)}
    world.lose_machine(1)
    world.go_on(12)
    assert world.standing_meshes() == ({(2, 3)} if connected else set())


def test_a_vote_of_one_that_missed_a_mesh_in_which_nothing_was_done_is_not_lost() -> None:
    world = ElectionWorld(4)
    world.hang_up(0)
    for rank in (1, 2, 3):
        while world.workers[rank].report.up:
            world.hear(rank, 1)
    for rank in (1, 2):
        world.hear(rank, answers=False)  # they are in a mesh without 0, which 3 and the coordinator do not live to see
    world.lose_machine(3)
    world.set_cuts(cuts(*((4, rank) for rank in range(4))))
    world.go_on(12)
    assert world.standing_meshes() == {(0, 1, 2)}


@pytest.mark.slow
def test_a_machine_that_joins_after_an_election_has_a_vote() -> None:
    world = ElectionWorld(3, spare=1)
    world.set_cuts(cuts(*((4, rank) for rank in range(4))))
    world.lose_machine(0)
    world.go_on(12)
    world.start_again(3, world.workers[1].followed)
    world.go_on(12)
    assert world.standing_meshes() == {(1, 2, 3)}
    world.lose_machine(1)
    world.go_on(12)
    assert world.standing_meshes() == {(2, 3)}


def test_who_was_dropped_for_good_is_refused_by_elected_coordinators_until_let_in_again() -> None:
    world = ElectionWorld(4)
    world.coordinators[0].ban(3)
    world.go_on(3)
    world.workers[3] = Worker(3, incarnation=1)  # does not obey, and comes as a new process
    world.set_cuts(cuts(*((4, rank) for rank in range(4))))
    for others in ((0, 1, 2), (1, 2)):
        if 0 not in others:
            world.lose_machine(0)
        world.go_on(12)
        world.dial(3, world.workers[2].followed)
        assert world.workers[2].followed and world.standing_meshes() == {others}
        assert world.workers[3].member is None
    group = world.coordinators[world.workers[2].followed]
    world.workers[1].note(barred=())
    world.say(1)
    assert not group._bans.ranks  # half of the two do not report it any longer


def test_a_member_alone_cannot_have_another_one_shut_out() -> None:
    world = ElectionWorld(3)
    world.set_cuts(cuts(*((3, rank) for rank in range(3))))
    world.workers[0].note(barred=(1, 2))
    world.go_on(12)
    assert world.standing_meshes() == {(0, 1, 2)}
    world.workers[0].note(barred=(1, 2))
    world.say(0)
    assert not world.coordinators[world.workers[0].followed]._bans.ranks


def test_members_go_on_though_one_has_heard_of_a_mesh_that_never_was() -> None:
    world = without_the_first(5)
    for rank in (1, 2, 3):
        while world.workers[rank].report.up:
            world.hear(rank, 1)
    world.hear(2)
    assert [world.workers[rank].report.members for rank in (2, 3)] == [(1, 2, 3), (0, 1, 2, 3, 4)]
    world.lose_machine(1)
    world.go_on(12)
    assert world.standing_meshes() == {(2, 3, 4)}


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(size=st.integers(2, 5), moves=st.lists(MOVES, max_size=60))
def test_one_group_at_most_goes_on_message_by_message(size: int, moves: list[tuple[object, ...]]) -> None:
    play(size, moves)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 5), moves=st.lists(STRETCHES, max_size=14))
def test_one_group_at_most_goes_on_whoever_forgets(size: int, moves: list[tuple[object, ...]]) -> None:
    play(size, moves)
