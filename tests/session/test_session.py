"""A script's own loop in a session: two processes as threads of this one, over real links."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script_processes import Processes, alone, options
from torch import nn
from torch.utils.data import DataLoader

from profiles.errors import BadInput, RunFailed
from training.exchange.base import SoloExchange
from training.records.events import EvaluationEvent, RunEvent, SnapshotEvent, StepEvent, SyncEvent
from training.run.orders import Command
from training.session.launched_run import LaunchedRun
from training.session.session import Session, session

Weights = dict[str, torch.Tensor]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    both = Processes(tmp_path)
    yield both
    both.close()


def linear() -> nn.Module:
    """The same model in every thread, whatever others draw."""
    model = nn.Linear(4, 1)
    model.load_state_dict({"weight": torch.tensor([[0.5, -0.5, 0.25, 0.0]]), "bias": torch.zeros(1)})
    return model


def pairs(count: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


def trained(
    steps: int, batch_size: int = 4, rate: float = 0.05, optimizer_of: Any = torch.optim.AdamW, stop_at: int = 0
) -> Callable[[Session], Weights]:
    """A script that makes so many steps; it ends by itself at ``stop_at``."""

    def script(session: Session) -> Weights:
        model = linear()
        optimizer = optimizer_of(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(pairs(), batch_size=batch_size)
        model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)
        while session.completed_steps < steps:
            for inputs, target in loader:
                optimizer.zero_grad()
                session.backward(nn.functional.mse_loss(model(inputs), target))
                session.step()
                scheduler.step()
                if session.completed_steps in (steps, stop_at):
                    break
            if session.completed_steps == stop_at:
                break
        else:
            session.finish()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    return script


def alike(first: Weights, second: Weights) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_two_processes_that_average_gradients_train_as_one_with_both_batches(processes: Processes) -> None:
    first, second = processes.run(trained(6, optimizer_of=torch.optim.SGD), options())
    whole = trained(6, batch_size=8, optimizer_of=torch.optim.SGD)(alone())
    assert alike(first, second)
    for name, value in whole.items():
        torch.testing.assert_close(first[name], value)


def test_a_strategy_merges_weights_at_its_interval_and_the_run_sees_each_step(processes: Processes) -> None:
    first, second = processes.run(trained(7), options(strategy="diloco", sync_interval=3))
    assert alike(first, second), "what is left of the last interval is merged at the end"
    events = processes.events[0]
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [event.step for event in steps] == list(range(1, 8))
    assert all(event.samples == 4 and event.loss > 0 for event in steps)
    assert steps[1].learning_rate == pytest.approx(0.9 * steps[0].learning_rate)
    assert [event.step for event in events if isinstance(event, SyncEvent)] == [3, 6, 7]


@pytest.mark.parametrize("strategy", ["sparta", "streaming_diloco", "noloco", "sparseloco", "zero1", "fedavg"])
def test_every_kind_of_strategy_ends_with_one_result(strategy: str, processes: Processes) -> None:
    forced = {"sparseloco.force": True} if strategy == "sparseloco" else {}  # few exchanges leave much unsent
    first, second = processes.run(trained(4), options(strategy=strategy, max_steps=4, **forced))
    assert alike(first, second)
    assert not alike(first, linear().state_dict())


def test_a_resumed_script_ends_like_one_that_was_never_stopped(processes: Processes) -> None:
    profile = options(strategy="diloco", sync_interval=3, snapshot_interval=5)
    whole = processes.run(trained(12), profile)
    processes.run(trained(12, stop_at=7), profile, keeps=True)
    assert {event.step for event in processes.events[0] if isinstance(event, SnapshotEvent)} == {5}
    processes.attempt, processes.events = 2, [[], []]
    again = processes.run(trained(12), profile, keeps=True)
    assert all(alike(*pair) for pair in zip(whole, again, strict=True))
    assert next(event for event in processes.events[1] if isinstance(event, StepEvent)).step == 6


def test_an_order_to_stop_ends_all_after_one_step_with_a_snapshot(processes: Processes) -> None:
    def script(session: Session) -> int:
        control = session._run.control
        control.post(Command(command="stop", order=1, at_step=4, reason="enough"))
        with pytest.raises(SystemExit) as ending:
            trained(20)(session)
        assert ending.value.code == 130
        return session.completed_steps

    assert processes.run(script, options(), keeps=True) == [4, 4]
    assert (processes.folder / "run/checkpoints/member-1/step-00000004").is_dir()


def gan(session: Session, passes: int = 1) -> list[Weights]:
    """A generator and a discriminator, each with its optimizer, as in PyTorch's tutorial."""
    generator, discriminator = nn.Linear(2, 4), nn.Linear(4, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.05)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.05)
    loader = DataLoader(pairs(), batch_size=4)
    generator, discriminator, of_generator, of_discriminator, loader = session.prepare(
        generator, discriminator, of_generator, of_discriminator, loader
    )
    loss = nn.functional.binary_cross_entropy_with_logits
    for real, _ in loader:
        noise = torch.randn(len(real), 2)
        of_discriminator.zero_grad()
        told_real, told_made = discriminator(real), discriminator(generator(noise).detach())
        session.backward(loss(told_real, torch.ones_like(told_real)) + loss(told_made, torch.zeros_like(told_made)))
        session.step(of_discriminator)
        of_generator.zero_grad()
        told_made = discriminator(generator(noise))
        session.backward(loss(told_made, torch.ones_like(told_made)))
        session.step(of_generator)
    session.finish()
    return [dict(generator.state_dict()), dict(discriminator.state_dict())]


def test_the_gan_of_the_examples_trains_alone_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gan.py", "--steps", "60"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples/session/gan.py"))
    radius = float(capsys.readouterr().out.split()[2].rstrip(","))
    assert 0.3 < radius < 3


@pytest.mark.parametrize("strategy", ["allreduce", "diloco"])
def test_each_of_several_optimizers_has_the_strategy(strategy: str, processes: Processes) -> None:
    first, second = processes.run(gan, options(strategy=strategy, snapshot_interval=2), keeps=True)
    assert all(alike(*pair) for pair in zip(first, second, strict=True))
    steps = [event.step for event in processes.events[0] if isinstance(event, StepEvent)]
    assert steps == [1, 2, 3, 4], "the first optimizer's are those of the run"


def test_all_hold_their_mean_while_it_is_evaluated_and_then_each_its_own(processes: Processes) -> None:
    def script(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        model = linear()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.backward(model(torch.full((1, 4), 1.0 + session.process_index)).sum())
        session.step()
        with session.merged_weights():
            merged = model.weight.detach().clone()
            session.log({"loss": 0.5, "accuracy": 0.25})
        return merged, model.weight.detach().clone()

    (merged, own), (others_merged, others) = processes.run(script, options(strategy="diloco", sync_interval=10))
    assert torch.equal(merged, others_merged) and not torch.equal(own, others)
    torch.testing.assert_close(merged, (own + others) / 2)
    logged = [[event for event in events if isinstance(event, EvaluationEvent)] for events in processes.events]
    assert [len(events) for events in logged] == [1, 0]
    assert (logged[0][0].loss, logged[0][0].metrics["accuracy"], logged[0][0].step) == (0.5, 0.25, 1)


def test_processes_begin_with_the_same_weights_whatever_each_has_made(processes: Processes) -> None:
    def script(session: Session) -> Weights:
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(float(session.process_index))
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return dict(model.state_dict())

    first, second = processes.run(script, options())
    assert alike(first, second)


def test_frozen_weights_are_the_same_on_all_and_may_be_trained_for_some_steps(processes: Processes) -> None:
    def script(session: Session) -> Weights:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1))
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[0].weight.fill_(float(session.process_index))
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            model[1].requires_grad_(step >= 2)
            session.backward(model(torch.full((1, 4), 1.0 + session.process_index)).sum())
            session.step()
        return dict(model.state_dict())

    first, second = processes.run(script, options())
    assert alike(first, second)


def test_merged_weights_have_merged_buffers_and_give_back_every_bit(processes: Processes) -> None:
    def script(session: Session) -> tuple[Weights, bool]:
        model = nn.Sequential(linear(), nn.BatchNorm1d(1)).double()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.backward(model(torch.randn(4, 4, dtype=torch.float64)).sum())
        session.step()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with session.merged_weights():
            merged = {name: value.clone() for name, value in model.state_dict().items()}
        return merged, alike(before, dict(model.state_dict()))

    (merged, is_restored), (others, is_restored_there) = processes.run(script, options(strategy="diloco"))
    assert alike(merged, others) and is_restored and is_restored_there


def test_a_second_session_takes_over_what_an_earlier_one_had() -> None:
    """As when a cell of a notebook is run again."""
    model, loader = linear(), DataLoader(pairs(), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        again = alone(max_steps=8)
        again.prepare(model, optimizer)
        model, optimizer, loader = again.prepare(model, optimizer, loader)
        for inputs, target in loader:
            again.backward(nn.functional.mse_loss(model(inputs), target))
            again.step()
        assert again.completed_steps == 8


def test_an_optimizer_of_the_scripts_whose_step_takes_nothing_and_weights_of_eight_bits() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]  # as many write it
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad

    model, single = linear(), alone()
    scale = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_parameter("scale", scale)
    single.prepare(model, Plain([model.weight, model.bias]))
    single.backward(model(torch.ones(1, 4)).sum())
    single.step()
    assert float(model.bias.detach()) == pytest.approx(-0.1)


def test_the_loss_of_a_step_that_the_script_leaves_out_is_no_part_of_the_next() -> None:
    events: list[Any] = []
    model, single = linear(), Session(options(), LaunchedRun(emit=events.append), lambda run: SoloExchange())
    _, optimizer = single.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for is_left_out in (True, False):
        optimizer.zero_grad()
        single.backward(model(torch.ones(1, 4)).sum())
        if not is_left_out:
            single.step()
    assert [event.loss for event in events if isinstance(event, StepEvent)] == [0.25]


def test_the_run_is_told_the_options_of_the_session(processes: Processes) -> None:
    processes.run(trained(1), options(strategy="diloco", sync_interval=3, max_steps=1), keeps=True)
    opened = next(event for event in processes.events[0] if isinstance(event, RunEvent))
    assert opened.total_steps == 1
    assert opened.details["session"]["strategy"]["strategy"] == "diloco"


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"learning_rate": 0.1}, "a session does not read learning_rate"),
        ({"engine": "nccl"}, "a session does not read engine"),
        ({"strategy": "async_diloco"}, "number of steps of its own"),
        ({"strategi": "diloco"}, "strategi"),
        ({"strategy": "diloco", "sync_interval": 0}, "sync_interval"),
    ],
)
def test_an_option_without_an_effect_in_a_loop_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(BadInput, match=error):
        session(**given)


def test_a_script_that_steps_its_optimizer_itself_hears_what_to_write() -> None:
    model = linear()
    _, optimizer = alone().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RunFailed, match=r"session\.step\(\)"):
        optimizer.step()


def test_what_cannot_be_prepared_is_refused() -> None:
    model, other = linear(), linear()
    with pytest.raises(BadInput, match="not int"):
        alone().prepare(3)
    with pytest.raises(BadInput, match="SGD has weights of no module"):
        alone().prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    halves = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    with pytest.raises(BadInput, match="two optimizers"):
        alone().prepare(model, *halves)
    with pytest.raises(BadInput, match="demo is an optimizer itself"):
        alone(strategy="demo").prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(BadInput, match="LBFGS computes the loss itself"):
        alone().prepare(model, torch.optim.LBFGS(model.parameters()))


def test_a_gradient_that_the_session_does_not_know_of_is_refused() -> None:
    model, single = linear(), alone()
    model.bias.requires_grad_(False)
    single.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(BadInput, match=r"write session\.backward\(loss\) for loss\.backward"):
        single.step()
    model.bias.requires_grad_(True)
    single.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(BadInput, match="frozen in prepare.*freeze it after prepare"):
        single.step()


def test_a_step_after_the_last_one_and_a_loss_that_is_no_number_are_refused() -> None:
    ended = alone(max_steps=1)
    model = linear()
    ended.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ended.backward(model(torch.ones(1, 4)).sum())
    ended.step()
    with pytest.raises(RunFailed, match="session has ended"):
        ended.step()
    lost = alone()
    lost.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lost.backward(model(torch.full((1, 4), float("nan"))).sum())
    with pytest.raises(RunFailed, match="loss of rank 0 is nan in step 1; nothing is saved"):
        lost.step()


def test_shares_of_a_loss_add_up_to_the_step_of_the_whole(processes: Processes) -> None:
    """Passes before the last one send nothing, and count once."""

    def script(session: Session) -> Weights:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(pairs(8), batch_size=2))
        for inputs, target in loader:
            session.backward(nn.functional.mse_loss(model(inputs), target) / 2)
        session.step()
        return dict(model.state_dict())

    first, second = processes.run(script, options())
    model = linear()
    inputs, target = (torch.stack(column) for column in zip(*pairs(8), strict=True))
    nn.functional.mse_loss(model(inputs), target).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert alike(first, second)
    torch.testing.assert_close(first["weight"], model.weight.detach())
