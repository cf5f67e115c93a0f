"""PowerSGD against its paper, and against the hook of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract import CHECKS
from members import settings_of
from small_models import attached, in_a_group, step
from torch import nn

from profiles.errors import BadInput
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.strategies.allreduce import AllReduce
from training.strategies.base import Strategy, StrategyContext
from training.strategies.compressors.powersgd import orthonormal, product
from training.strategies.costs import RunSpec
from training.strategies.registry import cost_model

WEIGHTS = (1.0, 2.0, 5.0)
SHAPES = {"matrix": (12, 20), "convolution": (10, 4, 1, 3), "vector": (7,), "scalar": ()}


class Model(nn.Module):
    """A tensor of every kind; its loss has the gradient that is wanted."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def loss(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(getattr(self, name) * one).sum() for name, one in gradients.items()]).sum()


def gradients(rank: int, number: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(100 * rank + number)
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def powersgd(member: RoomExchange, model: nn.Module, **options: Any) -> Strategy:
    own = {"compressor": "powersgd", "powersgd_rank": 2, "powersgd_start": 0, "bucket_mb": 0.0012} | options
    return attached(AllReduce, member, model, [], owned={"allreduce": own})


def mean_of(strategy: Strategy, model: Model, number: int, weight: float, given: dict[str, torch.Tensor]) -> Any:
    """Make one step; return the mean gradients by name."""
    model.zero_grad()
    strategy.begin_step(number, weight)
    strategy.last_backward()
    if given:
        model.loss(given).backward()
    strategy.gradients()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def first_factors(strategy: Strategy, model: Model) -> dict[str, torch.Tensor]:
    """Return a copy of Q by the name of its tensor: those of two sizes are told apart by it."""
    found = {}
    for q in strategy.newcomer_tensors().values():
        name = next(n for n, p in model.named_parameters() if p.dim() > 1 and p[0].numel() == q.shape[0])
        found[name] = q.clone()
    return found


def reference(q: dict[str, torch.Tensor], rounds: int, rank_of: Any) -> list[dict[str, torch.Tensor]]:
    """Algorithms 1 and 2 of the paper for three members, each with its share of the mean; vectors are averaged.

    Args:
        q: of the matrices to begin with.
        rank_of: the gradients of a member in a round.
    """
    shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    errors: list[dict[str, Any]] = [dict.fromkeys(SHAPES, 0.0) for _ in WEIGHTS]
    applied = []
    for number in range(rounds):
        given = [rank_of(member, number) for member in range(len(WEIGHTS))]
        found = {}
        for name, shape in SHAPES.items():
            if name not in q:
                found[name] = sum(share * one[name] for share, one in zip(shares, given))
                continue
            deltas = [(one[name] + error[name]).reshape(shape[0], -1) for one, error in zip(given, errors)]
            p = sum(share * (delta @ q[name]) for share, delta in zip(shares, deltas))
            p = torch.linalg.qr(p).Q
            q[name] = sum(share * (delta.T @ p) for share, delta in zip(shares, deltas))
            low_rank = p @ q[name].T
            for error, delta in zip(errors, deltas):
                error[name] = (delta - low_rank).reshape(shape)
            found[name] = low_rank.reshape(shape)
        applied.append(found)
    return applied


def test_it_is_the_papers_algorithm() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model()
        strategy = powersgd(member, model)
        before = first_factors(strategy, model)
        weight = WEIGHTS[member.rank]
        return before, [mean_of(strategy, model, n, weight, gradients(member.rank, n)) for n in range(3)]

    (before, found), *others = in_a_group(3, body)
    assert set(before) == {"matrix", "convolution"}
    for theirs in others:
        for own, other in zip(found, theirs[1], strict=True):
            assert all(torch.equal(own[name], other[name]) for name in own)
    for number, expected in enumerate(reference(before, 3, gradients)):
        torch.testing.assert_close(found[number], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's hook then waits for a CUDA tensor")
def test_it_has_the_numbers_of_pytorchs_hook() -> None:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    from training.exchange.torch_backend import process_group

    class Bucket:
        """Of gradients, as the hook is given it."""

        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        def buffer(self) -> torch.Tensor:
            return self.values

        def gradients(self) -> list[torch.Tensor]:
            return [self.values.view(12, 20)]

        def index(self) -> int:
            return 0

        def is_last(self) -> bool:
            return True

    shapes = {"matrix": (12, 20)}
    given = [gradients(0, number, shapes) for number in range(4)]
    # Not gloo: the hook's callbacks may drop the last reference to a group in its own thread, which aborts the process.
    dist.init_process_group(process_group.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
        state.iter = 2
        theirs = [hook.powerSGD_hook(state, Bucket(given[0]["matrix"].reshape(-1).clone())).wait().view(12, 20)]
        q = state.q_memory_dict[0].view(20, 2).clone()
        error = state.error_dict[0].clone()
        for one in given[1:]:
            theirs.append(hook.powerSGD_hook(state, Bucket(one["matrix"].reshape(-1).clone())).wait().view(12, 20))
    finally:
        dist.destroy_process_group()

    def body(member: RoomExchange) -> Any:
        model = Model(shapes)
        strategy = powersgd(member, model)
        (name,) = strategy.newcomer_tensors()
        strategy.load({name: q, "powersgd/error/0": error}, {})
        return [mean_of(strategy, model, number, 1.0, given[number])["matrix"] for number in range(1, 4)]

    for found in in_a_group(1, body):
        torch.testing.assert_close(torch.stack(found), torch.stack(theirs[1:]).detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("start", [0, 2])
def test_a_full_rank_and_the_steps_before_the_first_give_the_exact_mean(start: int) -> None:
    def body(member: RoomExchange) -> Any:
        model = Model()
        strategy = powersgd(member, model, powersgd_rank=2 if start else 12, powersgd_start=start)
        weight = WEIGHTS[member.rank]
        return [mean_of(strategy, model, n, weight, gradients(member.rank, n)) for n in range(3)]

    for found in in_a_group(3, body):
        exact = []
        for number, mean in enumerate(found):
            given = [gradients(rank, number) for rank in range(3)]
            true = {n: sum(w * one[n] for w, one in zip(WEIGHTS, given)) / sum(WEIGHTS) for n in SHAPES}
            exact.append(torch.allclose(mean["matrix"], true["matrix"], rtol=1e-5, atol=1e-6))
            torch.testing.assert_close(mean["vector"], true["vector"])
        assert exact == [True, True, not start]


def test_factors_of_a_low_rank_gradient_give_the_exact_mean() -> None:
    given = [a[:, None] * b for a, b in zip(torch.randn(3, 12), torch.randn(3, 20))]

    def body(member: RoomExchange) -> Any:
        model = Model({"matrix": (12, 20)})
        strategy = powersgd(member, model, powersgd_rank=4)
        return [mean_of(strategy, model, n, 1.0, {"matrix": given[member.rank]})["matrix"] for n in range(3)]

    for found in in_a_group(3, body):
        for mean in found:
            torch.testing.assert_close(mean, sum(given) / 3, rtol=1e-4, atol=1e-5)


LARGE = {"matrix": (60, 80), "other": (40, 50), "vector": (30,)}


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_the_bytes_are_the_theorys_whoever_is_late_or_has_no_gradient(codec: str) -> None:
    def late(name: str) -> tuple[int, ...]:
        return (1,) if name in ("grad/2/0", "grad/3/0/q", "grad/4/1/q") else ()

    def body(member: RoomExchange) -> Any:
        model, found = Model(LARGE), []
        own = {"compressor": "powersgd", "powersgd_rank": 3, "powersgd_start": 0, "bucket_mb": 0.02}
        strategy = attached(AllReduce, member, model, [], codec=codec, owned={"allreduce": own})
        for number in range(6):
            given = gradients(member.rank, number, LARGE)
            if number == 1:
                given.pop("other")
            if member.rank == 2 and number == 5:
                given = {}
            before = member.traffic.bytes_sent
            found.append(mean_of(strategy, model, number, 1.0 if given else 0.0, given))
            theory = (3 * (60 + 80 + 40 + 50) + 30) * (4 if codec == "fp32" else 2)
            assert member.traffic.bytes_sent - before == pytest.approx(theory, rel=0.03)
            assert (found[-1]["other"] is None) == (number == 1)
        return found

    first, *others = in_a_group(3, body, late)
    for mine, *theirs in zip(first, *others, strict=True):
        for name, one in mine.items():
            assert all(other[name] is None if one is None else torch.equal(one, other[name]) for other in theirs)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_error_feedback_conserves_the_sum(codec: str) -> None:
    def body(member: RoomExchange) -> Any:
        model, weight = Model(LARGE), WEIGHTS[member.rank]
        own = {"compressor": "powersgd", "powersgd_rank": 3, "powersgd_start": 2, "bucket_mb": 1.0}
        strategy = attached(AllReduce, member, model, [], codec=codec, owned={"allreduce": own})
        applied = [mean_of(strategy, model, n, weight, gradients(member.rank, n, LARGE))["matrix"] for n in range(6)]
        return sum(applied[2:]), strategy.tensors()["powersgd/error/0"][30 + 2000 :].view(60, 80)

    found = in_a_group(3, body)
    share = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    meant = sum(share[r] * gradients(r, n, LARGE)["matrix"] for r in range(3) for n in range(2, 6))
    left = sum(share[r] * error for r, (_, error) in enumerate(found))
    torch.testing.assert_close(found[0][0] + left, meant, rtol=1e-5, atol=1e-5)


def test_what_comes_late_or_is_not_finite_or_nobody_uses_is_in_a_later_mean() -> None:
    shapes = {"matrix": (12, 20), "vector": (7,)}

    def run(spoilt: str) -> list[Any]:
        def late(name: str) -> tuple[int, ...]:
            return (1,) if spoilt == "late" and name in ("grad/0/0", "grad/0/0/q") else ()

        def body(member: RoomExchange) -> Any:
            model = Model(shapes)
            strategy = powersgd(member, model, bucket_mb=1.0)
            given = gradients(member.rank, 0, shapes)
            if spoilt == "not finite" and member.rank == 1:
                given["matrix"][3, 4] = torch.nan
            if spoilt == "unused":
                given.pop("matrix")
            weight = 0.0 if spoilt == "weight 0" and member.rank == 1 else 1.0
            mean_of(strategy, model, 0, weight, given)
            return given, strategy.tensors().get("powersgd/error/0")

        return in_a_group(2, body, late)

    for spoilt in ("late", "weight 0"):
        given, error = run(spoilt)[1]
        torch.testing.assert_close(error, torch.cat([given["vector"], given["matrix"].reshape(-1)]))
    assert run("not finite")[1][1] is None  # as it was before
    for _, error in run("unused"):
        assert not bool(error.any())  # nothing was given


def test_a_gradient_of_zero_in_one_step_does_not_end_the_compression() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model({"matrix": (12, 20)})
        strategy = powersgd(member, model)
        mean_of(strategy, model, 0, 1.0, {"matrix": torch.zeros(12, 20)})
        return [mean_of(strategy, model, n, 1.0, gradients(member.rank, n, {"matrix": (12, 20)})) for n in (1, 2)]

    for first, second in in_a_group(2, body):
        assert torch.linalg.matrix_rank(first["matrix"]) == torch.linalg.matrix_rank(second["matrix"]) == 2


def test_an_overflow_of_one_member_leaves_everything_as_it_was() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model({"matrix": (12, 20)})
        strategy = powersgd(member, model)
        found = []
        for number in range(2):
            given = gradients(member.rank, number, {"matrix": (12, 20)})["matrix"]
            if number and member.rank:
                given[0, 0] = torch.inf
            model.zero_grad()
            step(strategy, model.loss({"matrix": given}), number, 1024.0)
            found.append({name: one.clone() for name, one in strategy.tensors().items()})
        return found, bool(model.matrix.grad.isinf().all())

    for (before, after), passed_over in in_a_group(2, body):
        assert passed_over and before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [0.0002, 4.0])
@pytest.mark.parametrize("check", CHECKS[:6], ids=lambda check: check.__name__)
def test_it_keeps_the_contract_of_strategies(check: Any, bucket: float) -> None:
    own = {"compressor": "powersgd", "powersgd_rank": 1, "powersgd_start": 3, "bucket_mb": bucket}
    check(settings_of("allreduce", owned={"allreduce": own}))


def test_orthonormal_columns_and_their_product() -> None:
    dependent = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    dependent[:, 2] = dependent[:, 0] - 2 * dependent[:, 1]
    dependent[:, 3] = 0
    for matrix in (dependent, dependent * 1e-30, torch.zeros(5, 5)):
        basis = orthonormal(matrix, 1)
        torch.testing.assert_close(basis.T @ basis, torch.eye(5), atol=1e-6, rtol=0)
        torch.testing.assert_close(basis @ (basis.T @ matrix), matrix, rtol=1e-4, atol=float(matrix.abs().max()) * 1e-6)
    p, q = torch.randn(9, 3), torch.randn(4, 3)
    torch.testing.assert_close(product(p, q), p @ q.T)


@pytest.mark.parametrize(
    ("more", "says"), [({"codec": "int8"}, "codec = int8"), ({"error_feedback": True}, "error_feedback")]
)
def test_what_compresses_twice_is_refused(more: dict[str, Any], says: str) -> None:
    settings = StrategySettings(owned={"allreduce": {"compressor": "powersgd"}}, **more)
    with pytest.raises(BadInput, match=says):
        AllReduce(StrategyContext(settings, 100, 0))


def test_its_costs_follow_its_rank_and_it_is_not_taken_unasked() -> None:
    def costs(rank: int) -> Any:
        own = {"compressor": "powersgd", "powersgd_rank": rank}
        return cost_model("allreduce", StrategySettings(owned={"allreduce": own}))

    low, high, plain = costs(2), costs(8), cost_model("allreduce", StrategySettings())
    size = 37_000_000
    assert low.elements(size) < high.elements(size) < size // 30 and plain.elements(size) == size
    assert "only where you ask" in low.why_not_ranked(RunSpec(1000)) and not plain.why_not_ranked(RunSpec(1000))
    assert plain.exact and not low.exact
    layers, width = 9, 585  # such a transformer: 37 M
    shapes = [(width, width)] * 4 * layers + [(width, 4 * width)] * 2 * layers
    vectors = 13 * width * layers
    assert low.elements(size) == pytest.approx(sum(2 * (r + c) for r, c in shapes) + vectors, rel=0.03)
