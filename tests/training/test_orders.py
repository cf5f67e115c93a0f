"""Members and the run agree on a step, whatever is on its way when: random orders, random delays."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.records.events import AnswerEvent
from training.run.group_orders import GroupOrders
from training.run.orders import Command, MemberOrders


class Trainer:
    """A member that takes steps, and notes after which one it did what."""

    def __init__(self) -> None:
        self.orders = MemberOrders()
        self.inbox: deque[Command] = deque()
        self.step, self.trains, self.gone = 0, False, False
        self.acted: dict[int, int] = {}
        self.orders.arrive(0)

    def hear(self) -> AnswerEvent | None:
        return self.orders.receive(self.inbox.popleft())

    def go_on(self) -> AnswerEvent | None:
        """End the step under way, and do what is due before the next."""
        self.step, self.trains = self.step + self.trains, False
        self.orders.arrive(self.step)
        command = self.orders.take_due(self.step, at_sync=True)
        if command is None:
            self.trains = not self.orders.is_held
            return None
        self.acted[command.order] = self.step
        self.gone = command.command == "stop"
        return AnswerEvent(order=command.order, step=self.step, done=True)


class World:
    """A run of several members whose messages take their time."""

    def __init__(self, members: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.members = {rank: Trainer() for rank in range(members)}
        self.answers: deque[tuple[int, AnswerEvent]] = deque()
        self.earliest: dict[int, list[int]] = {}
        self.ended: list[int] = []
        self.orders = GroupOrders(self.present, self.send, lambda number, *_: self.ended.append(number))

    def present(self) -> list[int]:
        return [rank for rank, member in self.members.items() if not member.gone]

    def send(self, message: dict[str, Any]) -> None:
        for member in self.members.values():
            member.inbox.append(Command.model_validate(message))

    def move(self) -> None:
        """Let one thing happen."""
        ways = [(self.hear, rank) for rank in self.present() if self.members[rank].inbox]
        ways += [(self.act, rank) for rank in self.present()]
        ways += [(self.take, 0)] if self.answers else []
        if ways:
            way, rank = self.random.choice(ways)
            way(rank)

    def hear(self, rank: int) -> None:
        member = self.members[rank]
        answer = member.hear()
        if answer is not None:
            self.answers.append((rank, answer))
            self.earliest.setdefault(answer.order, []).append(member.step + member.trains)

    def act(self, rank: int) -> None:
        answer = self.members[rank].go_on()
        if answer is not None:
            self.answers.append((rank, answer))
        if self.members[rank].gone:
            self.orders.look()

    def take(self, rank: int) -> None:
        rank, answer = self.answers.popleft()
        self.orders.receive_answer(rank, answer)

    def settle(self) -> None:
        for _ in range(120 * len(self.members)):
            self.move()


ACTIONS = st.lists(st.tuples(st.sampled_from(["pause", "resume", "snapshot"]), st.integers(0, 40)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), ACTIONS, st.booleans())
def test_all_act_after_the_same_step_and_only_a_pause_holds(
    members: int, seed: int, actions: list[tuple[Any, int]], stop: bool
) -> None:
    world = World(members, seed)
    given_, paused = [], False
    for action, moves in actions:
        if action != "snapshot" and (action == "resume") != paused:
            continue  # the desk refuses it
        paused = {"pause": True, "resume": False}.get(action, paused)
        given_.append(world.orders.give(action))
        for _ in range(moves):
            world.move()
    world.settle()
    for number in given_:
        assert len({member.acted[number] for member in world.members.values()}) == 1
    assert world.ended == given_
    before = [member.step for member in world.members.values()]
    world.settle()
    assert [m.step > b for m, b in zip(world.members.values(), before, strict=True)] == [not paused] * members
    if stop:
        number = world.orders.give("stop")
        world.settle()
        assert not world.present()
        assert len({member.acted[number] for member in world.members.values()}) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), ACTIONS)
def test_a_stop_overtakes_everything_and_comes_after_the_first_step_that_all_can_reach(
    members: int, seed: int, actions: list[tuple[Any, int]]
) -> None:
    world = World(members, seed)
    for action, some in actions:
        world.orders.give(action)
        for _ in range(some):
            world.move()
    number = world.orders.give("stop")
    world.settle()
    assert not world.present()
    assert {member.acted[number] for member in world.members.values()} == {max(world.earliest[number])}


def test_one_member_stops_after_the_step_under_way() -> None:
    member, sent = MemberOrders(), []
    assert member.take_due(7, True) is None  # the eighth step begins
    orders = GroupOrders(lambda: [0], sent.append, lambda *end: None)
    orders.give("stop")
    answer = member.receive(Command.model_validate(sent[0]))
    assert answer is not None and answer.step == 8
    orders.receive_answer(0, answer)
    assert sent[1]["at_step"] == 8


def test_one_that_does_not_know_yet_where_it_starts_answers_when_it_does() -> None:
    member = MemberOrders()
    assert member.receive(Command(command="meet", order=3)) is None and not member.stop_is_near
    answer = member.arrive(5000)
    assert answer is not None and (answer.order, answer.step) == (3, 5000)
    assert member.arrive(5000) is None and member.take_due(5000, True) is None and member.is_held


def test_one_that_is_silent_is_waited_for_no_longer_than_the_deadline() -> None:
    sent: list[dict[str, Any]] = []
    orders = GroupOrders(lambda: [0, 1], sent.append, lambda *end: None)
    number = orders.give("stop")
    orders.receive_answer(0, AnswerEvent(order=number, step=5))
    assert [message["command"] for message in sent] == ["meet"]
    orders.stop_waiting(number)
    assert (sent[1]["command"], sent[1]["at_step"]) == ("stop", 6)


@pytest.mark.parametrize(
    ("answers", "step"), [((50, 52, 51), 52), ((50, 10**6, 51), 51), ((50, 10**6), 50), ((50, 0), 50)]
)
def test_one_that_claims_to_be_far_ahead_does_not_put_a_stop_off(answers: tuple[int, ...], step: int) -> None:
    sent: list[dict[str, Any]] = []
    orders = GroupOrders(lambda: range(len(answers)), sent.append, lambda *end: None, spread=100)
    number = orders.give("stop")
    for rank, answer in enumerate(answers):
        orders.receive_answer(rank, AnswerEvent(order=number, step=answer))
    assert sent[-1] == {"command": "stop", "order": number, "at_step": step}


def test_one_that_is_gone_is_not_waited_for() -> None:
    sent: list[dict[str, Any]] = []
    present, ended = [0, 1], []
    orders = GroupOrders(lambda: present, sent.append, lambda *end: ended.append(end))
    number = orders.give("snapshot")
    orders.receive_answer(0, AnswerEvent(order=number, step=5))
    present.remove(1)
    orders.look()
    orders.receive_answer(0, AnswerEvent(order=number, step=5, done=True, failure="the disk is full"))
    assert ended == [(number, 5, "the disk is full")]


@pytest.mark.parametrize("held", [True, False])
def test_a_stop_of_no_order_is_obeyed_at_once(held: bool) -> None:
    member = MemberOrders()
    if held:
        member.receive(Command(command="meet", order=1))
    member.receive(Command(command="stop", reason="terminated"))
    taken = member.take_due(3, False)
    assert taken is not None and taken.reason == "terminated"
