"""Batches of every form, and models whose forward is written for it."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from profiles.errors import BadInput, RunFailed
from tests.tasks.tiny_tasks import custom_task
from training.hardware.device import move
from training.local_trainer import LocalTrainer
from training.tasks.custom import check_data

DATA = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6.0)[:, None])
META = torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Labelled(NamedTuple):
    label: Tensor
    x: Tensor


@dataclass
class Record:
    x: Tensor
    y: Tensor


class Graphs:
    """Stands for a batch of a library: tensors behind attributes, and ``.to()``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: torch.device) -> Graphs:
        return Graphs(self.x.to(device), self.y.to(device))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(x), y)


class Whole(Base):
    def forward(self, batch: Any) -> Tensor:
        return self.loss(*batch)


class WholeWithOption(Base):
    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        return self.loss(*batch) * scale


class Unnamed(Base):
    def forward(self, both: Any) -> Tensor:
        return self.loss(both[0], both[1])


class Apart(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)


class Optional(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return self.loss(x, y)


class Anything(Base):
    def forward(self, *parts: Tensor) -> Tensor:
        return self.loss(*parts)


class Attributes(Base):
    def forward(self, batch: Any) -> Tensor:
        return self.loss(batch.x, batch.y)


class ByName(Base):
    def forward(self, batch: Any) -> Tensor:
        return self.loss(batch["x"], batch["y"])


PAIRS = [(x, y) for x, y in DATA]


def loss_of(model: nn.Module, samples: list[Any], **options: Any) -> Tensor:
    task = custom_task(model, samples, **options)
    batch = task.collate(samples, None)
    assert task.weight(batch) == 6
    return task.loss(task.build_model(), move(batch, torch.device("cpu")))


@pytest.mark.parametrize("kind", [Whole, WholeWithOption, Unnamed, Apart, Optional, Anything])
def test_a_tuple_goes_into_a_forward_as_it_is_written(kind: type[Base]) -> None:
    assert loss_of(kind(), PAIRS).shape == ()


@pytest.mark.parametrize("kind", [Attributes, Apart, Whole])
def test_a_named_tuple_keeps_its_names(kind: type[Base]) -> None:
    assert loss_of(kind(), [Pair(x, y) for x, y in PAIRS]).shape == ()


@pytest.mark.parametrize("kind", [ByName, Apart])
def test_a_mapping_goes_in_by_name_or_as_a_whole(kind: type[Base]) -> None:
    assert loss_of(kind(), [{"x": x, "y": y} for x, y in PAIRS]).shape == ()


@pytest.mark.parametrize("kind", [ByName, Apart, Optional])
def test_columns_that_a_forward_does_not_name_are_left_out(kind: type[Base]) -> None:
    assert loss_of(kind(), [{"id": 3, "x": x, "y": y, "text": "a"} for x, y in PAIRS]).shape == ()


@pytest.mark.parametrize("make", [Graphs, Record])
def test_an_object_goes_in_as_it_is(make: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return make(*(torch.stack(parts) for parts in zip(*samples, strict=True)))

    assert loss_of(Attributes(), PAIRS, collate=collate).shape == ()

    class Features(Base):
        def forward(self, batch: Any) -> Tensor:
            return self.linear(batch.x)

    assert loss_of(Features(), PAIRS, collate=collate, loss=nn.functional.mse_loss).shape == ()


def test_the_target_of_a_named_tuple_is_found_by_name() -> None:
    assert loss_of(nn.Linear(2, 1), [Labelled(y, x) for x, y in PAIRS], loss=nn.functional.mse_loss).shape == ()


def test_one_input_is_given_alone_whatever_it_is_called() -> None:
    class Named(Base):
        def forward(self, batch: Tensor) -> Tensor:
            return self.linear(batch)

    assert loss_of(Named(), PAIRS, loss=nn.functional.mse_loss).shape == ()


@pytest.mark.parametrize("batch", [Pair(*PAIRS[0]), Record(*PAIRS[0]), Graphs(*PAIRS[0])])
def test_every_form_is_moved_to_the_device(batch: Any) -> None:
    moved = move({"inner": [batch]}, META)["inner"][0]
    assert type(moved) is type(batch)
    assert moved.x.device == moved.y.device == META


def test_what_has_its_own_way_to_a_device_keeps_its_kind() -> None:
    class Encoding(UserDict[str, Tensor]):
        def to(self, device: torch.device) -> Encoding:
            return Encoding({name: value.to(device) for name, value in self.items()})

    moved = move(Encoding({"ids": torch.ones(2)}), META)
    assert isinstance(moved, Encoding) and moved["ids"].device == META


def test_samples_of_unequal_shape_are_told_with_what_to_do() -> None:
    with pytest.raises(RunFailed, match=r"2 samples cannot be put together .*equal size.*a collate function"):
        custom_task(nn.Linear(1, 1), PAIRS).collate([torch.ones(2), torch.ones(3)], None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (iter([1, 2]), "train_dataset is list_iterator, which gives its samples only once"),
        (5, "train_dataset is int, without __len__"),
    ],
)
def test_data_without_numbered_samples_are_refused_before_anything_starts(data: Any, said: str, tmp_path: Any) -> None:
    with pytest.raises(BadInput, match=said):
        check_data(data, "train_dataset")
    with pytest.raises(BadInput, match=said):
        LocalTrainer(nn.Linear(2, 1), data, output_dir=tmp_path).fit(max_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_factory_returns_the_data_of_a_loader() -> None:
    with pytest.raises(BadInput, match=r"train is a DataLoader.*loader.dataset"):
        check_data(DataLoader(DATA), "train")
