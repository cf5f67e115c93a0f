"""A member that loses its group for good keeps the last step that it has done, and goes on from there."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from group import Connect, Member, Serve, run_group
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import ExitCode
from tests.distributed.muster_runs import Muster
from tests.waiting import until
from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending
from training.loop.last_step import LastStep
from training.loop.train_member import train
from training.records.events import SnapshotEvent, StepEvent, WarningEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.orders import Command, Control
from training.run.processes import processes_of
from training.strategies.registry import strategy_class
from training.strategies.weights import flatten

ALL = ["allreduce", "diloco", "local_sgd", "streaming_diloco", "sparta", "noloco", "fedavg", "zero1"]


class Lost(ToyTask):
    """Stops in a step of its training, until all members are in it or it may go on."""

    def __init__(self, step: int, meet: threading.Barrier | threading.Event) -> None:
        super().__init__()
        self._left, self._meet = step, meet

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        self._left -= model.training
        if self._left == 0 and model.training:
            self._meet.wait(60.0)
        return super().loss(model, batch)


def lose_group(plan: RunPlan, connect: Connect, folder: Path, step: int) -> dict[int, Member]:
    """Train until all lose one another in the middle of a step, and let them keep what they have."""
    exchanges: dict[int, Exchange] = {}

    def give_up() -> None:
        for exchange in exchanges.values():
            exchange.give_up("it is gone")

    def connected(rank: int) -> Exchange:
        exchanges[rank] = connect(rank)
        return exchanges[rank]

    meet = threading.Barrier(plan.world_size, give_up)
    members = run_group(plan, connected, lambda rank: Lost(step, meet), folder)
    for member in members.values():
        assert isinstance(member.error, ExchangeError)
        member.trainer.keep_last_step()
    return members


def kept(members: dict[int, Member]) -> list[int]:
    return [event.step for one in members.values() for event in one.events if isinstance(event, SnapshotEvent)]


def losses(member: Member) -> list[float]:
    return [event.loss for event in member.events if isinstance(event, StepEvent)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ALL)
def test_a_run_goes_on_from_where_all_lost_one_another(tmp_path: Path, serve: Serve, strategy: str) -> None:
    own = {} if strategy in ("allreduce", "diloco", "sparta", "zero1") else {strategy: {"sync_interval": 4}}
    options = {"strategy": strategy, "codec": "fp32", "sync_interval": 4, "owned": own}
    plan = toy_plan(2, strategy=options)
    members = lose_group(plan, serve(plan), tmp_path, 8)
    (step,) = set(kept(members))
    assert step == (7 if strategy in ("allreduce", "zero1") else 8)
    again = toy_plan(2, strategy=options, resume=True)
    rest = run_group(again, serve(again), lambda _: ToyTask(), tmp_path)
    assert [(member.error, len(losses(member))) for member in rest.values()] == [(None, 12 - step)] * 2


class LastMeans:
    """The means of an exchange under way: their results arrive before the group is lost, or are lost with it."""

    def __init__(self, exchange: Exchange, arrive: bool) -> None:
        self._exchange, self._start, self._arrive = exchange, exchange.start_mean, arrive
        self._pending: list[Result] = []
        # Replaced on this exchange alone, which is a real one otherwise.
        exchange.start_mean = self._remember  # type: ignore[method-assign]
        self._give_up, exchange.give_up = exchange.give_up, self.give_up  # type: ignore[method-assign]

    def _remember(self, *args: Any, **options: Any) -> Result:
        self._pending.append(Result(self._start(*args, **options)))
        return self._pending[-1]

    def give_up(self, reason: str) -> None:
        for result in self._pending:
            if self._arrive:
                result.wait()
            else:
                result.error = ExchangeError(reason)
        self._give_up(reason)


@dataclass
class Result:
    """The result of a mean, for which one can wait again."""

    pending: Pending[MeanResult]
    result: MeanResult | None = None
    error: ExchangeError | None = None

    def wait(self, timeout: float | None = None) -> MeanResult:
        if self.error is not None:
            raise self.error
        self.result = self.result or self.pending.wait(timeout)
        return self.result


@pytest.mark.slow
def test_who_lacks_the_result_of_the_last_exchange_gets_it_from_the_others(tmp_path: Path, serve: Serve) -> None:
    intervals = {"sync_interval": 4, "sync_delay": 2}
    options = {"strategy": "streaming_diloco", "codec": "fp32", "owned": {"streaming_diloco": intervals}}
    plan = toy_plan(2, strategy=options)
    connect = serve(plan)

    def connected(rank: int) -> Exchange:
        exchange = connect(rank)
        LastMeans(exchange, arrive=rank == 0)
        return exchange

    assert set(kept(lose_group(plan, connected, tmp_path, 6))) == {6}
    again = toy_plan(2, strategy=options, resume=True)
    rest = run_group(again, serve(again), lambda _: ToyTask(), tmp_path)
    assert [member.error for member in rest.values()] == [None, None]
    weights = [flatten(list(member.trainer.model.parameters())) for member in rest.values()]
    assert torch.equal(*weights)
    (warning,) = [event.message for event in rest[0].events if isinstance(event, WarningEvent)]
    assert warning == "worker-1 has no last exchange of step 6 and continues with the state of worker-0"


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["none", "powersgd", "dgc"])
def test_it_goes_on_as_if_nothing_had_been_lost(tmp_path: Path, serve: Serve, compressor: str) -> None:
    options = {"owned": {"allreduce": {"compressor": compressor}}}
    sgd = {"optimizer": "sgd"} if compressor == "dgc" else {}
    plan = toy_plan(2, sgd, strategy=options)
    whole = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path / "whole")
    first = lose_group(plan, serve(plan), tmp_path / "cut", 8)
    again = toy_plan(2, sgd, strategy=options, resume=True)
    rest = run_group(again, serve(again), lambda _: ToyTask(), tmp_path / "cut")
    for rank in range(2):
        assert losses(first[rank]) + losses(rest[rank]) == losses(whole[rank])


@pytest.mark.slow
def test_nothing_is_kept_of_a_step_that_is_half_done(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(2, strategy={"strategy": "demo"})
    assert kept(lose_group(plan, serve(plan), tmp_path, 8)) == []


@pytest.mark.slow
def test_who_waits_for_others_when_its_time_is_over_keeps_its_last_step(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(2)
    connect, control, over = serve(plan), Control(), threading.Event()
    events: list[Any] = []
    stuck = Lost(8, over)
    other = threading.Thread(
        target=lambda: train(plan, 0, stuck, lambda: connect(0), tmp_path, lambda event: None, Control()), daemon=True
    )
    task = ToyTask()
    for one in (stuck, task):
        one.prepare(lambda *_: None)

    def emit(event: object) -> None:
        events.append(event)
        if isinstance(event, StepEvent) and event.step == 7:
            control.post(Command(command="stop", at_step=8, reason="the lease is over", within=0.2))

    other.start()
    assert train(plan, 1, task, lambda: connect(1), tmp_path, emit, control) is ExitCode.STOPPED
    over.set()
    assert [event.step for event in events if isinstance(event, SnapshotEvent)] == [7]
    assert events[-1].message == "the lease is over"
    other.join(60)


def test_what_forward_passes_change_is_as_it_was_before_the_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    last = LastStep(model, torch.device("cpu"), strategy_class("allreduce"))
    last.begin()
    model(torch.randn(4, 3))
    last.stage = "between"
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen: list[torch.Tensor] = []
    for _ in range(2):
        last.begin()
        seen.append(torch.rand(3))
        model(torch.randn(4, 3))
        assert last.keep(lambda: None, pytest.fail)
        assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())
    assert torch.equal(*seen)


@contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


@pytest.mark.slow
def test_all_members_of_a_run_whose_process_is_killed_keep_what_they_have(tmp_path: Path) -> None:
    muster = Muster(tmp_path, tmp_path / "none.json", 0.02)
    words = muster.train("--max-steps", "100000", "--strategy", "diloco", "--sync-interval", "50")
    words[2:4] = ["--local", "2"]
    with muster.popen(*words) as starter, killed_at_end(starter):
        (folder,) = until(lambda: list((tmp_path / "output").glob("[!.]*/events.jsonl")))
        run_id = RunFolder.open(folder.parent).metadata.run_id
        muster.until_step(run_id, 20, members=2)
    until(lambda: processes_of(run_id) == [])
    for rank in range(2):  # the same step of both, if they heard of one another in time
        (one,) = folder.parent.glob(f"checkpoints/member-{rank}/step-*")
        assert one.name >= "step-00000020"
