"""Decisions about a group: whatever happens in whatever order, its members stay of one mind. No network in here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.exchange.coordinator_protocol import (
    BEAT,
    LEASE,
    PROTOCOL_VERSION,
    GroupStatus,
    Hello,
    ProtocolError,
    Report,
)
from training.exchange.group.coordinator_state import CoordinatorConfig, Member, StateOrders
from training.exchange.group.group_membership import GroupMembership
from training.exchange.links.dialling import Route
from training.records.events import MemberEvent, PeerPath, WarningEvent, WaysEvent

RUN = "r"


@dataclass(eq=False)
class Fake:
    """A process that does what a member does, message by message; results are named by the mesh that made them."""

    rank: int
    incarnation: int
    report: Report = Report(elements=1)
    results: dict[int, int] = field(default_factory=dict)
    inbox: list[GroupStatus] = field(default_factory=list)
    member: Member | None = None
    status: GroupStatus | None = None
    published: int = 0
    holds: int | None = None
    ended: str = ""
    may_return: bool = False
    address: str = "127.0.0.1"
    dead: bool = False

    def note(self, **news: object) -> None:
        self.report = self.report.model_copy(update=news)


class World:
    """A coordination and processes that talk with it."""

    def __init__(self, size: int, started: bool = True, **config: object) -> None:
        self.size = size
        self.config = CoordinatorConfig.model_validate(
            {"run_id": RUN, "names": [f"m{rank}" for rank in range(size)], "spare": 2, **config}
        )
        self.events: list[MemberEvent | WarningEvent | WaysEvent] = []
        self.incarnations = 0
        self.fakes: dict[int, Fake] = {}
        self.restart()
        for rank in range(size if started else 0):
            self.come(rank)
        self.hear_all()

    def restart(self) -> None:
        """The coordinator is another process: it knows nothing."""
        self.group = GroupMembership(self.config, self.events.append)
        self.epoch = 0
        for fake in self.fakes.values():
            fake.member = None
            fake.inbox.clear()

    def come(self, rank: int) -> Fake:
        """A new process of a rank dials; one that was there is gone."""
        if rank in self.fakes:
            self.kill(rank)
        self.incarnations += 1
        self.fakes[rank] = Fake(rank, self.incarnations)
        self.dial(rank)
        return self.fakes[rank]

    def dial(self, rank: int) -> None:
        fake = self.fakes[rank]
        if fake.dead or fake.ended:
            return
        hello = Hello(
            version=PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=self.size, name=f"m{rank}",
            incarnation=str(fake.incarnation), port=1,
        )  # fmt: skip
        fake.inbox.clear()
        fake.note(heard=0)
        came = Member(hello, fake.inbox.append, lambda: None, fake.address, report=fake.report)
        try:
            self.group.register(came)
        except ProtocolError as error:
            fake.ended = str(error)
        else:
            fake.member = came

    def kill(self, rank: int) -> None:
        self.fakes[rank].dead = True
        self.hang_up(rank)

    def hang_up(self, rank: int) -> None:
        """The connection with the coordinator breaks."""
        fake, member = self.fakes[rank], self.fakes[rank].member
        fake.member = None
        fake.inbox.clear()
        if member is not None:
            self.group.lose(member, "its connection broke", hung_up=True)

    def say(self, rank: int) -> None:
        fake = self.fakes[rank]
        if fake.member is not None and not fake.ended:
            try:
                self.group.on_report(fake.member, fake.report)
            except ProtocolError as error:
                self.group.lose(fake.member, str(error))

    def hear(self, rank: int) -> None:
        """A process reads what was sent to it, and does it."""
        fake = self.fakes[rank]
        while fake.inbox and not fake.dead and not fake.ended:
            self.obey(fake, fake.inbox.pop(0))

    def hear_all(self) -> None:
        while any(fake.inbox for fake in self.fakes.values() if not fake.dead and not fake.ended):
            for rank in list(self.fakes):
                self.hear(rank)

    def obey(self, fake: Fake, status: GroupStatus) -> None:
        fake.note(heard=status.sent)
        fake.status, form, report = status, status.form, fake.report
        if status.failed:
            fake.ended, fake.may_return = status.failed, status.may_return
            return
        if fake.holds is not None and (status.joining is None or status.joining.number != fake.published):
            fake.holds = None
        if status.newcomer:
            self.fetch(fake, status)
        elif status.epoch < report.epoch:
            return
        elif form is None:
            if status.epoch and (report.up or report.epoch < status.epoch):
                fake.note(up=False, epoch=status.epoch)
                self.say(fake.rank)
        elif status.epoch > report.epoch:
            assert report.elements >= 0
            mine = {"epoch": status.epoch, "mesh": status.epoch, "members": tuple(form.peers)}
            fake.note(**mine, lost=None, up=True, ready=False, taken=0)
            donor = self.fakes[form.donor]
            if fake.rank in form.behind:
                assert form.behind[fake.rank] == report.full
                missing = range(report.full + 1, form.stand + 1)
                if donor.dead or not all(number in donor.results for number in missing):
                    fake.note(up=False, lost=form.donor)
                else:
                    fake.results |= {number: donor.results[number] for number in missing}
                    fake.note(full=form.stand)
            self.say(fake.rank)

    def fetch(self, fake: Fake, status: GroupStatus) -> None:
        """A newcomer takes the state, where its donor is between two operations."""
        if not fake.report.ready:
            fake.note(ready=True)
            self.say(fake.rank)
            return
        if status.joining is None or fake.report.taken == status.joining.number:
            return
        donor = self.fakes[status.joining.donor]
        if donor.dead or donor.report.started > donor.report.full or donor.holds is not None:
            return
        seen = donor.status
        if seen is None or seen.joining is None or seen.joining.number != status.joining.number:
            return
        number = donor.report.full
        donor.published, donor.holds = status.joining.number, number
        fake.results = dict(donor.results)
        fake.note(taken=status.joining.number, started=number, full=number, dropped=number)
        self.say(fake.rank)

    def start(self, rank: int) -> None:
        """A process starts its next operation."""
        fake = self.fakes[rank]
        if fake.report.epoch and fake.report.started <= fake.report.full:
            fake.note(started=fake.report.started + 1)
            self.say(rank)

    def finish(self, ranks: list[int]) -> None:
        """The next operation on the mesh of the moment ends; only ``ranks`` have noticed."""
        form = self.group.form
        mesh = [self.fakes[rank] for rank in form.peers] if form is not None else []
        if not mesh or any(f.dead or not f.report.up or f.report.epoch != self.group.epoch for f in mesh):
            return
        number = min(fake.report.full for fake in mesh) + 1
        if all(f.report.started >= number and (f.holds is None or number <= f.holds) for f in mesh):
            for fake in mesh:
                if fake.rank in ranks and fake.report.full == number - 1:
                    made = {f.results[number] for f in mesh if number in f.results}
                    fake.results[number] = next(iter(made), self.group.epoch)
                    fake.note(full=number)
                    self.say(fake.rank)

    def break_link(self, rank: int, other: int) -> None:
        fake = self.fakes[rank]
        if fake.report.up and other in fake.report.members and other != rank:
            fake.note(up=False, lost=other)
            self.say(rank)

    # --------------------------------------------------------------------------------------------------- what must hold

    def check(self) -> None:
        group = self.group
        assert group.epoch >= self.epoch
        form = group.form
        if form is not None and group.epoch > self.epoch:
            mesh = [self.fakes[rank] for rank in form.peers]
            for fake in mesh:
                assert not (fake.report.up and 0 < fake.report.epoch < group.epoch), "it is in the last mesh still"
                assert fake.dead or fake.report.full <= form.stand
            assert form.donor in form.peers and self.fakes[form.donor].report.full == form.stand
        self.epoch = group.epoch
        self.agree()

    def logged(self, rank: int) -> list[str]:
        """What was logged of a member."""
        return [event.status for event in self.events if isinstance(event, MemberEvent) and event.member == rank]

    def agree(self) -> None:
        """Members of one mesh that have come as far have the same results."""
        mesh = [f for f in self.fakes.values() if not f.dead and f.report.up and f.report.epoch == self.group.epoch]
        for number in {n for fake in mesh for n in fake.results}:
            made = {f.results[number] for f in mesh if f.report.full >= number and number in f.results}
            assert len(made) < 2, f"operation {number} has results of the meshes {sorted(made)}"

    def calm_down(self) -> None:
        """All hear everything, nothing breaks any more, everybody wants the next operation."""
        for fake in self.fakes.values():
            if fake.member is None:
                self.dial(fake.rank)
        self.go_on(60)

    def go_on(self, seconds: int) -> None:
        for _ in range(seconds):
            self.hear_all()
            for rank in self.fakes:
                if self.fakes[rank].member is not None and not self.fakes[rank].dead:
                    self.say(rank)
                    self.start(rank)
            self.hear_all()
            self.check()
            self.finish(list(self.fakes))
            self.group.tick(1.0)
            self.check()


RANKS = st.integers(0, 3)
MOVES = st.one_of(
    st.tuples(st.sampled_from(["come", "dial", "kill", "hang_up", "say", "hear", "start"]), RANKS),
    st.tuples(st.just("finish"), st.lists(RANKS, max_size=3)),
    st.tuples(st.just("break_link"), RANKS, RANKS),
    st.tuples(st.just("ban"), RANKS),
    st.tuples(st.just("admit"), RANKS),
    st.tuples(st.just("tick"), st.floats(0, 3)),
    st.tuples(st.sampled_from(["hear_all", "restart", "all_start"])),
)


def move(world: World, what: str, *arguments: object) -> None:
    rank = arguments[0] if arguments and isinstance(arguments[0], int) else None
    if what == "all_start":
        for one in world.fakes:
            world.start(one)
    elif what in ("tick", "ban", "admit"):
        getattr(world.group, what)(*arguments)
    elif what == "come" and world.epoch == 0 and rank == 3:
        return
    elif what in ("come", "finish", "hear_all", "restart") or rank in world.fakes:
        getattr(world, what)(*arguments)


@settings(max_examples=50, deadline=None)
@given(moves=st.lists(MOVES, max_size=50))
def test_whatever_happens_members_of_a_mesh_agree_and_go_on(moves: list[tuple[object, ...]]) -> None:
    world = World(3, quorum=0.5, round_deadline=2.0, give_up=8.0, lease=LEASE)
    world.check()
    for what, *arguments in moves:
        move(world, str(what), *arguments)
        world.check()
    before = {rank: fake.report.full for rank, fake in world.fakes.items()}
    world.calm_down()
    started = world.group.started  # a group without a state waits for all its members, also for one that is banned
    there = [f for f in world.fakes.values() if started and not f.dead and not f.ended]
    for fake in there:
        assert fake.report.up and fake.report.full > before[fake.rank], f"m{fake.rank} hangs"
        assert world.logged(fake.rank)[-1] in ("joined", "ready"), f"m{fake.rank} is back, and nobody says so"
    for rank in world.fakes:
        assert ("lost", "lost") not in itertools.pairwise(world.logged(rank)), "one loss is told twice"
    assert not [fake.ended for fake in world.fakes.values() if "it says that" in fake.ended], "nobody lies here"


def three() -> World:
    """Three members whose first operation is done."""
    world = World(3, round_deadline=2.0, give_up=8.0)
    operation(world, 0, 1, 2)
    return world


def operation(world: World, *ranks: int, noticed: tuple[int, ...] | None = None) -> None:
    """The next operation of some; by whom its end is noticed."""
    for rank in ranks:
        world.start(rank)
    world.hear_all()
    world.finish(list(ranks if noticed is None else noticed))
    world.hear_all()


def silent(world: World, rank: int) -> None:
    """A member says nothing until its lease is over."""
    while not world.group.members[rank].frozen:
        for other in world.fakes.keys() - {rank}:
            world.say(other)
        world.group.tick(0.5)
        for other in world.fakes.keys() - {rank}:
            world.hear(other)


def statuses(world: World, rank: int) -> list[str]:
    """What was logged of a member since it had joined first."""
    return world.logged(rank)[1:]


def cut_off(operations: int) -> World:
    """Member 2 waits for an operation, and is silent for so many; its cable is in again."""
    world = three()
    world.start(2)
    world.fakes[2].dead = True
    silent(world, 2)
    for _ in range(operations):
        world.check()
        operation(world, 0, 1)
    world.fakes[2].dead = False
    world.fakes[2].inbox.clear()
    return world


def test_a_cable_that_is_out_for_an_operation_is_one_loss_and_one_return_with_its_result() -> None:
    """What was on its way when the cable was pulled arrives first; then that connection ends, and it dials again."""
    world = cut_off(operations=1)
    world.say(2)
    world.hang_up(2)
    world.group.tick(2 * BEAT)
    assert statuses(world, 2) == ["lost"]
    world.dial(2)
    world.go_on(2)
    fake = world.fakes[2]
    assert fake.report.up and not fake.ended and fake.results[2] == world.fakes[0].results[2]
    assert statuses(world, 2) == ["lost", "joined"]


def test_who_hears_nothing_is_lost_within_the_lease_although_it_goes_on_reporting() -> None:
    world = three()
    for _ in range(int(LEASE / 0.5) + 1):
        world.say(2)
        for rank in (0, 1):
            world.say(rank)
            world.hear(rank)
        world.group.tick(0.5)
    assert statuses(world, 2) == ["lost"]
    world.say(2)
    assert world.group.members[2].frozen
    operation(world, 0, 1)
    world.go_on(2)
    assert statuses(world, 2) == ["lost", "joined"]


def test_a_short_cut_is_no_loss_although_its_answers_come_late() -> None:
    world = three()
    for tick in range(15):
        for rank in range(3 if tick < 2 or tick > 8 else 2):
            world.say(rank)
        for rank in range(3 if tick < 1 or tick > 10 else 2):
            world.hear(rank)
        world.group.tick(0.5)
    assert not statuses(world, 2)


def test_who_is_silent_before_the_start_is_waited_for() -> None:
    world = World(3, started=False)
    world.come(0)
    world.come(1)
    for _ in range(int(LEASE) + 1):
        world.say(0)
        world.hear(0)
        world.group.tick(BEAT)
    world.come(2)
    assert world.group.missing() == ["rank 1 (m1)"] and not world.group.started
    world.say(1)
    world.hear_all()
    assert world.fakes[1].report.members == (0, 1, 2) and not statuses(world, 1)


def test_a_newcomer_that_is_silent_for_a_while_may_begin_anew() -> None:
    world = three()
    newcomer = world.come(3)
    for _ in range(int(LEASE) + 1):
        for rank in range(3):
            world.say(rank)
            world.hear(rank)
        world.group.tick(BEAT)
    world.hear(3)
    assert newcomer.ended and newcomer.may_return


def test_who_is_always_late_is_not_lost() -> None:
    world = three()
    on_the_way: list[tuple[float, GroupStatus]] = []
    for moment in range(100):
        for rank in (0, 1):
            world.say(rank)
            world.hear(rank)
        inbox = world.fakes[2].inbox
        on_the_way += [(moment + min(0.2 * moment, 4 * LEASE), status) for status in inbox]
        inbox[:] = [status for due, status in on_the_way if due <= moment]
        on_the_way = [(due, status) for due, status in on_the_way if due > moment]
        world.hear(2)
        world.say(2)
        world.group.tick(0.5)
    assert not statuses(world, 2)


def test_who_has_missed_too_much_comes_back_once_as_a_newcomer() -> None:
    world = cut_off(operations=4)
    epoch = world.group.epoch
    world.say(2)
    world.hear_all()
    assert "the others went on without it" in world.fakes[2].ended and world.group.epoch == epoch
    world.come(2)
    world.go_on(2)
    assert statuses(world, 2) == ["lost", "joined", "ready"]


def test_a_silent_one_that_does_not_dial_again_is_forgotten() -> None:
    world = three()
    silent(world, 2)
    world.hang_up(2)
    assert 2 in world.group.members
    for _ in range(70):
        world.go_on(1)
    assert 2 not in world.group.members and statuses(world, 2) == ["lost"]


def test_who_has_a_result_that_was_made_again_without_it_comes_back_as_a_newcomer() -> None:
    world = three()
    operation(world, 0, 1, 2, noticed=(2,))
    world.fakes[2].report = world.fakes[2].report.model_copy(update={"full": 1})
    world.say(2)  # as if it had been cut off before it could say so
    silent(world, 2)
    world.finish([0, 1])
    world.fakes[2].note(full=2)
    world.hear_all()
    world.start(2)
    operation(world, 0, 1, 2)
    assert world.fakes[2].may_return and "result" in world.fakes[2].ended
    assert [world.fakes[rank].report.up for rank in (0, 1)] == [True, True]


def test_a_newcomer_that_redials_a_restarted_coordinator_first_is_let_in() -> None:
    world = three()
    world.kill(2)
    world.hear_all()
    fresh = world.come(2)
    world.restart()
    for rank in (2, 0, 1):
        world.dial(rank)
    world.go_on(9)
    assert fresh.report.up and sorted(fresh.report.members) == [0, 1, 2]


def test_an_anchor_is_ordered_anew_by_a_restarted_coordinator() -> None:
    world = three()
    for _ in range(2):
        world.kill(2)
        world.come(2)
        world.go_on(9)
        assert world.fakes[2].report.up
        world.restart()
        for rank in range(3):
            world.dial(rank)


def test_a_newcomer_alone_with_a_restarted_coordinator_hears_that_nobody_is_left() -> None:
    world = three()
    world.kill(2)
    fresh = world.come(2)
    world.restart()
    world.dial(0)
    world.dial(2)
    world.kill(0)
    for _ in range(100):
        world.group.tick(0.3)
        world.hear_all()
    assert "no machine has the training state" in fresh.ended


@pytest.mark.parametrize(
    "news",
    [{"full": 9, "dropped": 9}, {"full": 2**52}, {"started": 2**52, "full": 2**52}, {"epoch": 2**50}, {"dropped": 5},
     {"lost": 2}, {"elements": 7}],
)  # fmt: skip
def test_a_member_that_lies_loses_its_own_place(news: dict[str, object]) -> None:
    world = three()
    insider = world.fakes[2]
    for _ in range(4):
        insider.note(**{"up": False, **news})
        world.say(2)
        for rank in (0, 1):
            world.hear(rank)
        insider.note(epoch=world.group.epoch)
        world.say(2)
        world.hear_all()
    assert insider.ended
    operation(world, 0, 1)
    assert [world.fakes[rank].report.full for rank in (0, 1)] == [2, 2]
    assert [world.fakes[rank].report.members for rank in (0, 1)] == [(0, 1)] * 2


def test_a_member_that_breaks_every_mesh_without_a_word_loses_its_place() -> None:
    world = three()
    for _ in range(4):
        world.fakes[2].note(up=False)
        world.say(2)
        world.hear_all()
    assert world.fakes[2].ended
    operation(world, 0, 1)
    assert [world.fakes[rank].report.full for rank in (0, 1)] == [2, 2]


@pytest.mark.parametrize("first_only", [False, True])
def test_newcomers_of_a_column_get_the_state_from_its_first_member(first_only: bool) -> None:
    def member(rank: int) -> Member:
        hello = Hello(version=PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=3, name="", incarnation="", port=1)
        return Member(hello, lambda status: None, lambda: None, report=Report(ready=True))

    orders, (first, second, newcomer) = StateOrders(first_only), (member(rank) for rank in range(3))
    assert orders.update([newcomer], [second])  # the first one is late
    assert orders.update([newcomer], [first, second]) is first_only
    assert not orders.update([newcomer], [first, second])
    assert orders.current is not None and orders.current.donor == (0 if first_only else 1)


def test_a_newcomer_that_never_takes_the_anchor_holds_nobody_for_ever() -> None:
    world = three()
    world.kill(2)
    fresh = world.come(2)
    world.hear(2)
    fresh.note(ready=True)
    world.say(2)
    for rank in (0, 1):
        world.hear(rank)
    donor = world.fakes[0]
    assert donor.status is not None and donor.status.joining is not None
    donor.published, donor.holds = donor.status.joining.number, donor.report.full
    for rank in (0, 1):
        world.start(rank)
    for _ in range(50):
        for rank in range(3):
            world.say(rank)
        world.group.tick(1.0)
        world.hear(0)
        world.hear(1)
    world.finish([0, 1])
    assert world.fakes[1].report.full == 2 and fresh.inbox[-1].failed


def test_a_silent_member_that_waited_holds_nobody_up_who_is_done() -> None:
    world = three()
    world.start(2)
    silent(world, 2)
    for rank in (0, 1):
        world.start(rank)
        world.hear(rank)
    world.finish([0, 1])
    world.group.tick(BEAT)
    world.hear(0)
    status = world.fakes[0].status
    assert status is not None and status.closed == world.fakes[0].report.full == 2


@pytest.mark.parametrize("group", [(), (0, 2)])
def test_who_has_a_result_waits_for_who_contributed_to_it_and_has_not_said_so_yet(group: tuple[int, ...]) -> None:
    world = three()
    seen = []
    for rank in (0, *(group[1:] or (1, 2))):
        world.fakes[rank].note(started=2, full=2, begun=((2, group, "this"),))
        world.say(rank)
        world.group.tick(BEAT)
        world.hear(0)
        status = world.fakes[0].status
        seen.append(status.closed if status else None)
    assert seen == ([1, 2] if group else [1, 1, 2])


def test_who_does_not_give_a_mesh_up_is_left_behind_and_taken_back() -> None:
    world = three()
    world.kill(1)
    world.start(0)
    world.hear(0)
    for _ in range(100):
        world.say(0)
        world.say(2)
        world.group.tick(0.3)
        world.hear(0)
    assert world.fakes[0].report.members == (0,)
    world.hear(2)
    operation(world, 0, 2)
    operation(world, 0, 2)
    assert world.fakes[2].report.members == (0, 2) and not world.fakes[2].ended


def test_who_hears_of_no_mesh_is_in_no_further_one_until_it_does() -> None:
    """It has given up an earlier mesh, so what it reported last looks as if it was ready for another one."""
    world = three()
    world.start(0)
    world.start(2)
    world.kill(1)
    for rank in (0, 2):
        world.fakes[rank].note(up=False, lost=1)
        world.say(rank)
    for _ in range(100):
        world.group.members[0].silent = world.group.members[0].unanswered = 0.0
        world.say(2)
        world.hear(2)
        if 0 in world.fakes[2].report.members:
            world.break_link(2, 0)
        world.group.tick(0.3)
    assert world.fakes[2].report.members == (2,) and world.fakes[2].report.up
    world.go_on(9)
    assert {*world.fakes[0].report.members} == {0, 2} and not world.fakes[0].ended


def test_who_went_on_alone_for_two_operations_is_believed_by_who_is_back() -> None:
    world = World(2)
    operation(world, 0, 1)
    silent(world, 1)
    world.hear(0)
    operation(world, 0)
    operation(world, 0)
    world.start(1)
    world.hear_all()
    world.go_on(3)
    assert [world.fakes[rank].ended for rank in (0, 1)] == ["", ""]
    assert world.fakes[1].report.full == world.fakes[0].report.full > 3


def test_a_group_goes_on_with_who_gives_a_mesh_up_and_takes_the_others_back() -> None:
    world = three()
    world.fakes[0].note(up=False, lost=1)
    world.say(0)
    for _ in range(40):
        for rank in range(3):
            world.group.members[rank].silent = world.group.members[rank].unanswered = 0.0
        world.group.tick(0.3)
    assert [world.group.members[rank].role for rank in (1, 2)] == ["late", "late"]
    world.go_on(9)
    assert all(fake.report.up and fake.report.full > 1 for fake in world.fakes.values())


def test_who_tells_other_ways_again_and_again_is_heard_once_a_mesh() -> None:
    world = World(2)

    def told() -> list[str]:
        return [str(way) for event in world.events if isinstance(event, WaysEvent) for way in event.ways]

    for number in range(5):
        world.fakes[0].note(
            routes=(PeerPath(peer=1, how="dialled", address=f"10.0.0.{number}"), PeerPath(peer=9, how="came"))
        )
        world.fakes[0].note(mesh=world.fakes[0].report.epoch)
        member = world.fakes[0].member
        assert member is not None
        world.group.on_report(member, world.fakes[0].report)
    assert told() == ["direct 10.0.0.0"]


@pytest.mark.parametrize(("how", "instead"), [("dialled", "only small ones are sent there"), ("relayed", "relayed")])
def test_a_pair_that_loses_large_packets_is_warned_of_once(how: Route, instead: str) -> None:
    world = World(2)
    for rank in (0, 1):
        fake = world.fakes[rank]
        fake.note(routes=(PeerPath(peer=1 - rank, how=how, loses_large=True),), mesh=fake.report.epoch)
        assert fake.member is not None
        world.group.on_report(fake.member, fake.report)
    (warning,) = [event.message for event in world.events if isinstance(event, WarningEvent)]
    assert warning.startswith("m0 - m1: ") and warning.endswith(instead)


def test_a_member_that_comes_with_a_mesh_far_ahead_is_none_of_this_run() -> None:
    world = World(2)
    hello = Hello(version=PROTOCOL_VERSION, run_id=RUN, rank=0, world_size=2, name="x", incarnation="2", port=1)
    liar = Member(hello, lambda status: None, lambda: None, report=Report(epoch=1 << 40, mesh=1 << 40, members=(0,)))
    with pytest.raises(ProtocolError, match="there has not been"):
        world.group.register(liar)


def test_a_long_reason_reaches_whoever_has_to_go() -> None:
    world = World(3)
    for _ in range(3):
        world.fakes[0].note(up=False, lost=2, why="x" * 300)
        world.say(0)
        world.hear_all()
    assert "xxx" in world.fakes[2].ended and world.fakes[1].ended == ""


def breaks(world: World, *accusations: tuple[int, int, bool]) -> None:
    """A mesh breaks: each of the first blames the second, who has hung up or sent what it must not."""
    for rank, other, hung_up in accusations:
        world.fakes[rank].note(
            up=False, lost=other, hung_up=hung_up, why="it hung up" if hung_up else "it sent rubbish"
        )
    for rank, _, _ in accusations:
        world.say(rank)
    world.hear_all()


def ended(world: World) -> set[int]:
    return {rank for rank, fake in world.fakes.items() if fake.ended}


@pytest.mark.parametrize("odd", range(3))
def test_whom_most_name_with_a_reason_goes_and_nobody_who_hung_up_on_another(odd: int) -> None:
    world = three()
    one, two = (rank for rank in range(3) if rank != odd)
    for turn in range(6):
        first, second = (two, one) if turn == 3 else (one, two)
        breaks(world, (first, odd, False), (second, first, True), (odd, first, False))
    assert ended(world) == {odd} and "rubbish" in world.fakes[odd].ended
    operation(world, one, two)
    assert [world.fakes[rank].report.full for rank in (one, two)] == [2, 2]


def test_connections_that_only_end_cost_nobody_its_place_while_somebody_is_lost() -> None:
    world = three()
    for _ in range(8):
        breaks(world, (0, 2, True), (1, 0, True))
    world.kill(2)
    for _ in range(8):
        breaks(world, (0, 1, True), (1, 0, True))
    assert not ended(world)
    operation(world, 0, 1)
    for _ in range(9):
        breaks(world, (0, 1, True), (1, 0, True))
    assert ended(world) == {1}  # they would go on for ever


def three_at_odds() -> World:
    """Three members; the first and the last of them have begun different operations, and tried them in vain."""
    world = three()
    for rank, what in ((0, "this"), (2, "that")):
        world.fakes[rank].note(started=2, begun=((2, (), what),))
    for _ in range(20):
        breaks(world, (0, 2, False), (2, 0, False))
    assert not ended(world) and world.group.epoch < 5  # it is in vain until somebody tells who is right
    return world


@pytest.mark.parametrize("right", [0, 2])
def test_members_at_odds_wait_for_who_tells_which_of_them_is_right(right: int) -> None:
    world = three_at_odds()
    world.fakes[1].note(started=2, begun=((2, (), "this" if right == 0 else "that"),))
    world.say(1)
    world.hear_all()
    assert ended(world) == {2 - right} and world.fakes[right].report.members == tuple(sorted((1, right)))
    assert "exchange 2 is " in world.fakes[2 - right].ended and "this for m" in world.fakes[2 - right].ended


def test_a_member_whose_connection_ends_before_it_reads_why_it_was_dropped_hears_it_on_the_next() -> None:
    world = three_at_odds()
    world.fakes[1].note(started=2, begun=((2, (), "this"),))
    world.say(1)
    assert 2 not in world.group.members
    world.hang_up(2)
    world.hear_all()
    world.finish([0, 1])
    for _ in range(3):
        for rank in (0, 1):
            world.fakes[rank].note(dropped=world.fakes[rank].report.full, begun=())
        operation(world, 0, 1)
    world.dial(2)
    world.hear_all()
    assert "exchange 2 is this for m" in world.fakes[2].ended and not world.fakes[2].may_return
    assert 2 not in world.group.members and world.fakes[0].report.members == (0, 1)


def test_members_at_odds_do_not_wait_for_ever() -> None:
    world = three_at_odds()
    for _ in range(30):
        for rank in range(3):
            world.say(rank)
        world.group.tick(0.3)
        world.hear_all()
    assert ended(world) == {0, 2} and world.fakes[1].report.members == (1,)


def test_a_mesh_knows_that_others_may_come_back_and_miss_results() -> None:
    world = World(3, quorum=0.5, round_deadline=2.0)
    operation(world, 0, 1, 2)
    form = world.group.form
    assert form is not None and not form.away
    world.start(0)
    world.start(1)
    for _ in range(12):  # the third does not come, and is left behind
        for rank in range(3):
            world.say(rank)
        world.group.tick(0.3)
        world.hear(0)
        world.hear(1)
    form = world.group.form
    assert form is not None and set(form.peers) == {0, 1} and form.away


def test_a_group_begins_without_those_that_are_not_there_and_they_may_come_later() -> None:
    world = World(3, started=False, absent=[2])
    world.come(0)
    assert not world.group.started and world.group.missing() == ["rank 1 (m1)"]
    world.come(1)
    assert world.group.started and world.group.form is not None and set(world.group.form.peers) == {0, 1}
    world.come(2)
    assert world.group.members[2].role == "newcomer"


def test_a_standstill_is_waited_for_longer_each_time_until_an_operation_is_done() -> None:
    world, waits = World(2, standstill=2.0), []
    for done in (False, False, True):
        if done:
            world.finish([0, 1])
        for rank in (0, 1) if done or not waits else ():
            world.start(rank)
        world.hear_all()
        epoch, ticks = world.group.epoch, 0
        while world.group.epoch == epoch:
            world.group.tick(0.1)
            world.hear_all()
            ticks += 1
        waits.append(round(ticks / 10))
    assert waits == [2, 4, 2]


def test_who_is_back_from_another_address_is_met_there_at_once() -> None:
    world = World(3)
    world.dial(1)  # its old connection is not known to be dead yet
    assert world.group.form is not None
    world.fakes[1].address = "10.0.0.7"
    world.dial(1)
    world.hear_all()
    told = world.fakes[0].status
    assert told is not None and told.form is not None and told.epoch == 2
    assert ("10.0.0.7", 1) in told.form.peers[1].addresses
    operation(world, 0, 1, 2)
    assert all(fake.report.full == 1 for fake in world.fakes.values())
