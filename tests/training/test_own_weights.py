"""The figures of each member's own weights, beside those of the averaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group import Member, run_group
from toy_task import ToyTask, toy_plan

from profiles.files.resolve import profile_from_options
from tests.training.memory_exchange import Room, RoomExchange
from training.records.events import EvaluationEvent
from training.strategies.weights import flatten


class Recording(ToyTask):
    """Keeps the weights that were evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[torch.Tensor] = []

    def evaluate(self, model: torch.nn.Module, batch: Any, generate: bool) -> dict[str, float]:
        self.held.append(flatten(model.parameters()))
        return super().evaluate(model, batch, generate)


def train(tmp_path: Path, strategy: dict[str, Any], wanted: str = "on") -> dict[int, Member]:
    plan = toy_plan(2, evaluation={"eval_interval": 4, "eval_batch_size": 10, "eval_local": wanted}, strategy=strategy)
    room = Room(2, lambda name: ())
    members = run_group(plan, lambda rank: RoomExchange(room, rank), lambda rank: Recording(), tmp_path)
    assert [member.error for member in members.values()] == [None, None]
    return members


def losses(member: Member, split: str) -> dict[int, float | None]:
    return {e.step: e.loss for e in member.events if isinstance(e, EvaluationEvent) and e.split == split}


def test_averaged_gradients_leave_every_member_the_averaged_weights(tmp_path: Path) -> None:
    members = train(tmp_path, {"strategy": "allreduce"})
    averaged = losses(members[0], "validation")
    assert sorted(averaged) == [4, 8, 12]
    for rank, member in members.items():
        assert losses(member, f"validation.local-{rank}") == pytest.approx(averaged, rel=1e-6)


@pytest.mark.parametrize(("delay", "averaged_at"), [(0, [5, 10, 12]), (2, [7, 12])])
def test_between_averages_each_member_tells_what_its_own_weights_reach(
    tmp_path: Path, delay: int, averaged_at: list[int]
) -> None:
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}
    members = train(tmp_path, {"strategy": "diloco", "sync_interval": 5, "sync_delay": delay, **outer})
    own = [losses(members[rank], f"validation.local-{rank}") for rank in (0, 1)]
    averaged = losses(members[0], "validation")
    assert sorted(averaged) == averaged_at
    assert sorted(own[0]) == sorted(own[1]) == [5, 10, 12]
    assert all(own[0][step] != own[1][step] != averaged[averaged_at[0]] for step in own[0])
    # What is evaluated first is what goes into the first average, of which every member evaluates its share then.
    (mine, result), (theirs, same) = (members[rank].trainer.task.held[:2] for rank in (0, 1))
    assert torch.equal(result, same)
    torch.testing.assert_close(result, (mine + theirs) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "wanted", "own"),
    [("diloco", "auto", False), ("sparta", "auto", True), ("noloco", "auto", True), ("sparta", "off", False)],
)
def test_by_itself_where_weights_are_kept_apart(tmp_path: Path, strategy: str, wanted: str, own: bool) -> None:
    members = train(tmp_path, {"strategy": strategy}, wanted)
    told = {e.split for member in members.values() for e in member.events if isinstance(e, EvaluationEvent)}
    assert told == {"validation", *(["validation.local-0", "validation.local-1"] if own else [])}


@pytest.mark.parametrize(("said", "means"), [(True, "on"), ("true", "on"), ("False", "off"), ("auto", "auto")])
def test_what_was_a_flag_is_understood(said: object, means: str) -> None:
    assert profile_from_options("p", {"eval_local": said}).evaluation.eval_local == means
