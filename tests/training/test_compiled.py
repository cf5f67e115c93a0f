"""Steps through compiled blocks are those of eager ones, and go on eager where a compiler fails."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_exchange import RoomExchange, together
from peft import LoraConfig, inject_adapter_in_model
from test_trainer import losses, train
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint
from toy_task import ToyTask, toy_plan

from training.loop.trainer import Trainer
from training.model import compiled
from training.model.compiled import CompiledBlocks, blocks_of, should_compile
from training.optimization.backward import Backward
from training.records.events import Event, WarningEvent
from training.run.orders import Control

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything but code generation, which takes seconds a graph."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):
        yield
    torch._dynamo.reset()


class Stack(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.inlet(inputs)
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return inputs.square().mean()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_same_steps(model: nn.Module, inputs: list[torch.Tensor], varies: bool) -> None:
    """Take an optimizer step on each, eager and compiled."""
    models = [copy.deepcopy(model), model]
    CompiledBlocks(model, varies)
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1) for one in models]
    for batch in inputs:
        values = [one(batch) for one in models]
        for value, optimizer in zip(values, optimizers):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float(values[1].detach()) == pytest.approx(float(values[0].detach()), abs=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:.*distutils")  # setuptools and the standard library about who loaded it first
def test_steps_through_compiled_code_are_those_of_eager_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    for_one_graph = {"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}  # neither tries nor prepares anything
    with inductor.patch(for_one_graph):
        assert_same_steps(Stack(), [torch.randn(size, 8) for size in (4, 4, 3, 5)], varies=True)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("varies", [False, True])
def test_one_length_gets_static_code_and_others_share_one_more(varies: bool) -> None:
    assert_same_steps(Stack(), [torch.randn(size, 8) for size in (4, 4, 3, 5, 2, 4)], varies)
    assert graphs() == (1 if varies else 2)


class Adapted(Stack):
    """With adapters on its linear layers, and activations that are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        inject_adapter_in_model(LoraConfig(r=2, target_modules=r"layers\.\d\.0"), self)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.inlet(inputs).requires_grad_()
        for layer in self.layers:
            inputs = inputs + checkpoint(layer, inputs, use_reentrant=False)
        return inputs.square().mean()


@pytest.mark.slow
def test_adapters_and_recomputed_activations_stay_as_they_are() -> None:
    assert_same_steps(Adapted(), [torch.randn(size, 8) for size in (4, 3, 5)], varies=True)
    assert 1 <= graphs() <= 2


def test_evaluations_go_through_the_blocks_uncompiled() -> None:
    model = Stack()
    CompiledBlocks(model, varies=False)
    model.eval()(torch.randn(4, 8))
    assert graphs() == 0


def test_blocks_are_the_members_of_the_outermost_lists() -> None:
    model = nn.ModuleDict({"encoder": Stack(), "decoder": Stack(), "head": nn.Linear(2, 2)})
    model["head"].experts = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])
    assert list(blocks_of(model)) == [*model["encoder"].layers, *model["decoder"].layers]


@pytest.mark.parametrize(
    ("wanted", "device", "gains", "steps", "found"),
    [
        ("auto", CUDA, True, 500, True),
        ("auto", CUDA, True, 499, False),
        ("auto", CUDA, False, 9999, False),
        ("auto", CPU, True, 9999, False),
        ("on", CPU, False, 1, True),
        ("off", CUDA, True, 9999, False),
    ],
)
def test_auto_is_for_long_runs_on_cuda(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, device: torch.device, gains: bool, steps: int, found: bool
) -> None:
    monkeypatch.setattr(compiled, "_has_triton", lambda: True)
    assert should_compile(wanted, device, gains, steps) is found
    monkeypatch.setattr(compiled, "_has_triton", lambda: False)
    assert should_compile(wanted, device, gains, steps) is (wanted == "on")


def warnings(events: list[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, WarningEvent)]


COMPILED = {"compile": "on", "gradient_accumulation": 2}


@pytest.mark.slow
def test_a_run_compiles_and_learns_the_same(tmp_path: Path) -> None:
    eager, _ = train(toy_plan(training={**COMPILED, "compile": "off"}), tmp_path / "a"), counters.clear()
    found = train(toy_plan(training=COMPILED), tmp_path / "b")
    assert losses(found[1]) == pytest.approx(losses(eager[1]), abs=1e-5)
    assert 1 <= graphs() <= 2 and not warnings(found[1])


def refuses(*_: Any) -> Any:
    raise RuntimeError("no compiler is installed")


@pytest.mark.slow
def test_a_compiler_that_fails_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", refuses)
    eager = train(toy_plan(training={**COMPILED, "compile": "off"}), tmp_path / "a")
    found = train(toy_plan(training=COMPILED), tmp_path / "b")
    assert losses(found[1]) == losses(eager[1])
    assert len(warnings(found[1])) == 1 and "no compiler is installed" in warnings(found[1])[0]


@pytest.mark.slow
def test_recompiles_end_at_a_limit_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_RECOMPILES", 1)
    plan = toy_plan(training={"compile": "on", "batch_size": 7, "max_steps": 8})
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        found = train(plan, tmp_path, ToyTask(samples=24))
    assert len(losses(found[1])) == 8 and len(warnings(found[1])) == 1
    assert "steps go on without" in warnings(found[1])[0]


def test_an_error_of_the_task_stays_its_own(tmp_path: Path) -> None:
    class Broken(ToyTask):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        train(toy_plan(training={"compile": "on"}), tmp_path, Broken())


@pytest.fixture
def _passes_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are threads here: while one of them traces, torch replaces ``nn.Module.__call__`` for all."""
    lock, run = threading.Lock(), Backward.run

    def run_alone(self: Backward, *arguments: Any) -> Any:
        with lock:
            return run(self, *arguments)

    monkeypatch.setattr(Backward, "run", run_alone)


@pytest.mark.slow
@pytest.mark.usefixtures("_passes_in_turns")
@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "demo"])
def test_members_of_a_group_may_compile(tmp_path: Path, strategy: str) -> None:
    final = {}
    for compiling in ("off", "on"):
        plan = toy_plan(2, training={"compile": compiling}, strategy={"strategy": strategy})

        def start(exchange: RoomExchange, plan: Any = plan, folder: str = compiling) -> Trainer:
            task = ToyTask()
            task.prepare(lambda *_: None)
            events: list[Event] = []
            trainer = Trainer(plan, exchange.rank, task, exchange, events.append, Control(), tmp_path / folder)
            trainer.run()
            assert warnings(events) == []
            return trainer

        members, _ = together(2, start)
        vectors = [torch.cat([p.detach().reshape(-1) for p in members[rank].parameters]) for rank in (0, 1)]
        assert torch.equal(*vectors)
        final[compiling] = vectors[0]
    torch.testing.assert_close(final["on"], final["off"], rtol=0, atol=1e-4)
    assert graphs() >= 1


@pytest.mark.slow
def test_code_for_backward_that_cannot_be_made_is_a_compilers_failure_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=refuses))
    eager = train(toy_plan(training={**COMPILED, "compile": "off"}), tmp_path / "a")
    found = train(toy_plan(training=COMPILED), tmp_path / "b")
    assert losses(found[1]) == losses(eager[1]) and len(warnings(found[1])) == 1
