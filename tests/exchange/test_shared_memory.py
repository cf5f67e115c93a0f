"""Tensors whose elements share memory, or that have no rows, are refused in one line before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend

Tensor = torch.Tensor
WRITTEN: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": dist.all_reduce,
    "reduce": lambda tensor: dist.reduce(tensor, 0),
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_gather": lambda tensor: dist.all_gather([tensor], torch.ones(2, 3)),
    "reduce_scatter": lambda tensor: dist.reduce_scatter(tensor, [torch.ones(2, 3)]),
    "gather": lambda tensor: dist.gather(torch.ones(2, 3), [tensor], 0),
    "scatter": lambda tensor: dist.scatter(tensor, [torch.ones(2, 3)], 0),
    "all_to_all": lambda tensor: dist.all_to_all([tensor], [torch.ones(2, 3)]),
    "tensor of all members": lambda tensor: dist.all_gather_single(tensor, torch.ones(2, 3)),
}


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("muster", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("operation", WRITTEN)
def test_an_expanded_tensor_is_not_written(operation: str) -> None:
    with pytest.raises(ValueError, match=rf"^muster: .*{operation}.*pass tensor.contiguous\(\)$"):
        WRITTEN[operation](torch.ones(3).expand(2, 3))
    WRITTEN[operation](torch.ones(2, 3))


def test_an_expanded_tensor_is_read() -> None:
    gathered = [torch.zeros(2, 3)]
    dist.all_gather(gathered, torch.ones(3).expand(2, 3))
    assert torch.equal(gathered[0], torch.ones(2, 3))


def test_a_number_has_no_rows_to_send() -> None:
    with pytest.raises(ValueError, match="^muster: all_to_all_single divides rows, and a 0-dim tensor has none"):
        dist.all_to_all_single(torch.tensor(0.0), torch.tensor(1.0))
