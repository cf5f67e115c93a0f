"""Members that hold other data are told before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_exchange import Room, RoomExchange, together
from test_random_data import RandomTask
from test_trainer import train
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput
from training.data.batches import Samples
from training.hardware import device as precision_module
from training.hardware.device import Precision
from training.loop import data_fingerprint
from training.loop.data_fingerprint import (
    change_warnings,
    check_same,
    check_unchanged,
    describe,
    describe_difference,
)
from training.loop.trainer import Trainer
from training.records.events import WarningEvent
from training.run.orders import Command, Control


def weights_of(task: ToyTask) -> Iterator[tuple[str, torch.Tensor]]:
    return task.build_model().named_parameters()


def described(data: Any, warnings: list[str] | None = None) -> Any:
    task = ToyTask()
    task.prepare(lambda *_: None)
    task.train = data
    return describe(task, weights_of(task), Samples(task, 5), 5, (warnings if warnings is not None else []).append)


def say(tasks: list[ToyTask], folder: Path) -> dict[int, Any]:
    """What comes of members that start with these tasks."""
    plan = toy_plan(len(tasks))

    def start(exchange: Any) -> Any:
        task = tasks[exchange.rank]
        return Trainer(plan, exchange.rank, task, exchange, lambda event: None, Control(), folder).run()

    for task in tasks:
        task.prepare(lambda *_: None)
    return together(len(tasks), start)[0]


def test_another_length_is_named_with_the_machine_on_all_members(tmp_path: Path) -> None:
    found = say([ToyTask(64), ToyTask(64), ToyTask(48)], tmp_path)
    assert {type(error) for error in found.values()} == {BadInput}
    assert {error.message for error in found.values()} == {
        "worker-2 has other data or another model than worker-0: train has 48 samples instead of 64"
    }


def test_another_order_is_found(tmp_path: Path) -> None:
    class Reversed(ToyTask):
        def prepare(self, progress: Any) -> None:
            super().prepare(progress)
            self.train.reverse()

    found = say([Reversed(), ToyTask()], tmp_path)
    assert all("sample" in str(error) and "of train is different" in str(error) for error in found.values())


def test_random_augmentation_makes_no_difference(tmp_path: Path) -> None:
    task = RandomTask()
    task.prepare(lambda *_: None)
    torch.manual_seed(1)
    first = describe(task, weights_of(task), Samples(task, 5), 5, lambda _: None)
    torch.manual_seed(2)
    assert describe_difference(first, describe(task, weights_of(task), Samples(task, 5), 5, lambda _: None)) == ""


def test_data_that_cannot_be_seeded_are_told_and_not_refused() -> None:
    class Own(list[Any]):
        rng = np.random.default_rng()

        def __getitem__(self, index: Any, /) -> Any:
            return torch.full((3,), self.rng.random())

    warnings: list[str] = []
    one = described(Own(range(20)), warnings)
    assert describe_difference(one, described(Own(range(20)), warnings)) == ""
    assert "cannot be repeated exactly" in warnings[0]


SAMPLES = [
    {
        "sound": torch.sin(torch.arange(4000.0) * (i + 1)),
        "image": torch.arange(300).add(i).to(torch.uint8),
        "text": f"{i}",
    }
    for i in range(12)
]


@pytest.mark.parametrize("kind", ["sound", "image"])
def test_rounding_of_another_system_is_forgiven(kind: str) -> None:
    noise = {"sound": 1e-4 * torch.randn(4000), "image": torch.zeros(300, dtype=torch.uint8)}[kind]
    noise[:10] += 1
    noise[:10] *= noise.dtype != torch.float32
    other = [{**sample, kind: sample[kind] + noise} for sample in SAMPLES]
    assert describe_difference(described(SAMPLES), described(other)) == ""


@pytest.mark.parametrize("change", [{"text": "another"}, {"image": torch.zeros(300, dtype=torch.uint8)}, {"label": 3}])
def test_other_content_is_found(change: dict[str, Any]) -> None:
    other = [{**sample, **change} for sample in SAMPLES]
    assert "of train is different" in describe_difference(described(SAMPLES), described(other))


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    control = Control()
    control.post(Command(command="stop", at_step=4))
    train(toy_plan(), tmp_path, ToyTask(48), control)
    with pytest.raises(
        BadInput, match="has other data or another model than the run began with: train has 40 samples instead of 48"
    ):
        train(toy_plan(resume=True), tmp_path, ToyTask(40))


def test_a_newcomer_with_other_data_is_refused() -> None:
    with pytest.raises(
        BadInput, match="has other data or another model than the others have: train has 11 samples instead of 12"
    ):
        check_unchanged(described(SAMPLES).model_dump(), described(SAMPLES[:11]), "the others have")
    with pytest.raises(BadInput, match="machine-1 has other data .* 11 samples instead of 12") as caught:
        check_unchanged(described(SAMPLES).model_dump(), described(SAMPLES[:11]), "the run began with", "machine-1")
    assert "bring back the data that were there" in caught.value.hint


class Frozen(ToyTask):
    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def build_model(self) -> torch.nn.Module:
        model: Any = super().build_model()
        torch.nn.init.constant_(model[0].weight, self._value).requires_grad_(False)
        return model  # a Sequential


def test_other_frozen_weights_are_found(tmp_path: Path) -> None:
    found = say([Frozen(1.0), Frozen(1.001)], tmp_path)
    assert all("the model's frozen weights are different" in str(error) for error in found.values())


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"splits": {"train": 3}}', b"\xff", b"[" * 100_000])
def test_what_nobody_understands_is_named_and_breaks_nobody(said: bytes) -> None:
    def start(exchange: Any) -> None:
        if exchange.rank == 1:
            exchange.gather("start/data", said)
        else:
            check_same(described(SAMPLES), exchange, lambda rank: f"machine-{rank}")

    found = together(3, start)[0]
    assert [str(found[rank]).partition(":")[0] for rank in (0, 2)] == [
        "machine-1 has other data or another model than machine-0"
    ] * 2


def test_what_hundreds_of_members_say_alike_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member of a simulation compares all: comparing each with each would take longer than to train."""
    compared = []

    def counted(one: Any, other: Any) -> str:
        compared.append((one, other))
        return describe_difference(one, other)

    class Hundreds(RoomExchange):
        def gather(self, name: str, payload: bytes, members: Any = None) -> dict[int, bytes]:
            return dict.fromkeys(range(300), payload)

    monkeypatch.setattr(data_fingerprint, "describe_difference", counted)
    check_same(described(SAMPLES), Hundreds(Room(1, lambda *_: False), 0), str)
    assert len(compared) == 1


def test_ordinary_data_are_told_nothing_about(tmp_path: Path) -> None:
    _, events = train(toy_plan(), tmp_path)
    assert not [event for event in events if isinstance(event, WarningEvent)]


def warned(events: list[Any]) -> list[str]:
    return [event.message for event in events if isinstance(event, WarningEvent)]


def test_members_that_compute_in_other_precisions_are_told(tmp_path: Path) -> None:
    plan, events = toy_plan(2, training={"max_steps": 1}), list[Any]()

    def start(exchange: Any) -> Any:
        task = ToyTask()
        task.prepare(lambda *_: None)
        trainer = Trainer(plan, exchange.rank, task, exchange, events.append, Control(), tmp_path)
        trainer.precision = Precision(torch.bfloat16 if exchange.rank else None, trainer.device)
        return trainer.run()

    together(2, start)
    (message,) = warned(events)
    assert message.startswith("worker-0 computes in float32, worker-1 computes in bfloat16")


@pytest.mark.slow
def test_a_resume_in_another_precision_is_told(tmp_path: Path) -> None:
    training = {"max_steps": 4, "mixed_precision": "auto", "device": "cpu"}
    changes: dict[str, Any] = {"training": training, "snapshot": {"snapshot_interval": 2}}
    train(toy_plan(**changes), tmp_path)
    _, same = train(toy_plan(**changes, resume=True), tmp_path)
    assert warned(same) == []
    task = ToyTask()
    task.bf16_is_faster = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision_module, "cpu_multiplies_bf16", lambda: True)
        _, other = train(toy_plan(**changes, resume=True), tmp_path, task)
    (message,) = warned(other)
    assert "computed in float32 before and computes in bfloat16 now" in message


def test_a_record_that_nobody_understands_is_said() -> None:
    with pytest.raises(BadInput, match="what the run recorded of its data cannot be read.*start a new run"):
        check_unchanged({"splits": 3}, described(SAMPLES), "the run began with")


def test_frozen_weights_in_bf16_are_those_of_a_member_that_has_them_in_float32() -> None:
    """One computes in bf16, the other one, an older machine, in fp32."""
    looks = []
    for dtype in (torch.float32, torch.bfloat16):
        task = ToyTask()
        task.prepare(lambda *_: None)
        model = task.build_model()
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().to(dtype), requires_grad=False)
        looks.append(describe(task, model.named_parameters(), Samples(task, 5), 5, pytest.fail))
    assert describe_difference(*looks) == ""


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [({"loss": "a", "model": "b"}, {"train_step": "c", "model": "b"}, "loss, train_step are"),
     ({"loss": "a"}, {"loss": "b"}, "loss is"), ({"loss": "a"}, {"loss": "a"}, ""), ({}, {"loss": "a"}, "")],
)  # fmt: skip
def test_a_resume_with_other_code_says_which(before: dict[str, str], now: dict[str, str], named: str) -> None:
    earlier = described(SAMPLES).model_copy(update={"code": before}).model_dump(mode="json")
    said = list(change_warnings(earlier, described(SAMPLES).model_copy(update={"code": now})))
    assert [f"the source of {named} not what the run was trained with" in line for line in said] == [True] * bool(named)
