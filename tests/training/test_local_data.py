"""Members that train on data of their own, which stay where they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_exchange import RoomExchange, together
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.schema import DataSettings
from training.data.sample_order import Cursor, SampleSchedule
from training.exchange.base import SoloExchange
from training.local_trainer import LocalTrainer
from training.loop.local_data import LocalSchedule, schedule_for
from training.loop.train_member import prepare_data
from training.loop.trainer import Trainer
from training.records.events import EvaluationEvent, Event, RunEvent, StepEvent, WarningEvent
from training.records.plan import MemberPlan, RunPlan
from training.run.local_plan import plan_local_run
from training.run.orders import Command, Control
from training.tasks.base import Answer, GroupPosition
from training.tasks.custom import CustomTask
from training.tasks.outputs.predictions import Prediction


class Own(ToyTask):
    """So many samples of one member, of which the first are evaluated on."""

    def __init__(self, samples: int, held: int = 4) -> None:
        super().__init__(samples)
        self.held = held
        self.prepare(lambda *_: None)
        self.evaluation = {"validation": self.train[:held]} if held else {}


def local_plan(sizes: Sequence[int], batch: int = 4, newcomers: int = 0, **training: Any) -> RunPlan:
    """The plan of members of one machine each."""
    plan = toy_plan(len(sizes), {"batch_size": batch, "max_steps": 0, **training}, {"eval_before": True})
    profile = plan.profile.model_copy(update={"data": DataSettings(local_data=True)})
    all_members = [
        MemberPlan(rank=rank, name=f"machine-{rank}", data="/data", batch_size=batch).on_device(
            machine=f"machine-{rank}"
        )
        for rank in range(len(sizes) + newcomers)
    ]
    members, added = tuple(all_members[: len(sizes)]), tuple(all_members[len(sizes) :])
    return plan.model_copy(update={"profile": profile, "members": members, "added": added})


def schedules(plan: RunPlan, sizes: Sequence[int]) -> dict[int, LocalSchedule]:
    found, _ = together(len(sizes), lambda end: schedule_for(plan, Own(sizes[end.rank]), end.rank, end))
    assert all(isinstance(one, LocalSchedule) for one in found.values()), found
    return found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=3), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_an_epoch_takes_as_many_samples_as_all_have(sizes: list[int], batch: int, epochs: int, again: bool) -> None:
    plans = schedules(local_plan(sizes, batch), sizes)
    members, cursor, seen = dict.fromkeys(plans, batch), Cursor(), [Counter[int]() for _ in sizes]
    steps = plans[0].total_steps(members, epochs)
    for step in range(steps):
        assert plans[0].epoch_fraction(cursor, members) < epochs, step
        taken = {rank: plans[rank].step(cursor, members, rank) for rank in members}
        for rank, (batches, _) in taken.items():
            seen[rank].update(index for batch in batches for index in batch)
        (cursor,) = {after for _, after in taken.values()}
        if again:
            cursor = Cursor(**json.loads(json.dumps(asdict(cursor))))
    assert plans[0].epoch_fraction(cursor, members) >= epochs
    assert sum(map(Counter.total, seen)) >= epochs * sum(sizes) > sum(map(Counter.total, seen)) - batch * len(sizes)
    for size, found in zip(sizes, seen, strict=True):
        assert max(found.values()) - min(found[index] for index in range(size)) <= 1


def test_members_of_one_machine_share_its_data() -> None:
    plan = local_plan([12, 12, 6])
    beside = plan.members[1].on_device(machine="machine-0")
    plans = schedules(plan.model_copy(update={"members": (plan.members[0], beside, plan.members[2])}), [12, 12, 6])
    members, cursor, seen = dict.fromkeys(plans, 2), Cursor(), Counter[int]()
    for _ in range(3):
        for rank in (0, 1):
            seen.update(index for batch in plans[rank].step(cursor, members, rank)[0] for index in batch)
        cursor = plans[2].step(cursor, members, 2)[1]
    assert seen == Counter(range(12)) and cursor.parts == (Cursor(1, 0), Cursor(1, 0))
    assert plans[0].shares("validation", {0: 1, 1: 3, 2: 1}) == {0: range(1), 1: range(1, 4), 2: range(4)}


def test_one_member_trains_as_without_the_option() -> None:
    assert isinstance(schedule_for(local_plan([9]), Own(9), 0, SoloExchange()), SampleSchedule)


def test_one_data_set_cannot_be_split_that_is_on_several_machines() -> None:
    with pytest.raises(BadInput, match="each has its own"):
        profile_from_options("x", {"local_data": "true", "split": "label"})


def test_a_path_is_that_of_each_machine_and_may_hold_the_rank() -> None:
    options = {"task": "custom", "model_path": "m:f", "local_data": "true", "dataset_path": "~/voices/{rank}"}
    plan = plan_local_run(profile_from_options("x", options), 2)
    assert [member.data for member in plan.members] == ["~/voices/0", "~/voices/1"]
    assert plan.profile_of(1).data.dataset_path == str(Path.home() / "voices" / "1")
    usual = plan_local_run(profile_from_options("x", {**options, "local_data": "false"}), 2)
    assert usual.profile_of(1).data.dataset_path == str(Path.home() / "voices" / "{rank}")


@pytest.mark.parametrize(
    "said",
    [None, b"[]", json.dumps(dict.fromkeys("abcdefghi", 8)).encode(), b'{"train": -1}', b'{"train": 0}', b"\xff"],
)
def test_who_is_lost_at_the_start_or_says_nonsense_holds_nobody_up(said: bytes | None) -> None:
    def body(end: RoomExchange) -> Any:
        if end.rank == 1:
            if said is not None:
                end.gather("start/sizes", said)
            return end.room.leave(1)
        plan = schedule_for(local_plan([8, 8, 8]), Own(8), end.rank, end)
        taken, after = plan.step(Cursor(), {0: 4, 1: 4, 2: 4}, end.rank)
        return plan.total_steps({0: 4, 1: 4, 2: 4}, 1), sum(map(len, taken)), after.parts

    found, _ = together(3, body)
    assert found[0] == found[2] == (2, 4, (Cursor(0, 4), Cursor(0, 0), Cursor(0, 4)))


# ------------------------------------------------------------------------------------------------------ whole trainings


class Talking(Own):
    """Writes texts, which say something of its data."""

    generates_text = True

    def table(self, split: str) -> str:
        return "hash of the table"

    def answer(self, model: nn.Module, batch: Any, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        return self.evaluate(model, batch, generate), [Answer(0, "what was said", False)]

    def predictions(self, split: str, answers: Sequence[Answer]) -> list[Prediction]:
        raise AssertionError("they stay with the member")


class Overheard(RoomExchange):
    """Keeps what this member says to the others."""

    def __init__(self, end: RoomExchange) -> None:
        super().__init__(end.room, end.rank)
        self.said: dict[str, bytes] = {}

    def _start_gather(self, name: str, payload: bytes, *given: Any, **named: Any) -> Any:
        self.said[name.rpartition(":")[0]] = payload
        return super()._start_gather(name, payload, *given, **named)


def train(
    plan: RunPlan, tasks: Sequence[Own], folder: Path, controls: dict[int, Control] | None = None, newcomers: int = 0
) -> dict[int, tuple[Trainer, list[Event], Overheard]]:
    """Let all members train to the end."""

    def body(end: RoomExchange) -> Any:
        heard, events = Overheard(end), list[Event]()
        control = (controls or {}).get(end.rank, Control())
        trainer = Trainer(plan, end.rank, tasks[end.rank], heard, events.append, control, folder / str(end.rank))
        trainer.run()
        if end.rank in (controls or {}):
            end.room.leave(end.rank)
        return trainer, events, heard

    found, _ = together(len(tasks), body, newcomers=newcomers)
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
    return found


def told(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, WarningEvent) and "sample" in event.message]


def test_evaluations_add_up_what_each_has_and_nothing_of_the_data_leaves(tmp_path: Path) -> None:
    tasks = [Talking(20, 3), Talking(8, 0), Talking(9, 7)]
    found = train(local_plan([20, 8, 9], epochs=2), tasks, tmp_path)
    trainer, events, heard = found[0]
    before, after = (event for event in events if isinstance(event, EvaluationEvent))
    assert (before.samples, after.samples, after.split) == (10, 10, "validation")
    held = [(task, task.collate(task.train[: task.held], None)) for task in (tasks[0], tasks[2])]
    with torch.no_grad():
        loss = sum(float(task.loss(trainer.model.cpu(), batch)) * task.held for task, batch in held) / 10
    assert after.loss == pytest.approx(loss)
    assert {event.samples for event in events if isinstance(event, StepEvent)} <= {1, 2, 3, 4}
    assert json.loads(heard.said["start/sizes"]) == {"train": 20, "validation": 3}
    assert json.loads(heard.said["start/data"])["splits"] == {}
    assert not any(b"what was said" in said or b"hash of the table" in said for said in heard.said.values())
    running = next(event for event in events if isinstance(event, RunEvent))
    assert running.details["tables"] == {} and running.total_steps == found[2][0].total_steps


def test_data_of_a_member_that_left_are_gone_and_it_is_said(tmp_path: Path) -> None:
    leaving = Control()
    leaving.post(Command(command="stop", at_step=3))
    found = train(local_plan([24, 5], max_steps=8), [Own(24), Own(5)], tmp_path, {1: leaving})
    trainer, events, _ = found[0]
    assert trainer.position.step == 8 and set(trainer.position.batch_sizes) == {0}
    assert told(events) == ["the 5 training samples of machine-1 stay on it: they are not trained on until it is back"]


@pytest.mark.slow
def test_a_newcomer_brings_its_own_data(tmp_path: Path) -> None:
    plan = local_plan([24, 5], newcomers=1, epochs=4)
    tasks = [Own(24), Own(5), Own(11, held=6)]
    found = train(plan, tasks, tmp_path, newcomers=1)
    steps = {trainer.total_steps for trainer, _, _ in found.values()}
    assert steps == {found[0][0].position.step} and len(steps) == 1
    assert "the 11 training samples of machine-2 are trained on from here on" in told(found[0][1])
    assert told(found[2][1]) == []
    assert set(tasks[2].seen) == set(range(11))
    assert len({trainer.position.cursor for trainer, _, _ in found.values()}) == 1
    after = [event for event in found[0][1] if isinstance(event, EvaluationEvent)][-1]
    assert after.samples == 4 + 4 + 6


def test_who_comes_back_with_other_data_is_refused() -> None:
    def body(end: RoomExchange) -> Any:
        return LocalSchedule(local_plan([7, 7]), Own(7 - end.rank), end.rank, end)

    plan = local_plan([7, 7])
    same = plan.members[1].on_device(machine="machine-0")
    both = plan.model_copy(update={"members": (plan.members[0], same)})
    found, _ = together(2, lambda end: LocalSchedule(both, Own(7 - end.rank), end.rank, end))
    assert isinstance(found[1], BadInput) and "other data" in str(found[1])
    assert all(isinstance(one, LocalSchedule) for one in together(2, body)[0].values())


def test_who_has_nothing_to_train_on_is_named() -> None:
    plan = local_plan([8, 0])
    task = CustomTask(plan.profile, lambda: (Net(), []))
    with pytest.raises(BadInput, match="machine-1: the training data set is empty"):
        prepare_data(plan, 1, task, lambda event: None)


# ----------------------------------------------------------------------------------------------- of one's own making


class Net(nn.Linear):
    """A line."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(3, 1)


def numbers(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(12 * world_size + 5 * rank, 3, generator=torch.Generator().manual_seed(rank))
    return [(row, row.sum()[None] * (rank + 1)) for row in inputs]


@pytest.mark.slow
def test_simulated_members_make_their_own_data_and_go_on_with_the_same_losses(tmp_path: Path) -> None:
    """The bits of real processes, before and after a break."""

    def losses(events: list[Event]) -> dict[Any, float]:
        return {(event.member, event.step): event.loss for event in events if isinstance(event, StepEvent)}

    def break_off(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 9:
            raise KeyError("a fault of the script")

    def trainer(**how: Any) -> LocalTrainer:
        return LocalTrainer(Net(), numbers, numbers, loss=nn.functional.mse_loss, output_dir=tmp_path, **how)

    options: dict[str, Any] = {"local_data": True, "strategy": "fedavg", "fedavg.sync_interval": 3, "threads": 1}
    options |= {"batch_size": 4, "epochs": 2, "snapshot_interval": 4}
    real, again = list[Event](), list[Event]()
    trainer(workers=2, on_event=real.append).fit(**options)
    with pytest.raises(KeyError):
        trainer(simulate=2, on_event=break_off).fit(**options)
    trainer(simulate=2, on_event=again.append).fit(
        resume=max(tmp_path.iterdir(), key=lambda run: run.stat().st_ctime_ns)
    )
    assert losses(again) and losses(again).items() <= losses(real).items()
    assert sum(event.samples for event in real if isinstance(event, StepEvent)) >= 2 * (24 + 29)


def test_a_factory_is_told_what_it_asks_for() -> None:
    profile = profile_from_options("own", {"task": "custom", "local_data": "true"})

    def made(factory: Any, data: bool = True) -> Any:
        chosen = profile if data else profile_from_options("own", {"task": "custom"})
        task = CustomTask(chosen, factory)
        task.group_position = GroupPosition(2, 5)
        task.prepare(lambda *_: None)
        return task

    assert made(lambda rank, world_size: (Net(), [rank] * world_size)).train == [2] * 5
    assert made(lambda profile, rank: (Net(), [rank, profile.name])).train == [2, "own"]
    asked, plain = made(lambda world_size=1: (Net(), [world_size])), made(lambda: (Net(), [0]))
    assert (asked.train, asked.depends_on_rank, plain.depends_on_rank) == ([5], True, False)
    with pytest.raises(BadInput, match="set local_data = true"):
        made(lambda rank: (Net(), [rank]), data=False)
