"""A loss or a gradient that is not finite on one member: the step is left out, the third in a row ends the member."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from group import Member, Serve, run_group
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import ExitCode, RunFailed
from training.loop.update import LeftOutSteps
from training.records.events import StepEvent, WarningEvent
from training.run.orders import Command, Control

DILOCO = {"strategy": "diloco", "sync_interval": 4}


class Failing(ToyTask):
    """Its loss, or the gradient of it alone, is not a number in some of its steps."""

    def __init__(self, bad: range, in_gradient: bool = False) -> None:
        super().__init__()
        self._bad, self._in_gradient, self._calls = bad, in_gradient, itertools.count(1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if not model.training or next(self._calls) not in self._bad:
            return loss
        return loss + 0 * (next(model.parameters()) * 0).sum().sqrt() if self._in_gradient else loss * math.nan


def weights(member: Member) -> list[float]:
    return [value for parameter in member.trainer.parameters for value in parameter.detach().reshape(-1).tolist()]


def told(member: Member) -> list[str]:
    return [event.message for event in member.events if isinstance(event, WarningEvent)]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("strategy", [{}, DILOCO], ids=["allreduce", "diloco"])
@pytest.mark.parametrize("in_gradient", [False, True], ids=["loss", "gradient"])
def test_a_single_step_is_left_out_and_told(
    tmp_path: Path, serve: Serve, strategy: dict[str, Any], failing: int, in_gradient: bool
) -> None:
    plan = toy_plan(2, strategy=strategy)
    tasks = {failing: Failing(range(5, 7), in_gradient), 1 - failing: ToyTask()}
    members = run_group(plan, serve(plan), tasks.__getitem__, tmp_path)
    assert [members[rank].ending for rank in range(2)] == [ExitCode.DONE] * 2
    assert weights(members[0]) == weights(members[1]) and all(map(math.isfinite, weights(members[0])))
    assert told(members[1 - failing]) == []
    assert any("gradient of" in line for line in told(members[failing])) or not in_gradient
    if not in_gradient:
        assert any("the loss of worker-" in line and "in step 5" in line for line in told(members[failing]))
        steps = [event for event in members[failing].events if isinstance(event, StepEvent)]
        assert [event.step for event in steps if event.samples == event.weight == 0] == [5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, DILOCO], ids=["allreduce", "diloco"])
def test_the_third_in_a_row_ends_the_member_also_after_a_resume(
    tmp_path: Path, serve: Serve, strategy: dict[str, Any]
) -> None:
    def stopping(rank: int) -> Control:
        control = Control()
        control.post(Command(command="stop", at_step=4))
        return control

    first = toy_plan(3, strategy=strategy)
    run_group(first, serve(first), lambda _: ToyTask(), tmp_path, stopping)
    again = toy_plan(3, strategy=strategy, resume=True)
    members = run_group(again, serve(again), lambda rank: ToyTask() if rank else Failing(range(1, 9)), tmp_path)
    assert [members[rank].ending for rank in (1, 2)] == [ExitCode.DONE] * 2
    assert isinstance(members[0].error, RunFailed)
    assert "the loss of worker-0 is nan in step 7" in str(members[0].error)
    assert "3 times in a row; the snapshot of step 4 is kept" in str(members[0].error)
    assert weights(members[1]) == weights(members[2])


def test_who_is_alone_or_holds_a_part_of_a_member_ends_at_once() -> None:
    for others, possible in ((False, True), (True, False)):
        with pytest.raises(RunFailed, match="bad; none"):
            LeftOutSteps(lambda line: None, lambda: "none", possible).note("bad", others)
