"""A student in a run: two workers equal one, both strategies end with one model, and a resumed run is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.errors import ExitCode
from profiles.files.resolve import profile_from_options
from speech.whisper.distillation import DistillationTask
from tests.speech.tiny_speech import tiny_whisper, write_clips, write_csv
from tests.training.group import Member, OneByOne, run_group
from tests.training.memory_exchange import Room, RoomExchange
from training.exchange.base import Exchange, SoloExchange
from training.records.events import StepEvent
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run
from training.run.orders import Command, Control

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, and eight clips to train on."""
    folder = tmp_path_factory.mktemp("distilled")
    torch.manual_seed(1)
    tiny_whisper(folder / "teacher", layers=3)
    rows = write_clips(folder, 10)
    write_csv(folder / "train.csv", rows[:8])
    write_csv(folder / "validation.csv", rows[8:])
    return folder


def plan(place: Path, workers: int, resume: bool = False, **options: Any) -> RunPlan:
    given = {"teacher_path": place / "teacher", "student_layers": 2, "dataset_path": place,
             "cache_dir": place / "cache",
             "batch_size": 8 // workers, "max_steps": 6, "lr_scaling": "off", "warmup_steps": 0, "eval_before": False,
             "eval_generate": False, "eval_interval": 0, "learning_rate": 1e-2, "device": "cpu"}  # fmt: skip
    plan = plan_local_run(profile_from_options("student", {**given, **options}), workers)
    return plan.model_copy(update={"resume": resume})


class Distilling(OneByOne, DistillationTask):
    """A member's task."""


def train(plan: RunPlan, folder: Path, stop_at: int = 0) -> dict[int, Member]:
    room = Room(plan.world_size, lambda name: ())

    def connect(rank: int) -> Exchange:
        return RoomExchange(room, rank) if plan.world_size > 1 else SoloExchange()

    def control(rank: int) -> Control:
        made = Control()
        if stop_at:
            made.post(Command(command="stop", at_step=stop_at))
        return made

    members = run_group(plan, connect, lambda rank: Distilling(plan.profile), folder, control)
    assert [member.error for member in members.values()] == [None] * len(members)
    return members


def weights(member: Member) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in member.trainer.parameters])


def losses(member: Member) -> list[float]:
    return [event.loss for event in member.events if isinstance(event, StepEvent)]


@pytest.mark.parametrize("options", [{}, {"augmentation": 1e-9}], ids=["asked once", "asked in every step"])
def test_two_workers_equal_one(place: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    two = train(plan(place, 2, strategy="allreduce", **options), tmp_path / "two")
    one = train(plan(place, 1, **options), tmp_path / "one")[0]
    assert torch.equal(weights(two[0]), weights(two[1]))
    torch.testing.assert_close(weights(two[0]), weights(one), rtol=0, atol=2e-4)
    assert losses(one)[-1] < losses(one)[0]


def test_diloco_and_adapters_end_with_one_model(place: Path, tmp_path: Path) -> None:
    options = {"strategy": "diloco", "sync_interval": 3, "tuning": "lora", "lora_rank": 2, "lora_dropout": 0.0}
    two = train(plan(place, 2, **options), tmp_path)
    assert torch.equal(weights(two[0]), weights(two[1]))
    assert losses(two[0])[-1] < losses(two[0])[0]


@pytest.mark.parametrize("options", [{}, {"augmentation": 0.5}], ids=["asked once", "asked in every step"])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(
    place: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = train(plan(place, 1, **options), tmp_path / "whole")[0]
    first = train(plan(place, 1, **options), tmp_path / "cut", stop_at=3)[0]
    assert first.ending is ExitCode.STOPPED
    rest = train(plan(place, 1, resume=True, **options), tmp_path / "cut")[0]
    assert losses(first) + losses(rest) == losses(whole)
