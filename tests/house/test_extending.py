"""The examples of docs/how-to/extending.md: one text each, and everything else finds what it declares."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from app.cli.train.command import with_option_flags
from app.plan_table import explanation_lines, table_lines
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.documents.document import Job
from distributed.planning.planner import plan
from docs.make_options import markdown
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.options import options_by_name
from profiles.schema import Profile, StrategySettings
from tests.training.memory_exchange import RoomExchange, together
from tests.training.toy_task import ToyTask, toy_plan
from training.exchange import codecs
from training.exchange.codecs import registry as codec_registry
from training.loop.trainer import Trainer
from training.records.events import EvaluationEvent, Event, SyncEvent
from training.records.plan import RunPlan
from training.run.orders import Control
from training.strategies import registry as strategy_registry
from training.tasks import registry as task_registry
from training.tasks.base import Task

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extending.md"
EXAMPLES = dict(re.findall(r"## A (strategy|codec|task)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """The module that an example is, for one test."""
    module = types.ModuleType(f"extending_{request.param}")
    sys.modules[module.__name__] = module
    exec(compile(EXAMPLES[request.param], str(PAGE), "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]
    registry: Any = {"strategy": strategy_registry, "codec": codec_registry, "task": task_registry}[request.param]
    registry.forget({"strategy": "part", "codec": "sign", "task": "line"}[request.param])


def needs(what: str) -> Any:
    return pytest.mark.parametrize("example", [what], indirect=True)


def cluster() -> Cluster:
    machines = tuple(ClusterMachine(name=name, measurements=(Measurement(batch=8, seconds=1.0),)) for name in "ab")
    return Cluster(machines=machines, links=(Link(source="a", target="b", mbit=900.0, mbit_back=900.0, rtt_ms=0.6),))


def job(**more: Any) -> Job:
    return Job(**{"trainable": 39_000_000, "total": 39_000_000, "samples": 32_000} | more)


def help_text() -> str:
    """Return the words and helps of all options, those of ``--help-all`` too."""
    app = typer.Typer()
    app.command()(with_option_flags(_command))
    options: list[Any] = typer.main.get_command(app).params
    return "\n".join(f"{' '.join(option.opts)} {option.metavar} {option.help}" for option in options)


def _command(flags: dict[str, str]) -> None:
    """Train."""


def train(run: RunPlan, make: Callable[[], Task], folder: Path) -> list[tuple[Trainer, list[Event]]]:
    """Let two members train in threads of this process."""

    def body(exchange: RoomExchange) -> tuple[Trainer, list[Event]]:
        task, events = make(), list[Event]()
        task.prepare(lambda *_: None)
        trainer = Trainer(run, exchange.rank, task, exchange, events.append, Control(), folder)
        trainer.run()
        return trainer, events

    found, _ = together(run.world_size, body)
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
@needs("strategy")
@pytest.mark.usefixtures("example")
def test_a_strategy_trains_though_its_members_differ(tmp_path: Path) -> None:
    """Weights differ between members; evaluation and the model at the end are of the mean that all hold."""
    run = toy_plan(2, evaluation={"eval_interval": 4}, strategy={"strategy": "part", "owned": {"part": {"share": 0.5}}})
    tasks = [ToyTask(), ToyTask()]
    members = train(run, lambda: tasks.pop(), tmp_path)
    first, second = (torch.cat([p.detach().reshape(-1) for p in one.parameters]) for one, _ in members)
    assert not torch.equal(first, second)
    syncs = [event for event in members[0][1] if isinstance(event, SyncEvent)]
    assert len(syncs) == 12 and all(event.drift is not None for event in syncs)
    evaluations = [event for _, events in members for event in events if isinstance(event, EvaluationEvent)]
    for split in ("validation", "validation.local-0", "validation.local-1"):
        assert [event.step for event in evaluations if event.split == split] == [4, 8, 12]
    saved = torch.load(tmp_path / "model" / "weights.pt")
    mean = torch.cat([value.reshape(-1) for value in saved.values()])
    torch.testing.assert_close(mean, (first + second) / 2)


@needs("strategy")
@pytest.mark.usefixtures("example")
def test_a_strategy_is_planned_and_explained() -> None:
    planning = plan(cluster(), job())
    assert {one.choice.strategy for one in planning.ranking} == {"allreduce", "diloco", "part"}
    wanted = plan(cluster(), job(strategy="part", max_loss_increase=0.02))
    assert wanted.best is not None and wanted.settings is not None
    assert wanted.best.choice.strategy == "part" and wanted.best.loss_increase == 0.01
    whole = plan(cluster(), job(strategy="allreduce", codec="bf16")).ranking
    assert wanted.best.exchange < max(one.exchange for one in whole) / 5
    assert "part bf16" in "".join(table_lines(wanted))
    assert "nobody measured it" in " ".join(" ".join(explanation_lines(wanted)).split())
    assert wanted.settings.options["strategy"] == "part"
    assert not any(one.choice.strategy == "part" for one in plan(cluster(), job(max_loss_increase=0.001)).ranking)


@needs("strategy")
@pytest.mark.usefixtures("example")
def test_options_of_a_strategy_are_shown_checked_and_kept() -> None:
    assert "--part.share" in help_text() and ", part, " in help_text()
    page = markdown()
    assert "### part" in page and "| `part.share` | number | `0.1` |" in page
    assert options_by_name()["part.share"].limits == "> 0, <= 1"
    with pytest.raises(BadInput, match=r'part.share = "3": too large'):
        profile_from_options("p", {"part.share": "3"})
    profile = profile_from_options("p", {"strategy": "part", "part.share": "0.25"})
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    assert profile.strategy.model_dump()["owned"]["part"] == {"share": 0.25}


def test_a_run_that_began_before_a_strategy_was_added_goes_on() -> None:
    before = toy_plan(2)
    text = before.model_dump_json()
    exec(compile(EXAMPLES["strategy"], str(PAGE), "exec"), {"__name__": "tests.house.test_extending"})
    try:
        assert RunPlan.model_validate_json(text).hash() == before.hash()
    finally:
        strategy_registry.forget("part")
    assert RunPlan.model_validate_json(text) == before


@pytest.mark.slow
@needs("codec")
@pytest.mark.usefixtures("example")
def test_a_codec_is_sent_planned_and_shown(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -3.0, 2.0, -2.0])
    assert codecs.roundtrip(codecs.codec_by_name("sign"), values).tolist() == [2.0, -2.0, 2.0, -2.0]
    settings = {"strategy": "diloco", "codec": "sign", "sync_interval": 4, "error_feedback": True}
    members = train(toy_plan(2, strategy=settings), ToyTask, tmp_path)
    first, second = (torch.cat([p.detach().reshape(-1) for p in one.parameters]) for one, _ in members)
    assert torch.equal(first, second)
    best = next(one for one in plan(cluster(), job(codec="sign", strategy="diloco")).ranking if not one.choice.alone)
    assert best.choice.codec == "sign"
    sent = best.bytes_per_hour * best.step * best.choice.interval / 3600
    assert sent == pytest.approx(2 * (4 + 39_000_000 / 8), rel=1e-6)
    assert "mxfp4, sign, topk:SHARE" in help_text()
    assert "| `sign` | 1 bit an element" in markdown()
    assert profile_from_options("p", {"codec": "sign"}).strategy.codec == "sign"


@pytest.mark.slow
@needs("task")
@pytest.mark.usefixtures("example")
def test_a_task_trains_and_is_shown(tmp_path: Path) -> None:
    # Enough steps from any start: members that are threads share the generator that weights are drawn from.
    options = {"task": "line", "line.slope": "-1.5", "max_steps": "150", "learning_rate": "0.1", "batch_size": "8"}
    profile = profile_from_options("p", options | {"workers": "2", "warmup_steps": "0", "max_grad_norm": "0"})
    run = toy_plan(2).model_copy(
        update={"profile": profile.model_copy(update={"strategy": StrategySettings(strategy="allreduce")})}
    )
    train(run, lambda: task_registry.task_from_profile(profile), tmp_path)
    assert float((tmp_path / "model" / "slope.txt").read_text()) == pytest.approx(-1.5, abs=0.1)
    assert "--line.slope" in help_text()
    assert "### line" in markdown() and "| `line.points` | integer | `32` |" in markdown()
    assert options_by_name()["task"].choices == ("causal_lm", "custom", "hf", "line", "whisper")
    with pytest.raises(BadInput, match="task = whisper does not read it, only line"):
        profile_from_options("p", {"task": "whisper", "line.slope": "1"})


def test_nobody_but_its_file_knows_a_strategy_by_name() -> None:
    root, names = PAGE.parents[1], set(strategy_registry.strategies()) - {"demo"}  # which is a profile as well
    knowing = [
        f"{path.relative_to(root)}:{node.lineno}"
        for room in ("profiles", "training", "distributed", "app", "speech")
        for path in (root / room).rglob("*.py")
        if path.parent.name != "strategies" and any(name in path.read_text() for name in names)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert knowing == []
