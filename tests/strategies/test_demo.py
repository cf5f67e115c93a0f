"""DeMo against its equations, for tensors of any shape; what it sends; and the optimizer that it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import attached, in_a_group
from torch import nn

from profiles.errors import BadInput, RunFailed
from profiles.optimisation import TrainingSettings
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from tests.training.toy_task import ToyTask, toy_plan
from training.exchange.base import ExchangeError, SoloExchange
from training.loop.trainer import Trainer
from training.optimization.optimizers import plain_steps, set_learning_rate
from training.records.events import StepEvent
from training.run.orders import Control
from training.strategies.demo import Demo, DemoOptions
from training.strategies.parts.cosine_transform import Chunks, signs, transform

SHAPES = ((20, 13), (6, 3, 2, 2), (17,), (), (1, 5), (0, 4))
RATE, DECAY = 0.01, 0.1


def rate(step: int) -> float:
    """The learning rate, which differs from step to step."""
    return RATE / (1 + step)


class Model(nn.Module):
    """Weights of matrices, a convolution, a vector of prime length, one alone, and none."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.ones(shape) for shape in shapes)


def demo(member: Any, model: nn.Module, warnings: list[str] | None = None, **own: Any) -> Demo:
    more = {name: own.pop(name) for name in ("codec", "verify_interval") if name in own}
    found = attached(Demo, member, model, [] if warnings is None else warnings, owned={"demo": own}, **more)
    assert isinstance(found, Demo)
    found.set_optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    return found


def gradient(rank: int, step: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    return torch.randn(shape, generator=chance)


def trained(member: Any, steps: int, weights: tuple[float, ...] = (1.0, 2.0, 3.0), **own: Any) -> list[torch.Tensor]:
    model = Model()
    strategy = demo(member, model, **own)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)
    strategy.set_optimizer(optimizer)
    for step in range(steps):
        set_learning_rate(optimizer, rate(step))
        strategy.begin_step(step, weights[member.rank])
        for number, parameter in enumerate(model.all):
            parameter.grad = gradient(member.rank, step, number, tuple(parameter.shape))
        strategy.gradients()
        optimizer.step()
        strategy.end_step()
    return [parameter.detach() for parameter in model.all]


# ------------------------------------------------------------------------------ the reference, from the equations alone


def cosines(size: int) -> np.ndarray[Any, Any]:
    """The DCT-II by its definition."""
    rows = [[math.cos(math.pi * (2 * n + 1) * k / (2 * size)) for n in range(size)] for k in range(size)]
    return np.array([[math.sqrt((1 if k == 0 else 2) / size) * c for c in row] for k, row in enumerate(rows)])


def reference(shape: tuple[int, ...], number: int, steps: int, counts: tuple[float, ...], own: Any) -> Any:
    """What all members hold of one tensor, in fp64, block by block."""
    matrix = shape if len(shape) == 2 else (shape[0], math.prod(shape[1:])) if shape[1:] else (1, math.prod(shape))
    height, width = min(own.chunk, matrix[0]), min(own.chunk, matrix[1])
    theta, momenta = np.ones(matrix), [np.zeros(matrix) for _ in counts]
    left, right = cosines(height), cosines(width)
    for step in range(steps):
        for rank, (momentum, count) in enumerate(zip(momenta, counts)):
            momentum *= own.decay
            momentum += rate(step) * count * gradient(rank, step, number, shape).double().numpy().reshape(matrix)
        for top in range(0, matrix[0], height):
            for first in range(0, matrix[1], width):
                where = np.s_[top : top + height, first : first + width]
                total, senders = np.zeros((height, width)), np.zeros((height, width))
                for momentum in momenta:
                    block = np.zeros((height, width))
                    block[: momentum[where].shape[0], : momentum[where].shape[1]] = momentum[where]
                    coefficients = left @ block @ right.T
                    least = np.sort(np.abs(coefficients).ravel())[-min(own.topk, coefficients.size)]
                    kept = np.where(np.abs(coefficients) >= least, coefficients, 0)
                    total += kept
                    senders += kept != 0
                    rows, columns = momentum[where].shape
                    momentum[where] -= (left.T @ kept @ right)[:rows, :columns]
                update = left.T @ (total / np.maximum(senders, 1)) @ right
                update[np.abs(update) < 1e-11] = 0
                rows, columns = theta[where].shape
                theta[where] *= 1 - rate(step) * DECAY
                theta[where] -= rate(step) * np.sign(update)[:rows, :columns]
    return torch.from_numpy(theta).float().view(shape)


@pytest.mark.parametrize(
    "own",
    [{"chunk": 8, "topk": 3}, {"chunk": 5, "topk": 1, "decay": 0.5}, {"chunk": 64, "topk": 100, "decay": 0.0}],
)
@pytest.mark.parametrize("members", [1, 3])
def test_members_hold_what_the_paper_says(members: int, own: dict[str, Any]) -> None:
    found = in_a_group(members, lambda member: trained(member, 3, **own))
    options, counts = DemoOptions.model_validate(own), (1.0, 2.0, 3.0)[:members]
    for number, shape in enumerate(SHAPES[:-1]):
        expected = reference(shape, number, 3, counts, options)
        torch.testing.assert_close(found[0][number], expected, rtol=1e-6, atol=1e-6)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_one_member_alone_trains_as_one_that_is_left() -> None:
    alone = trained(SoloExchange(), 3, chunk=8, topk=3)
    (left,) = in_a_group(1, lambda member: trained(member, 3, chunk=8, topk=3))
    assert all(map(torch.equal, alone, left))


# --------------------------------------------------------------------------------------------------------- transform


@pytest.mark.parametrize("size", [1, 2, 5, 64, 256])
def test_the_transform_is_the_orthonormal_cosine_transform(size: int) -> None:
    expected = torch.from_numpy(cosines(size))
    torch.testing.assert_close(transform(size), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform(size) @ transform(size).T, torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("shape", [*SHAPES[:-1], (64, 64), (130, 70), (3, 129), (97,)])
def test_tensors_of_any_shape_are_cut_and_joined_again(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    for chunk in (1, 8, 64):
        chunks = Chunks.of(shape, chunk)
        blocks = chunks.cut(tensor)
        assert blocks.shape == (chunks.number, chunks.height, chunks.width)
        assert torch.equal(chunks.joined(blocks).reshape(shape), tensor)
        again = chunks.joined(chunks.decoded(chunks.encoded(blocks))).reshape(shape)
        torch.testing.assert_close(again, tensor, rtol=1e-5, atol=1e-5)


def test_signs_are_those_of_whole_numbers_so_that_all_processors_agree() -> None:
    coefficients = torch.randn(50, 64 * 48) * torch.logspace(-20, 20, 50)[:, None]
    coefficients[7] = 0.0
    found = signs(coefficients, 64, 48)
    peak = coefficients.abs().amax(1, keepdim=True)
    power = 2.0 ** torch.frexp(peak).exponent.double()
    whole = (coefficients.double() / power * 2**20).round().nan_to_num().long().view(-1, 64, 48)
    left, right = ((transform(size) * 2**20).round().long() for size in (64, 48))
    half = ((left.T @ whole).double() / 2**20).round().long()
    assert torch.equal(found.long(), (half @ right).sign())
    plain = transform(64).T @ coefficients.double().view(-1, 64, 48) @ transform(48)
    differ = found.double() != plain.sign()
    assert differ.sum() < 1e-4 * differ.numel()


def test_no_entry_of_a_transform_is_near_where_processors_round_otherwise() -> None:
    for size in range(1, 257):
        scaled = transform(size) * 2**20
        assert ((scaled - scaled.floor()) - 0.5).abs().min() > 1e-6


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "width"), [("fp32", 4), ("bf16", 2)])
def test_places_of_16_bits_and_values_travel(codec: str, width: int) -> None:
    def body(member: RoomExchange) -> int:
        model = nn.Linear(640, 1280, bias=False)
        strategy = demo(member, model, codec=codec)
        for step in range(3):
            strategy.begin_step(step, 1.0)
            strategy.gradients()
        return member.traffic.bytes_sent

    expected = 3 * 640 * 1280 * 32 / 64**2 * (2 + width)
    assert in_a_group(2, body) == [pytest.approx(expected, rel=0.03)] * 2
    if codec == "fp32":
        assert 4 * Demo.costs.elements(640 * 1280) == pytest.approx(expected / 3, rel=0.03)


@pytest.mark.slow
def test_what_is_too_much_for_one_gather_goes_in_several() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model(((600_000,), (700, 1000), (3,)))
        strategy = demo(member, model, chunk=1, topk=1, decay=0.0)
        strategy.begin_step(0, 1.0)
        own = [torch.randn(p.shape, generator=torch.Generator().manual_seed(member.rank)) for p in model.all]
        for parameter, value in zip(model.all, own, strict=True):
            parameter.grad = value.clone()
        strategy.gradients()
        return own, [p.grad for p in model.all], member.operations

    (one, found, operations), (other, theirs, _) = in_a_group(2, body)
    assert operations == 5  # of at most 3 MiB: two for each of the large ones
    for first, second, update, same in zip(one, other, found, theirs, strict=True):
        assert torch.equal(update, (first + second).sign()) and torch.equal(update, same)


# ------------------------------------------------------------------------------------------------- what may go wrong


def one_step(strategy: Demo, model: Model, step: int, value: float = 1.0) -> None:
    strategy.begin_step(step, 1.0)
    for parameter in model.all:
        parameter.grad = torch.full_like(parameter, value)
    strategy.gradients()


def test_a_gradient_that_is_not_finite_does_not_count_and_the_third_ends_the_member() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Model(((4, 4), (3,))), list[str]()
        strategy = demo(member, model, warnings)
        for step in range(3):
            try:
                one_step(strategy, model, step, torch.nan if member.rank else 1.0)
            except RunFailed as error:
                return warnings, str(error)
            assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.all if p.grad is not None)
            if member.rank == 0 and step == 1:
                return warnings, ""
        return warnings, ""

    (warnings, _), (said, failure) = in_a_group(2, body)
    assert warnings == []
    assert [line.split(" is not")[0] for line in said] == [f"step {n}: the gradient of all.0" for n in (1, 2)]
    assert "step 3: the gradient of all.0 is not finite on this machine, 3 times in a row" in failure


def test_a_member_that_sends_something_else_is_named() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model(((8, 8),))
        try:
            one_step(demo(member, model, topk=1 + member.rank), model, 0)
        except ExchangeError as error:
            return str(error)

    assert in_a_group(2, body)[0] == "member 1 sent 12 bytes of coefficients, not 6"


def test_a_member_without_a_sample_takes_part() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model(((8, 8),))
        strategy = demo(member, model)
        strategy.begin_step(0, float(member.rank))
        if member.rank:
            model.all[0].grad = torch.full((8, 8), -3.0)
        strategy.gradients()
        return model.all[0].grad

    assert all(torch.equal(found, -torch.ones(8, 8)) for found in in_a_group(2, body))


def test_a_member_without_samples_does_not_count_among_the_senders() -> None:
    two, three = (in_a_group(size, lambda member: trained(member, 3, (1.0, 2.0, 0.0), topk=60)) for size in (2, 3))
    assert all(map(torch.equal, two[0], three[2]))


def test_members_are_compared_as_often_as_is_said() -> None:
    def body(member: RoomExchange) -> Any:
        model, found = Model(((8, 8),)), []
        strategy = demo(member, model, verify_interval=2)
        for step in range(4):
            one_step(strategy, model, step)
            found.append(strategy.end_step())
        return [report and (report.round, report.drift, report.weight_hash) for report in [*found, strategy.finish()]]

    one, other = in_a_group(2, body)
    assert one == other and [report and report[:2] for report in one] == [None, (2, 0.0), None, (4, 0.0), (4, 0.0)]


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(BadInput, match="codec = topk:0.03 is not for demo"):
        Demo.codec(StrategySettings(codec="topk:0.03"))
    with pytest.raises(BadInput, match="without loss scaling") as caught:
        demo(SoloExchange(), Model()).begin_step(0, 1.0, 1024.0)
    assert caught.value.hint == "set mixed_precision to bf16 or off"
    with pytest.raises(BadInput, match="demo is an optimizer itself: optimizer = muon cannot be used with it"):
        plain_steps(nn.Linear(2, 2), TrainingSettings(optimizer="muon"), "demo")


# ------------------------------------------------------------------------------------------------------ in a trainer


def stepped(tmp_path: Path, **training: Any) -> tuple[torch.Tensor, torch.Tensor, StepEvent]:
    """Return a matrix before and after one step of one member."""
    plan = toy_plan(training={"max_steps": 1, **training}, strategy={"strategy": "demo"})
    task, events = ToyTask(), list[Any]()
    task.prepare(lambda *_: None)
    trainer = Trainer(plan, 0, task, SoloExchange(), events.append, Control(), tmp_path)
    before = task.build_model()
    trainer.run()
    (event,) = [event for event in events if isinstance(event, StepEvent)]
    return next(before.parameters()).detach(), trainer.parameters[0].detach().cpu(), event


@pytest.mark.parametrize(("decay", "clip"), [(0.0, 0.0), (0.5, 0.0), (0.5, 1e-4)])
def test_weights_move_by_the_learning_rate_and_decay_apart_from_it(tmp_path: Path, decay: float, clip: float) -> None:
    before, after, event = stepped(tmp_path, weight_decay=decay, max_grad_norm=clip)
    moved = (after - (1 - event.learning_rate * decay) * before).abs() / event.learning_rate
    torch.testing.assert_close(moved, torch.ones_like(moved), rtol=1e-4, atol=1e-4)
    assert (event.grad_norm is None) == (clip == 0.0) and (event.grad_norm or 1.0) > 0.01


@pytest.mark.parametrize(
    ("device", "batches"), [("cpu", [[0, 2, 4], [1, 3]]), ("meta", [[0], [2], [4], [1, 3]])], ids=str
)
def test_shapes_give_the_order_on_the_wire_whatever_devices_a_member_has(device: str, batches: list[list[int]]) -> None:
    model = Model(((4, 3), (5,), (4, 3), (5,), (4, 3)))
    model.all[2] = nn.Parameter(torch.ones((4, 3), device=device))
    strategy = demo(SoloExchange(), model)
    assert list(strategy._groups()) == [[0, 2, 4, 1, 3]]
    assert list(strategy._batches([0, 2, 4, 1, 3])) == batches
