"""Results that are kept for others, and what is handed over: whatever comes, it is one or it is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.exchange.base import Contribution, ExchangeError
from training.exchange.codecs import EncodedVector, codec_by_name
from training.exchange.mean.mesh_operations import MeshGather, MeshMean, Meter
from training.exchange.mean.operation_log import OperationLog
from training.exchange.mean.outcomes import OperationResult, apply_outcome
from training.exchange.residuals import MeanResiduals

CODECS = ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.5"]


def gather(number: int) -> MeshGather:
    return MeshGather(number, f"g:{number}", b"own", Meter())


def gathered(*ranks: int, size: int = 1) -> OperationResult:
    return OperationResult(ranks, tuple((rank, rank, memoryview(bytes(size))) for rank in ranks))


def test_results_are_in_order_however_operations_end() -> None:
    operation_log = OperationLog(0)
    for number in (1, 2, 3):
        assert operation_log.start(gather(number))
    operation_log.settle(2, gathered(0, 1))
    assert (operation_log.started, operation_log.full) == (3, 0)
    operation_log.settle(1, gathered(0, 1))
    assert operation_log.full == 2 and [one.number for one in operation_log.pending(0)] == [3]


def test_a_result_that_others_had_long_ago_is_there_when_the_operation_is_started() -> None:
    operation_log = OperationLog(0)
    operation_log.adopt(1, gathered(1, 2))
    operation = gather(1)
    assert not operation_log.start(operation) and operation.wait(1) == {1: b"\0", 2: b"\0"}
    assert operation_log.members == (1, 2)


def test_what_everybody_has_is_forgotten_and_what_somebody_needs_is_kept() -> None:
    operation_log = OperationLog(0)
    for number in (1, 2):
        operation_log.start(gather(number))
        operation_log.settle(number, gathered(0, 1))
    operation_log.adopt(3, gathered(1))
    operation_log.forget(1)
    assert operation_log.dropped == 1 and [number for number, *_ in operation_log.held(1).results] == [2, 3]
    operation_log.forget(3)
    assert operation_log.dropped == 2, "operation 3 was not started here"
    assert [number for number, *_ in operation_log.held(0).results] == [3]


def test_what_is_kept_for_others_has_a_bound() -> None:
    operation_log = OperationLog(0)
    for number in range(1, 7):
        operation_log.start(gather(number))
        operation_log.settle(number, gathered(0, size=20 << 20))
        operation_log.forget(0)
    assert operation_log.dropped == 3


def test_a_result_that_cannot_be_read_spoils_no_contribution() -> None:
    values = torch.arange(4.0)
    given = Contribution("x", values, 1.0, codec_by_name("int8"))
    operation = MeshMean(1, given, Meter(), MeanResiduals(), {})
    operation_log = OperationLog(0)
    operation_log.start(operation)
    with pytest.raises(ExchangeError, match="x"):
        operation_log.adopt(1, OperationResult((0,), ((0, 3, memoryview(bytearray(40))),)))
    assert torch.equal(operation.contribution.values, values) and not operation.done()


HEADS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["members", "parts", "x"]), inner),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.one_of(st.binary(max_size=60), HEADS.map(lambda head: json.dumps(head).encode() + b"\nabc")))
def test_any_bytes_are_an_outcome_or_refused(data: bytes) -> None:
    try:
        outcome = OperationResult.from_bytes(bytearray(data))
    except ExchangeError:
        return
    assert OperationResult.from_bytes(bytearray(outcome.to_bytes())) == outcome


@settings(max_examples=80, deadline=None)
@given(
    codec_name=st.sampled_from(CODECS),
    members=st.sets(st.integers(0, 20), min_size=1, max_size=9),
    cuts=st.lists(st.integers(-1, 70), max_size=3),
    message=st.binary(max_size=300),
    is_encoded=st.booleans(),
)
def test_any_outcome_is_that_of_a_mean_or_refused(
    codec_name: str, members: set[int], cuts: list[int], message: bytes, is_encoded: bool
) -> None:
    own = Contribution("x:1", torch.ones(64), 1.0, codec_by_name(codec_name), b"\1")
    into = EncodedVector(own.codec, 64, torch.device("cpu")) if is_encoded and own.codec.planes(1) else None
    bounds = [0, *cuts, 64]
    parts = tuple((a, b, memoryview(bytearray(message))) for a, b in itertools.pairwise(bounds))
    try:
        result = apply_outcome(own, 0, OperationResult(tuple(sorted(members)), parts), into=into)
    except ExchangeError:
        return
    assert result.mean.shape == (64,) and len(result.flags) == 1 and 0.0 <= result.weight < float("inf")
    assert set(result.refused) <= members
