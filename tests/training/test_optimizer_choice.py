"""Optimizers by name and by a function of one's own: what each trains how, and that all members train alike."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from group import run_group
from memory_exchange import Room, RoomExchange
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput, RunFailed
from profiles.optimisation import OPTIMIZERS, TrainingSettings
from training.exchange.base import SoloExchange
from training.hardware.device import Precision
from training.loop.state import TrainingState
from training.optimization.optimizers import build_optimizer, set_learning_rate, state_bytes
from training.records.events import StepEvent
from training.snapshots.optimizer_state import load_optimizer, optimizer_tensors

OWN = '''
import torch

def layers(model, training):
    first, *others = model.parameters()
    rate = training.learning_rate
    return torch.optim.SGD([{"params": [first], "lr": rate / 10}, {"params": others}], lr=rate)

def none(model, training):
    return model

def foreign(model, training):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])

def closure(model, training):
    return torch.optim.LBFGS(model.parameters())

class Counting(torch.optim.SGD):
    """Falls with the steps of each weight, which it counts in a number."""
    kept = int

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in (one for one in group["params"] if one.grad is not None):
                steps = int(self.state[weight].get("steps", 0)) + 1
                self.state[weight]["steps"] = self.kept(steps)
                weight.data.sub_(weight.grad, alpha=group["lr"] / steps)

class Falling(torch.optim.SGD):
    """Falls with the steps of each group, which it counts there."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["rate"] = torch.tensor(group["lr"] / group["steps"])
            for weight in (one for one in group["params"] if one.grad is not None):
                weight.data.sub_(weight.grad * group["rate"])

def falling(model, training):
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": training.learning_rate / 2}, {"params": others}]
    return Falling(groups, lr=training.learning_rate)

def counting(model, training):
    return Counting(model.parameters(), lr=training.learning_rate)

def lists(model, training):
    found = Counting(model.parameters(), lr=training.learning_rate)
    found.kept = lambda steps: [steps]
    return found
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def settings(optimizer: str, **others: float) -> TrainingSettings:
    return TrainingSettings(**{"learning_rate": 0.01, "optimizer": optimizer} | others)


class Small(nn.Module):
    """Something of each kind; the gradients of its loss fill every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.sound = nn.Conv1d(6, 6, 3)
        self.inside = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, 7)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        heard = self.sound(self.words(words).transpose(1, 2)).transpose(1, 2)
        return self.out(self.norm(self.inside(heard)))  # type: ignore[no-any-return]  # modules return Any


def small() -> Small:
    torch.manual_seed(1)
    return Small()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    words = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(words).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# ---------------------------------------------------------------------------------------------------------- one model


def kinds(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, bool]:
    """Return of every weight whether it has Muon's one state."""
    return {name: "momentum_buffer" in optimizer.state[p] for name, p in model.named_parameters()}


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = small()
    optimizer = build_optimizer(model, settings("muon"))
    step(model, optimizer, 0)
    assert [name for name, muon in kinds(optimizer, model).items() if muon] == ["inside.weight"]


def test_muon_moves_a_matrix_as_far_as_adamw_does() -> None:
    """Orthogonal, and scaled by ``0.2 sqrt(max)``: the mean square is AdamW's usual 0.2 of the rate."""
    weight = nn.Parameter(torch.zeros(64, 64))
    model = nn.ParameterDict({"inside": weight})
    optimizer = build_optimizer(model, settings("muon", weight_decay=0.0))
    weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.2)
    own = weight.detach() / (0.2 * 8 * 0.01)
    assert 0.5 < float(torch.linalg.svdvals(own).median()) < 1.3


def test_muon_needs_a_hidden_matrix() -> None:
    with pytest.raises(BadInput, match="no hidden matrix") as refused:
        build_optimizer(nn.Linear(3, 2), settings("muon"))
    assert "adamw" in refused.value.hint


def test_the_output_layer_is_the_one_that_a_model_names() -> None:
    model = small()
    model.get_output_embeddings = lambda: model.inside  # type: ignore[assignment]  # as models of transformers
    optimizer = build_optimizer(model, settings("muon"))
    step(model, optimizer, 0)
    assert [name for name, muon in kinds(optimizer, model).items() if muon] == ["out.weight"]


@pytest.mark.parametrize("momentum", [-1.0, 0.0, 0.5])
def test_sgd_with_momentum(momentum: float) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = build_optimizer(nn.ParameterList([weight]), settings("sgd", momentum=momentum))
    expected, speed = weight.detach().clone(), torch.zeros(2)
    for number in range(3):
        weight.grad = torch.tensor([1.0, float(number)])
        optimizer.step()
        speed = speed * (0.9 if momentum < 0 else momentum) + weight.grad
        expected -= 0.01 * speed
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-6)


def test_momentum_is_also_muons() -> None:
    found = []
    for momentum in (-1.0, 0.95, 0.5):
        model = small()
        optimizer = build_optimizer(model, settings("muon", momentum=momentum))
        for number in range(2):
            step(model, optimizer, number)
        found.append(weights(model))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", [*OPTIMIZERS, "counting", "falling"])
def test_a_snapshot_goes_on_bit_for_bit(name: str, own: str) -> None:
    chosen = settings(name if name in OPTIMIZERS else f"{own}:{name}")
    model, twin = small(), small()
    first, second = build_optimizer(model, chosen), build_optimizer(twin, chosen)
    for number in range(3):
        step(model, first, number)
    twin.load_state_dict(model.state_dict())
    load_optimizer(second, {key: one.clone() for key, one in optimizer_tensors(first).items()})
    for optimizer, trained in ((first, model), (second, twin)):
        set_learning_rate(optimizer, 0.003)
        for number in range(3, 5):
            step(trained, optimizer, number)
    assert torch.equal(weights(model), weights(twin))


def test_a_run_does_not_go_on_with_another_optimizer_of_the_users() -> None:
    def state(make: type[torch.optim.Optimizer] | None) -> TrainingState:
        model = small()
        optimizer = build_optimizer(model, settings("adamw"), make=make)
        return TrainingState(model, optimizer, Precision(None, torch.device("cpu")))

    snapshot = state(torch.optim.RAdam).snapshot(1, {}, {})
    state(torch.optim.RAdam).restore(snapshot)
    for other, name in ((torch.optim.SGD, "SGD"), (None, "the one of the options")):
        with pytest.raises(RunFailed, match=rf"another optimizer .RAdam. than this one .{name}."):
            state(other).restore(snapshot)


def test_a_state_that_no_snapshot_holds_is_an_error(own: str) -> None:
    model = small()
    optimizer = build_optimizer(model, settings(f"{own}:lists"))
    for weight in model.parameters():
        optimizer.state[weight]["steps"] = [1]
    with pytest.raises(RunFailed, match="'steps', a list"):
        optimizer_tensors(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_of_the_states(name: str) -> None:
    model, chosen = small(), settings(name)
    optimizer = build_optimizer(model, chosen)
    step(model, optimizer, 0)
    kept = sum(one.numel() * 4 for key, one in optimizer_tensors(optimizer).items() if not key.endswith("/step"))
    said = state_bytes(chosen, weights(model).numel(), model.inside.weight.numel())
    if name == "adafactor":  # all of what small models have is rows, columns and vectors
        assert said < kept < state_bytes(settings("adamw"), weights(model).numel()) / 2
    else:
        assert said == kept


def test_memory_without_momentum() -> None:
    assert state_bytes(settings("sgd", momentum=0.0), 100) == 0


# ------------------------------------------------------------------------------------------------------- one's own


def test_groups_keep_their_relation_to_the_learning_rate(own: str) -> None:
    optimizer = build_optimizer(small(), settings(f"{own}:layers"))
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("none", "returned a Small, no torch.optim.Optimizer"),
        ("foreign", "not the model's"),
        ("closure", "several times"),
        ("nothing", "no function 'nothing'; it has: layers, none"),
    ],
)
def test_what_is_no_optimizer_for_the_model_is_refused(own: str, function: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build_optimizer(small(), settings(f"{own}:{function}"))


def test_a_class_gets_rate_and_decay_and_norms_are_not_decayed() -> None:
    chosen = settings("adamw", learning_rate=0.5, weight_decay=0.25)
    optimizer = build_optimizer(small(), chosen, make=torch.optim.RAdam)
    assert type(optimizer) is torch.optim.RAdam
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert all((weight.ndim >= 2) == (group["weight_decay"] == 0.25) for weight in group["params"])
    assert build_optimizer(small(), chosen, make=torch.optim.Rprop).param_groups[0]["lr"] == 0.5


def test_a_function_gets_the_trained_weights_or_model_and_options() -> None:
    model, chosen = small(), settings("adamw", learning_rate=0.01)
    next(model.parameters()).requires_grad_(False)
    made = build_optimizer(model, chosen, make=lambda params: torch.optim.AdamW(params, lr=0.1))
    assert len(made.param_groups[0]["params"]) == len([*model.parameters()]) - 1
    set_learning_rate(made, 0.005)  # half of the peak
    assert made.param_groups[0]["lr"] == pytest.approx(0.05)
    partly = functools.partial(torch.optim.AdamW, betas=(0.5, 0.6))
    assert build_optimizer(model, chosen, make=partly).param_groups[0]["betas"] == (0.5, 0.6)
    assert build_optimizer(model, chosen, make=partly).param_groups[0]["lr"] == 0.01, "as a class"
    given = functools.partial(torch.optim.AdamW, lr=0.3, weight_decay=0.4)
    assert [group["lr"] for group in build_optimizer(model, chosen, make=given).param_groups] == [0.3, 0.3]
    assert build_optimizer(model, chosen, make=given).param_groups[0]["weight_decay"] == 0.4
    both = build_optimizer(model, chosen, make=lambda model, options: torch.optim.SGD(model.parameters(), lr=0.2))
    assert both.param_groups[0]["lr"] == 0.2
    with pytest.raises(BadInput, match="<lambda> returned a list, no torch.optim.Optimizer"):
        build_optimizer(model, chosen, make=lambda params: params)
    with pytest.raises(BadInput, match="demo is an optimizer itself: optimizer = RAdam"):
        build_optimizer(model, chosen, make=torch.optim.RAdam, replaced_by="demo")


# ------------------------------------------------------------------------------------------------------- a group


def trained(workers: int, batch: int, folder: Path, strategy: str = "allreduce", **training: object) -> list[nn.Module]:
    fixed = {"batch_size": batch, "max_steps": 5, "learning_rate": 1e-3}
    plan = toy_plan(workers, training=fixed | training, strategy={"strategy": strategy})
    room = Room(workers, lambda name: ())
    members = run_group(
        plan, lambda rank: RoomExchange(room, rank) if workers > 1 else SoloExchange(), lambda _: ToyTask(), folder
    )
    assert [member.error for member in members.values()] == [None] * workers
    return [members[rank].trainer.model for rank in range(workers)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "counting"])
def test_three_members_equal_one_with_the_joint_batch(name: str, strategy: str, own: str, tmp_path: Path) -> None:
    chosen = name if name in OPTIMIZERS else f"{own}:{name}"
    group = trained(3, 4, tmp_path / "group", strategy, optimizer=chosen)
    alone = trained(1, 12, tmp_path / "alone", optimizer=chosen)[0]
    assert all(torch.equal(weights(group[0]), weights(one)) for one in group[1:])
    torch.testing.assert_close(weights(group[0]), weights(alone), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_muloco_is_diloco_with_muon_inside(tmp_path: Path) -> None:
    strategy = {"strategy": "diloco", "sync_interval": 6, "codec": "fp32"}
    plan = toy_plan(2, training={"max_steps": 150, "learning_rate": 0.02, "optimizer": "muon"}, strategy=strategy)
    room = Room(2, lambda name: ())
    members = run_group(plan, lambda rank: RoomExchange(room, rank), lambda _: ToyTask(), tmp_path)
    assert [member.error for member in members.values()] == [None, None]
    losses = [event.loss for event in members[0].events if isinstance(event, StepEvent)]
    assert sum(losses[-6:]) < 0.4 * sum(losses[:6])
    assert torch.equal(*(weights(member.trainer.model) for member in members.values()))


def test_the_rate_of_wsd_follows_its_share(tmp_path: Path) -> None:
    plan = toy_plan(training={"max_steps": 10, "lr_schedule": "wsd", "lr_decay_share": 0.4})
    member = run_group(plan, lambda _: SoloExchange(), lambda _: ToyTask(), tmp_path)[0]
    rates = [event.learning_rate for event in member.events if isinstance(event, StepEvent)]
    assert rates[:7] == pytest.approx([0.01] * 7) and rates[7:] == pytest.approx(
        [0.01 * (1 - (part / 4) ** 0.5) for part in (1, 2, 3)]
    )
