"""ZeRO stage 1: the bits of per-step averaging, a part of the optimizer's state each, and parts that move."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from members import Member, Shapes, settings_of
from small_models import Watched, attached, in_a_group
from torch import nn

from profiles.errors import BadInput
from profiles.optimisation import TrainingSettings
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.exchange.base import SoloExchange
from training.hardware.device import Precision
from training.optimization.optimizers import build_optimizer
from training.strategies.allreduce import AllReduce
from training.strategies.base import Strategy, StrategyContext
from training.strategies.weights import flatten
from training.strategies.zero1 import StepHandshake, ZeRO1, assign_owners, opponent_of

STEPS, MOST = 4, 0.05
"""The norm is above that in all of them."""


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def samples(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(1 + (rank + step) % 3, 6, generator=generator)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - torch.sin(x.sum(1))).square().mean()


class Run:
    """A member that steps with AdamW and clips by the norm, as the trainer does."""

    def __init__(self, make: type[Strategy], exchange: Any, kind: str = "adamw", dtype: Any = None) -> None:
        self.model, self.exchange, self.warnings = net(), exchange, list[str]()
        self.optimizer = build_optimizer(self.model, TrainingSettings(optimizer=kind, learning_rate=0.05))
        self.precision = Precision(dtype, torch.device("cpu"))
        settings = StrategySettings(verify_interval=0)
        self.strategy = make(StrategyContext(settings, 100, 0, self.warnings.append))
        self.strategy.set_optimizer(self.optimizer)
        self.strategy.attach(self.model, exchange)
        self.norms: list[float | None] = []

    def step(self, number: int, most: float = 0.0, x: torch.Tensor | None = None, spoilt: float = 1.0) -> None:
        x = samples(number, self.exchange.rank) if x is None else x
        scale = self.precision.loss_scale
        self.strategy.begin_step(number, float(len(x)), scale)
        self.strategy.last_backward()
        if len(x):
            (loss(self.model, x) * (scale or 1.0) * spoilt).backward()
        self.strategy.gradients()
        parameters = list(self.model.parameters())
        norm = self.precision.clip(self.optimizer, parameters, most, self.strategy.gradient_norm)
        self.precision.step(self.optimizer, parameters)
        self.norms.append(None if norm is None else float(norm))
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.end_step()

    def weights(self) -> torch.Tensor:
        return flatten(self.model.parameters())

    def kept(self) -> int:
        """Return how many elements the optimizer keeps."""
        return sum(value.numel() for state in self.optimizer.state.values() for value in state.values() if value.dim())


def joint(size: int, most: float) -> Run:
    """Return one machine with the joint batch."""
    alone = Run(AllReduce, SoloExchange())
    for number in range(STEPS):
        alone.step(number, most, torch.cat([samples(number, rank) for rank in range(size)]))
    return alone


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [0.0, MOST], ids=["not clipped", "clipped"])
def test_the_steps_are_those_of_one_machine_with_the_joint_batch(size: int, most: float) -> None:
    def body(exchange: RoomExchange) -> Run:
        run = Run(ZeRO1, exchange)
        for number in range(STEPS):
            run.step(number, most)
        return run

    expected = joint(size, most)
    for run in in_a_group(size, body):
        torch.testing.assert_close(run.weights(), expected.weights(), rtol=1e-6, atol=1e-6)
        if most:
            assert run.norms == pytest.approx(expected.norms, rel=1e-5) and min(run.norms) > MOST


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor"])
def test_the_bits_are_those_of_per_step_averaging(kind: str) -> None:
    def body(exchange: RoomExchange, make: type[Strategy]) -> torch.Tensor:
        run = Run(make, exchange, kind)
        for number in range(STEPS):
            run.step(number)
        return run.weights()

    found = in_a_group(3, lambda exchange: body(exchange, ZeRO1))
    expected = in_a_group(3, lambda exchange: body(exchange, AllReduce))[0]
    assert all(torch.equal(weights, expected) for weights in found)


def test_the_optimizer_s_state_is_divided() -> None:
    def body(exchange: RoomExchange) -> int:
        run = Run(ZeRO1, exchange)
        for number in range(2):
            run.step(number)
        return run.kept()

    whole = 2 * sum(parameter.numel() for parameter in net().parameters())
    kept = in_a_group(2, body)
    assert sum(kept) == whole and max(kept) <= whole * 0.55
    assert max(in_a_group(4, body)) == 2 * 96  # of the largest parameter, which is never cut


def test_a_member_without_samples_and_one_without_weights_take_part() -> None:
    def body(exchange: RoomExchange) -> torch.Tensor:
        run = Run(ZeRO1, exchange)
        for number in range(2):
            run.step(number, MOST, samples(number, exchange.rank)[: 0 if exchange.rank == 1 else None])
        return run.weights()

    size = 9  # of eight parameters
    alone = Run(AllReduce, SoloExchange())
    for number in range(2):
        alone.step(number, MOST, torch.cat([samples(number, rank) for rank in range(size) if rank != 1]))
    for weights in in_a_group(size, body):
        torch.testing.assert_close(weights, alone.weights(), rtol=1e-6, atol=1e-6)


def test_a_parameter_that_nobody_used_is_left_alone() -> None:
    def body(exchange: RoomExchange) -> Any:
        model = nn.ParameterDict({"used": nn.Parameter(torch.ones(4)), "unused": nn.Parameter(torch.ones(4))})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        strategy = attached(ZeRO1, exchange, model, [])
        strategy.begin_step(0, 1.0)
        model["used"].sum().backward()
        strategy.gradients()
        optimizer.step()
        strategy.end_step()
        return model["used"].tolist(), model["unused"].tolist()

    (used, unused), other = in_a_group(2, body)
    assert unused == [1.0] * 4 and used == pytest.approx([0.85] * 4) and other == (used, unused)


def test_a_gradient_that_is_not_finite_is_left_out_and_named() -> None:
    def body(exchange: RoomExchange) -> Any:
        run = Run(ZeRO1, exchange)
        run.step(0, MOST, spoilt=torch.inf if exchange.rank == 1 else 1.0)
        return run.weights(), run.warnings

    alone = Run(AllReduce, SoloExchange())
    alone.step(0, MOST, samples(0, 0))
    (first, quiet), (second, warnings) = in_a_group(2, body)
    torch.testing.assert_close(first, alone.weights(), rtol=1e-6, atol=1e-6)
    assert torch.equal(first, second) and quiet == []
    assert len(warnings) == 1 and warnings[0].startswith("step 1: the gradient of ")


def test_an_overflow_of_one_member_makes_all_pass_over_the_step_and_lower_their_scale() -> None:
    def body(exchange: RoomExchange) -> Any:
        run, found = Run(ZeRO1, exchange, dtype=torch.float16), []
        for number in range(3):
            before = run.weights()
            run.step(number, MOST, spoilt=torch.inf if exchange.rank == 1 and number == 1 else 1.0)
            found.append((run.precision.loss_scale, torch.equal(before, run.weights())))
        return found, run.warnings, run.norms

    for found, warnings, norms in in_a_group(2, body):
        assert found == [(65536.0, False), (32768.0, True), (32768.0, False)] and warnings == []
        assert norms == pytest.approx(joint(2, MOST).norms[:1] + norms[1:], rel=1e-5)


# ------------------------------------------------------------------------------------------------------ who owns what


def said(owned: dict[int, set[int]], newcomers: tuple[int, ...] = ()) -> dict[int, StepHandshake]:
    return {rank: StepHandshake(1.0, rank not in newcomers, frozenset(parts)) for rank, parts in owned.items()}


def test_parts_are_even_and_move_only_where_they_must() -> None:
    sizes = [40, 30, 20, 10, 10, 10]
    fresh = assign_owners(sizes, said({0: set(), 1: set(), 2: set()}, newcomers=(0, 1, 2)))
    loads = [sum(size for size, owner in zip(sizes, fresh) if owner == rank) for rank in range(3)]
    assert loads == [40, 40, 40]
    parts = {rank: {i for i, owner in enumerate(fresh) if owner == rank} for rank in range(3)}
    assert assign_owners(sizes, said(parts)) == fresh
    without = assign_owners(sizes, said({0: parts[0], 2: parts[2]}))
    assert [owner for owner, before in zip(without, fresh) if before != 1] == [o for o in fresh if o != 1]
    joined = assign_owners(sizes, said({**parts, 3: set()}, newcomers=(3,)))
    assert 3 in joined and sum(one != other for one, other in zip(joined, fresh)) <= 2


@pytest.mark.parametrize("size", range(1, 10))
def test_everybody_meets_everybody_once(size: int) -> None:
    met = []
    for number in range(size + size % 2 - 1):
        pairs = [opponent_of(place, number, size) for place in range(size)]
        assert all(pairs[other] == place for place, other in enumerate(pairs))
        met += [(place, other) for place, other in enumerate(pairs) if place < other]
    assert sorted(met) == list(combinations(range(size), 2))


@pytest.mark.parametrize("said", [b"", b"\0" * 9, StepHandshake(-1.0, True, frozenset()).to_bytes(8), b"\xff" * 10])
def test_a_greeting_that_is_none_is_not_believed(said: bytes) -> None:
    assert StepHandshake.read(said, 8) is None


def test_a_newcomer_gets_the_state_of_what_it_owns() -> None:
    def body(exchange: RoomExchange) -> Any:
        if exchange.is_newcomer:
            member = Member(settings_of("zero1"), exchange, joining=exchange.fetch_state())
        else:
            member = Member(settings_of("zero1"), exchange)
            member.until(5)
            if exchange.rank == 0:
                member.admit()
        before = {p: s["momentum_buffer"].clone() for p, s in member.optimizer.state.items()}
        member.until(6)
        names = {p: n for n, p in member.model.named_parameters()}
        return {names[p] for p in before}, {names[p] for p in member.optimizer.state}, member.warnings, member.hash()

    (_, first_after, *one), (_, second_after, *two), (_, third_after, *three) = in_a_group(3, body, newcomers=1)
    assert one[0] == two[0] == three[0] == [] and one[1] == two[1] == three[1]
    assert third_after and not first_after & second_after and not third_after & (first_after | second_after)
    assert first_after | second_after | third_after == {name for name, _ in Shapes().named_parameters()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_that_moves_is_the_state_of_before(kind: str) -> None:
    def body(exchange: RoomExchange, moves: bool) -> Any:
        run, kept = Run(ZeRO1, exchange, kind), []
        for number in range(STEPS):
            if moves and number in (0, 2):  # all belongs to the first, until the second comes as a newcomer does
                owned = [] if exchange.rank else list(range(6))
                run.strategy.load({}, {"owned": owned, "took_part": number == 0 or exchange.rank == 0})
            run.step(number)
            kept.append(run.kept())
        return run.weights(), kept, run.warnings

    (weights, *_), _ = in_a_group(2, lambda exchange: body(exchange, moves=False))
    (first, one, quiet), (second, other, silent) = in_a_group(2, lambda exchange: body(exchange, moves=True))
    assert torch.equal(first, weights) and torch.equal(second, weights) and quiet == silent == []
    assert other[:2] == [0, 0] and one[2] + other[2] == one[1] and 0.2 * one[1] < other[2] < 0.8 * one[1]


def test_what_is_lost_with_a_member_begins_anew_and_is_told() -> None:
    def body(exchange: RoomExchange) -> Any:
        run = Run(ZeRO1, exchange)
        for number in range(STEPS):
            if number == 2 and exchange.rank == 1:
                exchange.room.leave(1)
                return None
            run.step(number, MOST)
        return run.weights(), run.warnings, run.kept(), run.strategy.members

    first, _, third = in_a_group(3, body)
    assert torch.equal(first[0], third[0]) and first[3] == third[3] == (0, 2)
    lines = first[1] + third[1]
    assert lines and all("begins anew here" in line and line.startswith("step 3: ") for line in lines)
    assert first[2] + third[2] == 2 * sum(parameter.numel() for parameter in net().parameters())


def test_the_part_of_an_owner_that_is_lost_in_a_step_makes_none_in_it() -> None:
    def body(exchange: RoomExchange) -> Any:
        run, after = Run(ZeRO1, exchange), []
        for number in range(STEPS):
            if number == 2 and exchange.rank == 1:
                run.strategy.begin_step(2, 1.0)
                exchange.room.leave(1)
                return sorted(run.strategy.state()["owned"])
            run.step(number)
            after.append([parameter.detach().clone() for parameter in run.model.parameters()])
        return after, run.warnings

    (first, one), owned, (third, other) = in_a_group(3, body)
    for ours, theirs in zip(first, third):
        assert all(map(torch.equal, ours, theirs))
    stood = [index for index, (was, after) in enumerate(zip(first[1], first[2])) if torch.equal(was, after)]
    assert stood == owned and len(first) == STEPS
    assert one + other and all(line.startswith("step 4: the optimizer's state of") for line in one + other)
    assert not any(map(torch.equal, first[2], first[3]))


def test_the_bytes_are_those_of_reduce_scatter_and_all_gather() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.zeros(5000)) for _ in range(8)])

    def body(exchange: RoomExchange) -> int:
        watched, model = Watched(exchange), Wide()
        strategy = attached(ZeRO1, watched, model, [])
        for number in range(3):
            strategy.begin_step(number, 1.0)
            sum(part.sum() for part in model.parts).backward()
            strategy.gradients()
            strategy.end_step()
        return sum(size * ((len(group) or 4) - 1) for group, size in watched.given)

    for sent in in_a_group(4, body):
        assert sent == pytest.approx(3 * 2 * 3 / 4 * 40_000 * 4, rel=0.01)


def test_a_part_of_more_than_a_payload_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.strategies.zero1.MAX_GATHER_BYTES", 100)

    def body(exchange: RoomExchange) -> torch.Tensor:
        run = Run(ZeRO1, exchange)
        for number in range(STEPS):
            run.step(number, MOST)
        return run.weights()

    for weights in in_a_group(3, body):
        torch.testing.assert_close(weights, joint(3, MOST).weights(), rtol=1e-6, atol=1e-6)


def test_a_codec_that_would_spoil_weights_is_refused() -> None:
    with pytest.raises(BadInput, match="half of what it sends are the weights"):
        ZeRO1(StrategyContext(StrategySettings(codec="bf16"), 100, 0))
    assert ZeRO1.costs is not None and ZeRO1.costs.exact
