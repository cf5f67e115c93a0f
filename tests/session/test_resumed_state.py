"""What a resumed script continues from is what it left, bit for bit: one process, killed between two snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script_processes import alone_in_run
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, IterableDataset

from profiles.errors import BadInput, RunFailed
from training.exchange.base import SoloExchange
from training.session.session import Session
from training.session.untrained_weights import UntrainedWeights

STEPS, SNAPSHOT, KILLED = 13, 6, 8
Make = Callable[..., Any]


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


class Stream(IterableDataset[Any]):
    """In another order in every pass."""

    def __iter__(self) -> Iterator[Any]:
        pairs = samples()
        return iter([pairs[index] for index in torch.randperm(len(pairs)).tolist()])


def shuffled(**settings: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=4, shuffle=True, **settings)  # type: ignore[arg-type]  # a list is a data set


def weights_after(
    session: Session,
    last: int,
    loader_of: Make = shuffled,
    scheduler_of: Make | None = None,
    optimizer_of: Make = lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
) -> dict[str, torch.Tensor]:
    """Train with dropout, and with a moving average of the weights beside the model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer) if scheduler_of else lr_scheduler.ConstantLR(optimizer, 1.0)
    model, average, optimizer, scheduler, loader = session.prepare(model, average, optimizer, scheduler, loader_of())
    while session.completed_steps < last:
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), target)
            session.backward(loss)
            session.step()
            average.update_parameters(model)
            scheduler.step(*([loss.item()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            if session.completed_steps == last:
                break
    session.finish()  # waits for the snapshot
    return {name: value.clone() for name, value in average.state_dict().items()} | {
        "rate": torch.tensor(rate(optimizer))
    }


def rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def ends_alike(folder: Path, **script: Any) -> bool:
    settings = {"snapshot_interval": SNAPSHOT}
    whole = weights_after(alone_in_run(folder / "whole", **settings), STEPS, **script)
    weights_after(alone_in_run(folder, **settings), KILLED, **script)
    resumed = weights_after(alone_in_run(folder, 2, **settings), STEPS, **script)
    return all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    "loader_of",
    [
        shuffled,
        lambda: shuffled(generator=torch.Generator().manual_seed(5)),
        lambda: DataLoader(Stream(), batch_size=4),
    ],
    ids=["shuffled", "own generator", "stream"],
)
def test_the_order_of_the_data_dropout_and_a_moving_average(loader_of: Make, tmp_path: Path) -> None:
    assert ends_alike(tmp_path, loader_of=loader_of)


@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 10]),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [4, 7])],
            [3],
        ),
    ],
    ids=["milestones", "one cycle", "plateau", "sequence"],
)
def test_schedulers_of_every_kind(scheduler_of: Make, tmp_path: Path) -> None:
    """Milestones are numbered by whole numbers, which JSON has as texts; one cycle changes momentum, a pair."""
    assert ends_alike(tmp_path, scheduler_of=scheduler_of)


def test_a_rate_that_is_a_tensor(tmp_path: Path) -> None:
    assert ends_alike(
        tmp_path,
        optimizer_of=lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.05)),
        scheduler_of=lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    )


def test_a_frozen_weight_that_is_made_anew_is_not_taken_for_the_former_one(tmp_path: Path) -> None:
    def script(attempt: int) -> None:
        session = alone_in_run(tmp_path, attempt, snapshot_interval=1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        session.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        for _ in range(2):
            session.backward(model(torch.ones(1, 4)).sum())
            session.step()
        session.finish()

    script(1)
    with pytest.raises(RunFailed, match=r"0\.bias, which is not trained.*manual_seed"):
        script(2)


def test_a_state_that_no_snapshot_can_have_is_refused_at_once(tmp_path: Path) -> None:
    class Curriculum:
        def state_dict(self) -> dict[str, Any]:
            return {"self": self}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(BadInput, match="state of Curriculum cannot be part of a snapshot"):
        alone_in_run(tmp_path).prepare(Curriculum())


def test_snapshots_of_earlier_versions_know_an_untrained_tensor_by_the_same_hash() -> None:
    weights = UntrainedWeights({"w": torch.tensor([1.0, -2.5, 0.1])}, SoloExchange())
    assert weights.snapshot() == ({}, {"w": "844a8c331979ad64"})
