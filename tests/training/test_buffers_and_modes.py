"""Running statistics and frozen parts of a model: equal over members, kept as their author wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_exchange import together
from test_trainer import train
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput
from training.hardware.device import evaluating, start_training
from training.loop.state import synchronise_buffers
from training.records.events import EvaluationEvent, WarningEvent
from training.strategies.weights import refuse_unsuitable


class Normed(ToyTask):
    """A model with a batch norm, which its author may have frozen."""

    def __init__(self, frozen: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._frozen = frozen

    def build_model(self) -> nn.Module:
        plain: Any = super().build_model()
        model = nn.Sequential(plain[0], nn.BatchNorm1d(16), *plain[1:])
        model[1].train(not self._frozen)
        return model


def test_early_stopping_brings_back_the_running_statistics_of_the_best_weights(tmp_path: Path) -> None:
    plan = toy_plan(
        training={"max_steps": 200, "learning_rate": 1.0, "max_grad_norm": 0, "lr_schedule": "constant"},
        evaluation={"eval_interval": 2, "early_stopping_patience": 3},
    )
    trainer, events = train(plan, tmp_path, Normed())
    found = [event.loss for event in events if isinstance(event, EvaluationEvent)]
    assert trainer.position.step < 200
    assert found[-1] == min(loss for loss in found[:-1] if loss is not None)
    assert sum("early stop" in event.message for event in events if isinstance(event, WarningEvent)) == 1


def test_a_frozen_batch_norm_stays_frozen_through_training_and_evaluation(tmp_path: Path) -> None:
    trainer, _ = train(toy_plan(evaluation={"eval_interval": 3, "eval_before": True}), tmp_path, Normed(frozen=True))
    norm: Any = trainer.model[1]  # a Sequential
    assert not norm.training and trainer.model.training
    assert norm.running_mean.tolist() == [0.0] * 16
    assert int(norm.num_batches_tracked) == 0


class Loaded(nn.Sequential):
    """Stands for a model of a library, whose ``from_pretrained`` returns it in evaluation mode."""

    def from_pretrained(self) -> None: ...


def test_what_a_library_returns_in_evaluation_mode_is_trained() -> None:
    whole = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).eval()
    inside = nn.Sequential(Loaded(nn.Dropout(), nn.Linear(2, 2)).eval(), nn.Dropout().eval())
    start_training(whole)
    start_training(inside)
    assert all(module.training for module in whole.modules())
    assert [module.training for module in inside.modules()] == [True, True, True, True, False]


def test_what_its_own_train_method_freezes_is_not_trained() -> None:
    class Own(nn.Sequential):
        def train(self, mode: bool = True) -> Own:
            super().train(mode)
            self[0].training = False
            return self

    model = Own(nn.Dropout(), nn.Dropout())
    start_training(model)
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


class Holder(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


THIRD = 1.0 / 3.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_buffers_that_all_hold_alike_keep_their_bits_and_others_are_averaged(dtype: torch.dtype) -> None:
    same = torch.tensor([THIRD, 2.0], dtype=torch.float64).to(dtype)

    def body(exchange: Any) -> Holder:
        mine = torch.tensor([THIRD, exchange.rank], dtype=torch.float64).to(dtype)
        holder = Holder(same=same.clone(), own=mine.clone())
        synchronise_buffers(holder, exchange, "test")
        return holder

    found, _ = together(2, body)
    for holder in found.values():
        assert torch.equal(holder.same, same)
        assert torch.equal(holder.own, torch.tensor([THIRD, 0.5], dtype=torch.float64).to(dtype))
    _, room = together(2, lambda exchange: synchronise_buffers(Holder(same=same.clone()), exchange, "test"))
    assert room.names == ["buffers/test/hashes"]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (nn.Sequential(nn.LazyLinear(1)), "0.weight of the model has no shape yet"),
        (nn.Linear(2, 1, dtype=torch.complex64), "weight of the model is complex"),
        (nn.Linear(2, 1, device="meta"), "weight of the model has no values"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), "the gradients of 0 are sparse"),
    ],
)
def test_weights_that_cannot_be_trained_together_are_refused_by_name(model: nn.Module, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        refuse_unsuitable(model)
