from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_task import toy_plan

from profiles.errors import BadInput, ExitCode
from training.records.events import ElectionEvent, Event, MemberEvent
from training.records.plan import MemberPlan
from training.records.run_folder import RunFolder
from training.run.members.member_history import MemberHistory
from training.run.members.membership import Membership, WorkerHandle
from training.run.orders import Command, Control
from training.run.run_controller import RunController


class Silent:
    """A worker's process that does nothing."""

    pid = 0
    end_reason = ""

    def send(self, message: dict[str, Any]) -> None: ...

    def signal(self, number: int) -> None: ...

    def note_event(self, event: Event) -> Event:
        return event

    def exit_code(self) -> int:
        return 0

    def lines(self) -> Iterator[bytes]:
        return iter(())


def of(members: int, **strategy: Any) -> Membership:
    membership = Membership(toy_plan(members, strategy=strategy or None))
    membership.workers = {rank: WorkerHandle(Silent()) for rank in range(members)}
    return membership


def fourth(membership: Membership) -> MemberPlan:
    return membership.plan.members[0].model_copy(update={"rank": len(membership.plan.all_members), "name": "new"})


def test_the_last_one_cannot_leave() -> None:
    membership = of(2)
    membership.mark_leaving([0])
    with pytest.raises(BadInput, match="no machine would be left"):
        membership.mark_leaving([1])


def test_a_run_that_began_alone_keeps_its_members() -> None:
    membership = of(1)
    for change in (lambda: membership.mark_leaving([0]), lambda: membership.announce(fourth(membership))):
        with pytest.raises(BadInput, match="takes no others"):
            change()


def news(membership: Membership, source: int, rank: int, status: str) -> bool:
    return membership.note(source, MemberEvent.model_validate({"member": rank, "status": status}))


def test_one_that_left_is_not_called_lost() -> None:
    membership = of(2)
    assert news(membership, 1, 1, "left") and not news(membership, -1, 1, "left")
    assert news(membership, -1, 0, "left") and news(membership, 0, 0, "left")
    assert not news(membership, -1, 1, "lost") and 1 in membership.active_ranks
    assert not membership.note_gone(1)


def test_a_loss_is_told_once_until_the_member_is_back() -> None:
    membership = of(3)
    assert news(membership, -1, 1, "lost")
    assert not membership.note_gone(1)
    assert membership.note_gone(2) and not news(membership, -1, 2, "lost")
    membership.workers[1].exit_code = ExitCode.RUN_FAILED
    membership.add_workers(1, {1: Silent()})
    assert news(membership, -1, 1, "lost")  # of its old connection
    assert membership.note_gone(1)  # a guest's own end
    assert news(membership, 1, 1, "joined") and news(membership, -1, 1, "lost")


def test_a_joining_is_told_once_until_the_member_is_gone() -> None:
    membership = of(3)
    membership.workers[1].exit_code = ExitCode.RUN_FAILED
    membership.add_workers(1, {1: Silent()})
    assert [news(membership, source, 1, "joined") for source in (-1, 1, -1)] == [True, False, False]
    assert 1 in membership.active_ranks
    again = ((-1, "lost"), (-1, "joined"), (1, "joined"), (-1, "lost"))
    assert [news(membership, source, 1, status) for source, status in again] == [True, True, False, True]
    later = of(3)
    later.restore(MemberHistory.of([MemberEvent(member=rank, status="joined") for rank in (0, 1)]))
    assert [news(later, rank, rank, "joined") for rank in range(3)] == [False, False, True]


def test_one_that_the_others_left_behind_tells_of_each_return() -> None:
    """The coordinator calls it late, which is no loss, and only it knows that it is back."""
    membership = of(2)
    assert news(membership, -1, 1, "joined") and news(membership, 1, 1, "ready")
    assert [news(membership, 1, 1, "joined") for _ in range(2)] == [True, True]
    later = of(2)
    later.restore(MemberHistory.of([MemberEvent(member=1, status="ready")]))
    assert news(later, 1, 1, "joined") and not news(later, -1, 1, "joined")


def test_who_trains_must_know_of_one_that_is_to_come() -> None:
    membership = of(3)
    membership.announce(fourth(membership))
    assert (membership.unaware(3), membership.unaware(0)) == ([0, 1, 2], [])
    membership.aware_members["new"] |= {0, 1}
    membership.mark_leaving([2])
    assert membership.unaware(3) == []
    membership.add_workers(3, {3: Silent()})
    assert membership.name(3) == "new" and membership.joining == {3}


def test_nobody_is_let_in_after_the_end() -> None:
    membership = of(2)
    for watched in membership.workers.values():
        watched.exit_code = ExitCode.DONE
    assert not membership.is_running()
    with pytest.raises(BadInput, match="no machine is training"):
        membership.check_can_join(1)


def test_a_member_that_was_announced_is_in_the_plan_and_changes_nothing_else() -> None:
    told: list[MemberPlan] = []
    control, membership = Control(told.append), of(2)
    plan, new = membership.plan, fourth(membership)
    control.post(Command(command="expect", member=new))
    grown = control.with_announced(plan)
    assert told == [new] and grown.all_members == (*plan.members, new) and control.with_announced(grown) == grown
    assert (grown.world_size, grown.global_batch, grown.hash()) == (2, plan.global_batch, plan.hash())


def test_after_an_election_members_can_leave_and_others_are_told_whom_to_follow(tmp_path: Path) -> None:
    plan, orders = toy_plan(3), []
    events = [ElectionEvent(member=rank, term=term, port=7) for rank, term in ((2, 2), (1, 1))]
    run = RunController(plan, RunFolder.create(tmp_path, plan, []), lambda event: None, lambda rank, log: joins)
    run._has_begun, run.meeting_point.elected = True, MemberHistory.of(events).elected
    leaving = Silent()
    leaving.send = orders.append  # type: ignore[method-assign] # what it is asked
    run.members.workers = {rank: WorkerHandle(leaving if rank == 1 else Silent()) for rank in range(3)}
    run.drop([1])
    assert [order["reason"] for order in orders] == ["dropped"] and run.members.active_ranks == [0, 2]
    joins, rendezvous = Silent(), []
    joins.send = rendezvous.append  # type: ignore[method-assign]  # what it is sent is looked at
    run.expect(fourth(run.members))
    run.admit(3)
    assert rendezvous == [{"address": "0.0.0.0:7", "term": 2, "carrier": 2}] and run.meeting_point.elected == (2, 2, 7)
    assert orders[-1] == {"command": "admit", "rank": 3}  # a coordinator elected by members asks them
    run._continue_without(3, "writes nonsense", 0.0)
    assert orders[-1] == {"command": "ban", "rank": 3}
    run.kill()


STEPS = st.lists(
    st.tuples(st.sampled_from(["dismiss", "end", "break", "seat", "joined", "lost", "left"]), st.integers(0, 3)),
    max_size=40,
)


@given(STEPS)
def test_whatever_comes_and_goes_somebody_stays_and_the_sets_agree(steps: list[tuple[str, int]]) -> None:
    membership = of(4)
    for what, rank in steps:
        watched = membership.workers[rank]
        if what == "dismiss":
            before = membership.active_ranks
            try:
                membership.mark_leaving([rank])
            except BadInput:
                assert membership.active_ranks == before
            else:
                assert membership.active_ranks
        elif what in ("end", "break"):
            watched.exit_code = ExitCode.STOPPED if what == "end" else ExitCode.RUN_FAILED
            membership.lost += [rank] if what == "break" and rank not in membership.lost else []
        elif what == "seat" and watched.exit_code is not None and membership.active_ranks:
            membership.add_workers(rank, {rank: Silent()})
            assert rank in membership.joining and rank not in membership.lost
        elif what in ("joined", "lost", "left") and watched.exit_code is None:
            source = rank if what == "joined" else -1
            membership.note(source, MemberEvent.model_validate({"member": rank, "status": what}))
        assert membership.joining <= membership.detached
        assert not set(membership.active_ranks) & membership.detached
        assert membership.can_continue_without(rank) or set(membership.active_ranks) <= {rank}
