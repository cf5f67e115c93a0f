"""What is exchanged gets to the host whole, in order, and not before it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.staging import SideStream, pinned, to_host

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class FakeStream:
    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def wait_stream(self, other: FakeStream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeStream:
        self.told.append(f"{self.name} records")
        return self

    def synchronize(self) -> None:
        self.told.append("host waits")


class FakeCuda:
    """Streams that tell what is asked of them."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def Stream(self, device: Any) -> FakeStream:
        return FakeStream(self.told, "side")

    def current_stream(self, device: Any) -> FakeStream:
        return FakeStream(self.told, "compute")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.told.append(f"on {stream.name}")
        yield
        self.told.append(f"off {stream.name}")


class OnDevice(torch.Tensor):
    """A tensor of the host that tells the streams it was used on."""

    used: list[str]

    def record_stream(self, stream: Any) -> None:
        self.used.append(stream.name)


def test_a_side_stream_copies_after_what_was_computed_and_the_host_waits_once() -> None:
    cuda = FakeCuda()
    tensors = [
        torch.ones(2, 3).as_subclass(OnDevice),
        torch.full((4,), 2.0, dtype=torch.bfloat16).as_subclass(OnDevice),
    ]
    for tensor in tensors:
        tensor.used = []
    stream = SideStream(torch.device("cpu"), cuda, lambda elements, dtype: torch.empty(elements, dtype=dtype))
    staged = stream.to_host(tensors, torch.float32)
    assert cuda.told == ["side waits for compute", "on side", "side records", "off side"]
    assert [tensor.used for tensor in tensors] == [["side"], ["side"]]
    assert staged.wait().tolist() == [1.0] * 6 + [2.0] * 4
    assert cuda.told[-1] == "host waits" and cuda.told.count("host waits") == 1


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4), narrow=st.booleans())
def test_tensors_of_any_shape_lie_one_behind_another(shapes: list[list[int]], narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    tensors = [torch.randn(shape).to(dtype).transpose(0, -1) if shape else torch.randn(()) for shape in shapes]
    expected = torch.cat([torch.empty(0), *(tensor.reshape(-1).float() for tensor in tensors)])
    assert torch.equal(to_host(tensors, torch.float32).wait(), expected)


def test_the_copy_is_memory_of_its_own_and_asks_for_no_gradient() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    host = to_host([weights], torch.float32).wait()
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
    host = to_host([product, large[0].bfloat16()], torch.float32).wait()
    assert host.is_pinned() and bool((host[: 2048 * 2048] == 2048).all()) and bool((host[-2048:] == 1).all())
