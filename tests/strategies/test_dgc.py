"""Deep Gradient Compression against its paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract import CHECKS
from members import settings_of
from small_models import Vectors, in_a_group, step
from torch import nn

from profiles.errors import BadInput
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.exchange.base import SoloExchange
from training.exchange.codecs import codec_by_name
from training.local_trainer import LocalTrainer
from training.optimization.optimizers import build_optimizer
from training.records.events import Event, StepEvent
from training.strategies.allreduce import AllReduce
from training.strategies.base import StrategyContext
from training.strategies.compressors.dgc import share_at
from training.strategies.registry import cost_model

WEIGHTS = (1.0, 2.0, 5.0)
SIZE = 200


def settings(**options: Any) -> StrategySettings:
    own = {"compressor": "dgc", "dgc_share": 0.05, "dgc_warmup": 0, "bucket_mb": SIZE * 4e-6} | options
    return StrategySettings(verify_interval=0, owned={"allreduce": own})


class Member:
    """A model of two vectors, plain SGD, and what the trainer does with a strategy."""

    def __init__(self, exchange: Any, momentum: float = 0.9, max_norm: float = 0.0, **options: Any) -> None:
        self.model = Vectors(SIZE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=momentum)
        self.warnings: list[str] = []
        context = StrategyContext(settings(**options), 100, 0, self.warnings.append, max_grad_norm=max_norm)
        self.strategy = AllReduce(context)
        self.strategy.set_optimizer(self.optimizer)
        self.strategy.attach(self.model, exchange)

    def step(self, number: int, given: tuple[torch.Tensor, ...], weight: float = 1.0) -> torch.Tensor:
        """Make a step with these gradients of the first and the second vector; return how far the first one went."""
        before = self.model.first.detach().clone()
        self.model.zero_grad()
        self.strategy.begin_step(number, weight)
        self.strategy.last_backward()
        for one, parameter in zip(given, (self.model.first, self.model.second)):
            (one * parameter).sum().backward()
        self.strategy.gradients()
        self.optimizer.step()
        self.strategy.end_step()
        return before - self.model.first.detach()


def gradient(rank: int, number: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * rank + number))


def bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def reference(rounds: int, momentum: float, share: float, bound: float) -> list[torch.Tensor]:
    """Algorithm 4 of the paper for three members, with values of 16 bits; what rounding loses is sent later."""
    shares = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    size = len(WEIGHTS)
    u, v = [torch.zeros(SIZE)] * size, [torch.zeros(SIZE)] * size
    lost, steps = torch.zeros(SIZE), []
    for number in range(rounds):
        mean = torch.zeros(SIZE)
        for rank in range(size):
            g = gradient(rank, number)
            if bound:
                g = g * min(1.0, bound * size**-0.5 / float(g.norm()))
            u[rank] = momentum * u[rank] + g
            v[rank] = v[rank] + u[rank]
            threshold = v[rank].abs().sort(descending=True).values[round(share * SIZE) - 1]
            mask = v[rank].abs() >= threshold
            sent = bf16(v[rank]) * mask
            mean = mean + shares[rank] * sent
            v[rank] = v[rank] - sent
            u[rank] = u[rank] * ~mask
        owed = lost * (mean != 0)
        reply = bf16(mean + owed)
        lost = lost - owed + mean + owed - reply
        steps.append(reply)
    return steps


@pytest.mark.parametrize("bound", [0.0, 3.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_papers_algorithm(momentum: float, bound: float) -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Member(exchange, momentum, bound)
        weight = WEIGHTS[exchange.rank]
        return [member.step(number, (gradient(exchange.rank, number),), weight) for number in range(4)]

    expected, now = [], torch.zeros(SIZE)
    for one in reference(4, momentum, 0.05, bound):  # the weight is rounded as it is stepped
        expected.append(now - (now := now - one))
    for found in in_a_group(3, body):
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-6, atol=1e-6)


def test_without_momentum_nothing_is_lost() -> None:
    """Also where a member is late or its part of a step counts nothing: all of it stays with it."""

    def late(name: str) -> tuple[int, ...]:
        return (1,) if name == "grad/2/1" else ()

    def body(exchange: RoomExchange) -> Any:
        member = Member(exchange, momentum=0.0)
        sent, meant = torch.zeros(SIZE), torch.zeros(SIZE)
        for number in range(6):
            weight = 0.0 if (exchange.rank, number) == (0, 4) else 1.0
            before = unsent(member)
            member.step(number, (gradient(exchange.rank, number),), weight)
            meant += gradient(exchange.rank, number)
            kept = before + gradient(exchange.rank, number) - unsent(member)
            if weight == 0.0 or (exchange.rank, number) == (1, 2):
                assert not bool(kept.any())
            else:
                assert int((kept != 0).sum()) == 10
            sent += kept
        torch.testing.assert_close(sent + unsent(member), meant, rtol=1e-5, atol=1e-5)
        return member.warnings

    quiet, told, _ = in_a_group(3, body, late)
    assert quiet == [] and told == ["step 3: this machine's gradients came after the deadline"]


def unsent(member: Member) -> torch.Tensor:
    return member.strategy.tensors().get("dgc/unsent/1", torch.zeros(SIZE)).clone()


def test_one_member_alone_trains_with_its_optimizers_momentum() -> None:
    alone = Member(SoloExchange())
    weights, buffer = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(3):
        alone.step(number, (gradient(0, number),))
        buffer = 0.9 * buffer + gradient(0, number)
        weights = weights - buffer
    torch.testing.assert_close(alone.model.first.detach(), weights)
    assert not alone.strategy.clips


@pytest.mark.slow
def test_the_trainer_clips_nothing_after_it_and_tells_each_members_own_norm(tmp_path: Path) -> None:
    events: list[Event] = []
    data = [(torch.ones(4), torch.tensor([10.0]))] * 16
    trainer = LocalTrainer(
        nn.Linear(4, 1), data, loss=nn.functional.mse_loss, output_dir=tmp_path, simulate=2, on_event=events.append
    )
    own = {"compressor": "dgc", "dgc_share": 1.0, "dgc_warmup": 0}
    options = {f"allreduce.{name}": value for name, value in own.items()}
    rest = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr_schedule": "constant", "warmup_steps": 0}
    before = trainer.model.state_dict()["weight"].clone()
    after = trainer.fit(
        strategy="allreduce", max_steps=1, batch_size=4, learning_rate=1.0, lr_scaling="off", max_grad_norm=0.5,
        **options, **rest,
    ).state_dict()  # fmt: skip
    norms = [event.grad_norm for event in events if isinstance(event, StepEvent)]
    assert len(norms) == 2 and all(norm is not None and norm > 5 for norm in norms)
    gone = float((after["weight"] - before).norm()) * (5 / 4) ** 0.5  # with the bias, whose gradient is as large
    assert gone == pytest.approx(0.5 / 2**0.5, rel=0.01)  # both gradients are equal


def test_the_codec_of_a_plan_for_one_machine_is_refused_in_a_group_alone() -> None:
    def strategy(exchange: Any) -> AllReduce:
        made = AllReduce(StrategyContext(settings().model_copy(update={"codec": "fp32"}), 100, 0))
        made.attach(Vectors(), exchange)
        return made

    assert strategy(SoloExchange()).synchronised
    with pytest.raises(BadInput, match=r"codec = fp32 with allreduce\.compressor = dgc"):
        in_a_group(1, strategy)


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov"])
def test_another_optimizer_than_plain_sgd_is_refused(optimizer: str) -> None:
    def body(exchange: RoomExchange) -> None:
        model = nn.Linear(2, 2)
        made = {
            "adamw": lambda: torch.optim.AdamW(model.parameters()),
            "nesterov": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        }[optimizer]()
        strategy = AllReduce(StrategyContext(settings(), 100, 0))
        strategy.set_optimizer(made)
        strategy.attach(model, exchange)

    with pytest.raises(BadInput, match="dgc with"):
        in_a_group(2, body)


def test_what_is_not_finite_or_overflows_leaves_a_member_as_it_was() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Member(exchange, max_norm=1.0)
        member.step(0, (gradient(exchange.rank, 0), gradient(exchange.rank, 1)))
        before = {name: one.clone() for name, one in member.strategy.tensors().items() if name.startswith("dgc")}
        spoilt = gradient(exchange.rank, 2)
        spoilt[5] = torch.nan if exchange.rank else 1.0
        member.step(1, (spoilt, gradient(exchange.rank, 3)))
        after = {name: one.clone() for name, one in member.strategy.tensors().items() if name.startswith("dgc")}
        kept = [name for name in before if torch.equal(before[name], after[name])]
        step(member.strategy, (member.model.first * spoilt).sum() + member.model.second.sum(), 2, 1024.0)
        overflown = bool(member.model.second.grad.isinf().all())
        last = {name: one for name, one in member.strategy.tensors().items() if name.startswith("dgc")}
        return kept, overflown, all(torch.equal(after[name], last[name]) for name in after), member.warnings

    (moved, *first), (kept, *second) = in_a_group(2, body)
    assert moved == [] and sorted(kept) == ["dgc/momentum/1", "dgc/unsent/1"]  # the bucket of the first vector
    assert [first[:2], second[:2]] == [[True, True]] * 2
    assert first[2] == [] and "step 2: the gradient of first" in second[2][0]


def test_a_tensor_that_nobody_used_keeps_what_was_not_sent() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Member(exchange, bucket_mb=1.0)
        member.step(0, (gradient(exchange.rank, 0), gradient(exchange.rank, 1)))
        member.step(1, (gradient(exchange.rank, 2),))
        return member.model.second.grad, member.strategy.tensors()["dgc/unsent/0"][:SIZE], exchange.rank

    for grad, kept, rank in in_a_group(2, body):
        assert grad is None
        momentum = 0.9 * gradient(rank, 1)
        sent = (gradient(rank, 1) - kept + momentum).abs() > 1.0  # in the first step
        assert 0 < int(sent.sum()) <= 20
        torch.testing.assert_close(kept[~sent], (gradient(rank, 1) + momentum)[~sent])


@pytest.mark.parametrize("share", [0.03, 0.01])
def test_the_bytes_are_the_theorys(share: float) -> None:
    size = 300_000

    def body(exchange: RoomExchange) -> float:
        model = Vectors(size)
        strategy = AllReduce(StrategyContext(settings(dgc_share=share, bucket_mb=4.0), 100, 0))
        strategy.attach(model, exchange)
        before = exchange.traffic.bytes_sent
        values = torch.randn(2, size, generator=torch.Generator().manual_seed(exchange.rank))
        step(strategy, (model.first * values[0]).sum() + (model.second * values[1]).sum())
        return exchange.traffic.bytes_sent - before

    costs = cost_model("allreduce", settings(dgc_share=share))
    assert costs is not None and not costs.exact and costs.codecs == (f"topk:{share}",)
    planned = codec_by_name(costs.codecs[0]).expected_bytes(costs.elements(2 * size))
    assert planned == pytest.approx(4 * share * 2 * size)
    assert in_a_group(2, body) == [pytest.approx(planned, rel=0.03)] * 2


def test_the_share_falls_in_stages() -> None:
    shares = [share_at(step, 0.001, 8) for step in range(10)]
    assert shares == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001, 0.001]
    assert share_at(0, 0.3, 8) == 0.3 and share_at(0, 0.001, 0) == 0.001

    def body(exchange: RoomExchange) -> list[int]:
        member = Member(exchange, momentum=0.0, dgc_warmup=0.02)  # of 100 steps
        return [int((member.step(number, (gradient(0, number),)) != 0).sum()) for number in range(3)]

    assert in_a_group(1, body) == [[50, 13, 10]]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS[:6], ids=lambda check: check.__name__)
def test_it_keeps_the_contract_of_strategies(check: Any) -> None:
    own = {"compressor": "dgc", "dgc_share": 0.1, "dgc_warmup": 6, "bucket_mb": 0.0002}
    check(settings_of("allreduce", owned={"allreduce": own}))


def test_sgd_as_it_is_built_is_one_that_goes_with_it() -> None:
    from profiles.schema import TrainingSettings

    def body(exchange: RoomExchange) -> list[float]:
        model = nn.Linear(2, 2)
        optimizer = build_optimizer(model, TrainingSettings(optimizer="sgd", momentum=0.8))
        strategy = AllReduce(StrategyContext(settings(), 100, 0))
        strategy.set_optimizer(optimizer)
        strategy.attach(model, exchange)
        return [group["momentum"] for group in optimizer.param_groups]

    assert set(in_a_group(2, body)[0]) == {0.0}
