"""The overloads of torch's process groups become its options."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from training.exchange.torch_backend.arguments import InvalidArgument, check_root, options_of


def test_positions_are_known_by_their_types() -> None:
    options = options_of(dist.ReduceOptions, (2, dist.ReduceOp.MAX, timedelta(seconds=3)), {})
    assert (options.rootRank, options.reduceOp, options.timeout) == (2, dist.ReduceOp.MAX, timedelta(seconds=3))


@pytest.mark.parametrize(("positional", "named"), [((), {}), ((None,), {}), ((), {"opts": None, "timeout": None})])
def test_nothing_is_torchs_default(positional: tuple[object, ...], named: dict[str, object]) -> None:
    assert options_of(dist.AllreduceOptions, positional, named).reduceOp == dist.ReduceOp.SUM


def test_torchs_own_options_stay() -> None:
    options = dist.BroadcastOptions()
    assert options_of(dist.BroadcastOptions, (options,), {}) is options
    assert options_of(dist.BroadcastOptions, (), {"opts": options, "root": 1}) is options and options.rootRank == 1


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="AllreduceOptions has no root"):
        options_of(dist.AllreduceOptions, (), {"root": 1})


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_wrong_root_is_both_kinds_of_error(kind: type[Exception]) -> None:
    assert issubclass(InvalidArgument, kind)
    with pytest.raises(kind, match="muster: gather: invalid root rank: -1 of 2 members"):
        check_root("gather", -1, 2)
