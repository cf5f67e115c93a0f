"""Memory that runs out: fewer samples in a pass, in more passes, and the same step."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_exchange import together
from test_trainer import losses, steps, train
from toy_task import ToyTask, toy_plan

from profiles.errors import RunFailed
from training.hardware.device import is_out_of_memory
from training.loop.trainer import Trainer
from training.records.events import EvaluationEvent, Event, WarningEvent
from training.run.orders import Command, Control


@pytest.fixture(autouse=True)
def _few_objects() -> None:
    """Memory is given back by looking at all objects, each time: not at those of all tests before."""
    gc.freeze()


class Tight(ToyTask):
    """Runs out of memory with more than ``fits`` samples in a pass."""

    def __init__(self, fits: int, **options: Any) -> None:
        super().__init__(**options)
        self.fits = fits
        self.passes: list[int] = []

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if len(batch["x"]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.passes.append(len(batch["x"]))
        return super().loss(model, batch)


def warnings(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, WarningEvent)]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.parameters])


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_taken_in_smaller_passes_with_the_same_result(tmp_path: Path) -> None:
    plan = toy_plan(training={"batch_size": 8, "max_grad_norm": 0.5})
    whole, _ = train(plan, tmp_path / "a")
    task = Tight(3)
    tight, events = train(plan, tmp_path / "b", task)
    torch.testing.assert_close(weights(tight), weights(whole), rtol=0, atol=1e-6)
    assert [event.samples for event in steps(events)] == [8] * 12
    assert task.passes[:48] == [2] * 48
    assert [message.partition(" do not")[0] for message in warnings(events)] == [
        "8 samples in one pass",
        "4 samples in one pass",
    ]


def test_a_sample_that_does_not_fit_alone_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"one sample alone .*Tried to allocate"):
        train(toy_plan(), tmp_path, Tight(0))


def test_an_evaluation_that_does_not_fit_is_done_in_smaller_parts(tmp_path: Path) -> None:
    _, whole = train(toy_plan(), tmp_path / "a")
    _, tight = train(toy_plan(evaluation={"eval_batch_size": 10}), tmp_path / "b", Tight(4))
    found = [[event for event in events if isinstance(event, EvaluationEvent)][-1] for events in (whole, tight)]
    assert found[1].samples == found[0].samples == 10
    assert found[1].loss == pytest.approx(found[0].loss)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_smaller_passes(tmp_path: Path) -> None:
    whole_plan = toy_plan(training={"batch_size": 8})
    _, whole = train(whole_plan, tmp_path / "a", Tight(4, dropout=0.2))
    control = Control()
    control.post(Command(command="stop", at_step=5))
    _, first = train(whole_plan, tmp_path / "b", Tight(4, dropout=0.2), control)
    _, rest = train(toy_plan(training={"batch_size": 8}, resume=True), tmp_path / "b", Tight(4, dropout=0.2))
    assert losses(first) + losses(rest) == losses(whole)
    assert warnings(rest) == []


class Late(ToyTask):
    """Runs out of memory once in the last backward of a step, when later layers have their gradients already."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    def build_model(self) -> torch.nn.Module:
        model: Any = super().build_model()
        model[0].bias.register_hook(self._fail)
        return model  # a Sequential

    def _fail(self, gradient: torch.Tensor) -> None:
        if len(self.seen) > 8 and self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.slow
def test_what_was_sent_before_the_memory_ran_out_stays_and_the_rest_follows(tmp_path: Path) -> None:
    plan = toy_plan(2, strategy={"bucket_mb": 0.0001, "verify_interval": 1})
    kinds = {"all fits": (ToyTask, ToyTask), "member 1 runs out": (ToyTask, Late)}
    found: dict[str, torch.Tensor] = {}
    for name, tasks in kinds.items():

        def start(exchange: Any, tasks: Any = tasks) -> Trainer:
            task = tasks[exchange.rank]()
            task.prepare(lambda *_: None)
            events: list[Event] = []
            trainer = Trainer(plan, exchange.rank, task, exchange, events.append, Control(), tmp_path)
            trainer.run()
            assert bool(warnings(events)) == isinstance(task, Late)
            return trainer

        members, _ = together(2, start)
        assert torch.equal(weights(members[0]), weights(members[1]))
        found[name] = weights(members[0])
    torch.testing.assert_close(*found.values(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.13 GB)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, known: bool) -> None:
    assert is_out_of_memory(error) is known
