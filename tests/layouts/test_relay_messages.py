from __future__ import annotations

import gc
import struct
import threading
import weakref
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput, RunFailed
from tests.layouts.pipeline_runs import QueueCarrier, queue_carriers, side_by_side
from tests.waiting import until
from training.layouts.carrier import sum_among
from training.layouts.messages import HEADER_BYTES, TensorHeader, pack_header, parse_header
from training.layouts.orders import Work, micro_batches_under_way
from training.layouts.relay import StageRelay

FIRST = Work("forward", 0)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_tensors_arrive_as_they_were_sent(wire: torch.dtype | None) -> None:
    tensors = [torch.arange(6.0).reshape(1, 2, 3).requires_grad_(), torch.ones(4, 2, dtype=torch.float64)]
    headers = [TensorHeader.of(tensor, wire) for tensor in tensors]
    work = Work("backward", 70_000)
    parsed = parse_header(pack_header(work, headers), work)
    arrived = [h.decode(h.encode(tensor), torch.device("cpu")) for h, tensor in zip(parsed, tensors)]
    assert all(torch.equal(a, t) and a.dtype == t.dtype and a.is_leaf for a, t in zip(arrived, tensors))
    assert [tensor.requires_grad for tensor in arrived] == [True, False]


def test_more_than_a_header_describes_is_refused_where_it_is_computed() -> None:
    for tensors in ([torch.ones(1)] * 5, [torch.ones(1, 1, 1, 1, 1)], [torch.ones(1, dtype=torch.int64)]):
        with pytest.raises(BadInput, match="can travel"):
            pack_header(FIRST, [TensorHeader.of(tensor, None) for tensor in tensors])


@given(st.binary(min_size=HEADER_BYTES - 6, max_size=HEADER_BYTES - 6), st.integers(0, 255))
def test_any_bytes_are_a_header_or_refused(body: bytes, count: int) -> None:
    data = torch.frombuffer(bytearray(b"MPL1" + bytes([0, count]) + body), dtype=torch.uint8)
    try:
        parsed = parse_header(data, FIRST)
    except ValueError:
        return
    assert all(0 < header.size <= 1 << 32 for header in parsed)


def _header(*fields: int, magic: bytes = b"MPL1", kind: int = 0, micro_batch: int = 0) -> bytes:
    return (struct.pack("<4sBBI", magic, kind, 1, micro_batch) + struct.pack("<BBBB4I", *fields)).ljust(
        HEADER_BYTES, b"\0"
    )


NONSENSE = {
    _header(0, 0, 0, 1, 4, 0, 0, 0, magic=b"GET "): "no message of a pipeline",
    _header(0, 0, 0, 1, 4, 0, 0, 0, micro_batch=1): "the forward of micro-batch 2",
    _header(0, 0, 0, 1, 4, 0, 0, 0, kind=1): "the backward of micro-batch 1",
    _header(9, 0, 0, 1, 4, 0, 0, 0): "a tensor of unknown type or shape",
    _header(0, 0, 0, 4, 1 << 31, 1 << 31, 1 << 31, 4): f"a tensor of {1 << 97} bytes",
}


@pytest.mark.parametrize("header", NONSENSE, ids=[*NONSENSE.values()])
def test_nonsense_from_a_stage_is_an_error_with_its_machine(header: bytes) -> None:
    sender, receiver = queue_carriers(2)
    sender.send(1, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    with pytest.raises(RunFailed) as caught:
        StageRelay(receiver).evaluate(1, lambda index, arrived: 0.0)
    expected = f"machine-0: it sent {NONSENSE[header]} where the forward of micro-batch 1 belongs"
    assert caught.value.message == expected and "same version of Muster" in caught.value.hint


def test_a_gradient_of_another_shape_is_an_error_with_its_machine() -> None:
    first, last = queue_carriers(2)
    gradient = torch.ones(3)
    header = TensorHeader.of(gradient, None)
    for data in (pack_header(Work("backward", 0), [header]), header.encode(gradient)):
        last.send(0, data)
    with pytest.raises(RunFailed, match=r"machine-1: it sent gradients of shape \[3\] where \[2\] belongs"):
        StageRelay(first).train(1, lambda index, arrived: (torch.ones(2, requires_grad=True),))


def test_a_loss_without_trained_weights_is_an_error() -> None:
    with pytest.raises(RunFailed, match="depends on no weight"):
        StageRelay(queue_carriers(1)[0]).train(1, lambda index, arrived: torch.ones(()))


def test_a_sum_has_the_same_bits_on_all_holders_and_leaves_others_out() -> None:
    carriers = queue_carriers(4)
    values = [torch.randn(1000) * 10.0**stage for stage in range(4)]
    sums = side_by_side([partial(sum_among, carriers[s], (3, 0, 1), values[s]) for s in (0, 1, 3)])
    assert all(torch.equal(total, values[0] + values[1] + values[3]) for total in sums)
    assert carriers[2].traffic.bytes_sent == 0


@pytest.mark.parametrize("extra", [0, 1, 8])
def test_no_more_micro_batches_are_under_way_than_the_schedule_keeps(extra: int) -> None:
    under_way: list[list[int]] = [[], [], []]

    def run(carrier: QueueCarrier) -> None:
        counts = under_way[carrier.stage]

        def forward(_: int, arrived: tuple[torch.Tensor, ...]) -> object:
            counts.append(1)
            hidden = (arrived[0] if arrived else torch.ones(2)) * torch.ones(2, requires_grad=True)
            hidden.register_hook(lambda _: counts.append(-1))
            return hidden.sum() if carrier.stage == 2 else (hidden,)

        StageRelay(carrier, extra=extra).train(8, forward)

    side_by_side([partial(run, carrier) for carrier in queue_carriers(3)])
    peaks = [max(accumulate(counts)) for counts in under_way]
    assert peaks == [micro_batches_under_way(stage, 3, 8, extra) for stage in range(3)]


def test_a_step_that_fails_leaves_neither_activations_nor_threads() -> None:
    first, last = queue_carriers(2)
    hidden = torch.ones(2)
    for index in range(8):  # more than are received ahead
        header = TensorHeader.of(hidden, None)
        for data in (pack_header(Work("forward", index), [header]), header.encode(hidden)):
            first.send(1, data)
    kept: list[weakref.ref[torch.Tensor]] = []

    def forward(index: int, _: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if index:
            raise ValueError("no memory")
        loss = torch.ones(2, requires_grad=True).sum()
        kept.append(weakref.ref(loss))
        return loss

    before = set(threading.enumerate())
    relay = StageRelay(last)
    with pytest.raises(ValueError, match="no memory"):
        relay.train(8, forward)
    gc.collect()
    until(lambda: not set(threading.enumerate()) - before)
    assert [reference() for reference in kept] == [None]
