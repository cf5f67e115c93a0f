"""What is exchanged gets to the host whole, in order, and not before it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.staging import pinned, to_host

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4), narrow=st.booleans())
def test_tensors_of_any_shape_lie_one_behind_another(shapes: list[list[int]], narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    tensors = [torch.randn(shape).to(dtype).transpose(0, -1) if shape else torch.randn(()) for shape in shapes]
    expected = torch.cat([torch.empty(0), *(tensor.reshape(-1).float() for tensor in tensors)])
    assert torch.equal(to_host(tensors, torch.float32), expected)


def test_the_copy_is_memory_of_its_own_and_asks_for_no_gradient() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    host = to_host([weights], torch.float32)
    host.zero_()
    assert not host.requires_grad and weights.tolist() == [1.0] * 3


def test_memory_that_cannot_be_pinned_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def none_left(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", none_left)
    assert pinned(3, torch.bfloat16).shape == (3,)


@pytest.mark.cuda
@CUDA
def test_a_cuda_device_copies_to_pinned_memory_what_it_has_computed() -> None:
    large = torch.ones(2048, 2048, device="cuda")
    product = large @ large
    host = to_host([product, large[0].bfloat16()], torch.float32)
    assert host.is_pinned() and bool((host[: 2048 * 2048] == 2048).all()) and bool((host[-2048:] == 1).all())
