"""A machine whose gradients are garbage is named; one whose gradients only vary is not."""

from __future__ import annotations

import math
import random
from operator import truediv
from pathlib import Path
from typing import Any

import pytest
import torch
from group import Serve, run_group
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toy_task import ToyTask, toy_plan

from tests.runs.run_stage import Stage
from training.numerics.gradient_norms import GradientNorms
from training.records.events import RunEvent, StepEvent, WarningEvent


def warned(norms: list[list[float]]) -> list[tuple[int, int]]:
    """Return step and rank of all warnings, given the norms of all members step by step."""
    watch = GradientNorms()
    found = [
        (step, one)
        for step, row in enumerate(norms)
        for rank, norm in enumerate(row)
        for one, *_ in watch.note(rank, step, norm)
    ]
    return found


@pytest.mark.parametrize("members", [2, 3, 8])
@pytest.mark.parametrize("odd", [0, 1])
def test_one_gradient_of_garbage_is_told_with_its_member(members: int, odd: int) -> None:
    garbage = [1e6 if rank == odd else 0.7 for rank in range(members)]
    assert warned([[0.7] * members] * 20 + [garbage] + [[0.7] * members] * 5) == [(20, odd)]


def test_a_member_that_always_computes_garbage_is_told_soon_and_not_in_each_step() -> None:
    assert warned([[0.5, 1e6, 2.0]] * 150) == [(7, 1), (16, 1), (106, 1)]


def test_garbage_in_the_mean_that_makes_all_gradients_long_is_still_that_of_one() -> None:
    assert warned([[1.0, 1.0]] * 20 + [[1.0, 1e6], [1e3, 1e3], [1e4, 1e4]]) == [(20, 1)]


def test_a_warm_up_and_empty_batches_are_no_garbage() -> None:
    falling = [[300 * math.exp(-step / 3) + 0.1, 100 * math.exp(-step / 3) + 0.1] for step in range(40)]
    assert warned(falling) == []
    assert warned([[0.0, 5.0]] * 40) == []  # one without samples
    assert warned([[1e-4, 1e-4]] * 4 + [[1e-4, 0.05]] + [[0.05, 0.05]] * 20) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_one_machine_whose_gradients_are_tiny_makes_no_other_ones_garbage(order: tuple[int, ...]) -> None:
    watch, norms = GradientNorms(), (1e-5, 1.0, 1.1)
    assert [one for step in range(60) for rank in order for one in watch.note(rank, step, norms[rank])] == []


def test_who_is_lost_puts_no_verdict_off_for_long() -> None:
    watch = GradientNorms()
    rows = [(step, (0, 1, 2) if step < 20 else (0, 1)) for step in range(60)]
    told = [
        one
        for step, ranks in rows
        for rank in ranks
        for one, *_ in watch.note(rank, step, 1e6 if rank == 1 and step == 22 else 1.0)
    ]
    assert told == [1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(0, 1 << 32))
def test_batches_of_one_sample_are_no_garbage(members: int, seed: int) -> None:
    """Log-normal norms whose logarithms spread by 1.2: one in a hundred is 16 times the median."""
    draw = random.Random(seed).lognormvariate
    assert warned([[draw(0.0, 1.2) for _ in range(members)] for _ in range(400)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "diloco"])
def test_each_member_tells_the_norm_of_its_own_gradient(tmp_path: Path, serve: Serve, strategy: str) -> None:
    plan = toy_plan(2, strategy={"strategy": strategy})

    class Garbage(ToyTask):
        def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            return 1e6 * super().loss(model, batch)

    members = run_group(plan, serve(plan), lambda rank: Garbage() if rank else ToyTask(), tmp_path)
    fine, odd = (
        [e.own_norm or e.grad_norm or 0.0 for e in member.events if isinstance(e, StepEvent)]
        for member in (members[0], members[1])
    )
    assert all(ratio > 1e4 for ratio in map(truediv, odd, fine))


def test_a_run_names_the_machine_whose_gradients_are_garbage(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.folder:
        stage.take(0, RunEvent(status="running"))
        for step in range(1, 12):
            for rank in range(3):
                norm = 3e6 if (rank, step) == (1, 11) else 1.0
                event = StepEvent(
                    step=step, epoch=0, loss=1, learning_rate=1, samples=1, weight=1, compute=0, wait=0, transfer=0,
                    grad_norm=1.0, own_norm=norm,
                )  # fmt: skip
                stage.take(rank, event)
        stage.run.kill()
    (warning,) = (event for event in stage.events if isinstance(event, WarningEvent))
    assert (warning.member, warning.step) == (1, 11)
    assert "worker-1: its gradient of step 11 is 3,000,000 times as long as the others" in warning.message
