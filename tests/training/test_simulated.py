"""Members that take turns in one process: the bits of real processes, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.cli.train.request import TrainRequest
from app.cli.train.start import hosts_file_of, plan_of
from profiles.errors import BadInput, RunFailed
from profiles.files.resolve import profile_from_options
from tests.distributed.muster_runs import JOB
from tests.training.turns import in_turns
from training.exchange.codecs import codec_by_name
from training.local_trainer import LocalTrainer
from training.records.events import ErrorEvent, Event, RunEvent, StepEvent
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController
from training.simulated.baton import Baton
from training.simulated.exchange import OtherMemberFailed, SimulatedExchange, SimulatedGroup

CPU = torch.device("cpu")


class Net(nn.Module):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


class Pairs(list[tuple[torch.Tensor, torch.Tensor]]):
    """Input and sum; two classes."""

    @property
    def targets(self) -> list[bool]:
        return [float(total) > 0 for _, total in self]


def pairs() -> Pairs:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return Pairs(zip(inputs, inputs.sum(1, keepdim=True), strict=True))


def trainer(folder: Path, **how: Any) -> LocalTrainer:
    return LocalTrainer(Net(), pairs(), pairs(), loss=nn.functional.mse_loss, output_dir=folder, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "allreduce", "allreduce.compressor": "powersgd", "allreduce.powersgd_start": 2},
        {"strategy": "allreduce", "allreduce.compressor": "dgc", "allreduce.dgc_share": 0.1, "optimizer": "sgd"},
        {
            "strategy": "diloco",
            "sync_interval": 3,
            "sync_delay": 1,
            "codec": "mxfp4",
            "error_feedback": True,
            "split": "dirichlet:0.5",
            "batch_size": 3,
            "members": 3,
        },
        {"strategy": "sparta + diloco", "sync_interval": 3},
        {"strategy": "zero1", "transport": "tls"},
        {"strategy": "diloco", "sync_interval": 3, "members": 1},
        {"strategy": "fedavg", "fedavg.sync_interval": 3, "fedavg.island_size": 2, "fedavg.fraction": 0.5},
        {"strategy": "noloco", "noloco.sync_interval": 3},
    ],
)
def test_the_result_has_the_bits_of_real_processes(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"batch_size": 4, **options, "max_steps": 8, "threads": 1, "seed": 3}
    size = options.pop("members", 4 if options["strategy"] in ("fedavg", "noloco") else 2)
    real, simulated = trainer(tmp_path, workers=size), trainer(tmp_path, simulate=size)
    one, other = real.fit(**options).state_dict(), simulated.fit(**options).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert real.outcome is not None and simulated.outcome is not None
    assert real.outcome.metrics["after"] == simulated.outcome.metrics["after"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "diloco", "sync_interval": 4},
        {"strategy": "diloco", "sync_interval": 4, "split": "dirichlet:0.5"},
        {"strategy": "async_diloco", "async_diloco.sync_interval": 4, "async_diloco.speeds": "1,0.5,0.25"},
    ],
    ids=["global", "split", "own pace"],
)
def test_a_simulation_that_broke_off_goes_on_with_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    events: list[Event] = []

    def break_off(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 18:
            raise KeyError("a fault of the script")

    options = {**options, "max_steps": 24, "snapshot_interval": 7}
    trainer(tmp_path, simulate=3, on_event=events.append).fit(**options)
    with pytest.raises(KeyError):
        trainer(tmp_path, simulate=3, on_event=break_off).fit(**options)
    again: list[Event] = []
    trainer(tmp_path, simulate=3, on_event=again.append).fit(
        resume=max(tmp_path.iterdir(), key=lambda run: run.stat().st_ctime_ns)
    )
    assert losses(again) and losses(again).items() <= losses(events).items()


def losses(events: list[Event]) -> dict[tuple[int | None, int], float]:
    return {(event.member, event.step): event.loss for event in events if isinstance(event, StepEvent)}


def simulated_run(
    folder: Path, on_event: Callable[[RunController, Event], None], loss: str = "", max_steps: int = 20
) -> RunController:
    """Return a started run of three members; ``loss`` is code at the begin of its loss function."""
    job = folder / "job.py"
    text = JOB.format(pause=0.0, gate="", model="nn.Linear(2, 2)")
    job.write_text(text.replace("    time.sleep(0.0)\n", f"    {loss or 'pass'}\n"))
    options = {"task": "custom", "model_path": f"{job}:build", "batch_size": 4, "threads": 1}
    profile = profile_from_options("custom", {**options, "max_steps": max_steps, "output_dir": str(folder)})
    plan = plan_local_run(profile, 3, simulated=True)
    held = RunFolder.create(folder, plan, ["test"])
    run = RunController(plan, held, lambda event: on_event(run, event))
    run.start()
    return run


@pytest.mark.slow
def test_all_pause_after_the_same_step_and_go_on(tmp_path: Path) -> None:
    told: list[Event] = []

    def statuses() -> list[str]:
        return [event.status for event in told if isinstance(event, RunEvent)]

    def follow(run: RunController, event: Event) -> None:
        told.append(event)
        if isinstance(event, StepEvent) and (event.member, event.step) == (1, 3):
            run.command("pause")
        if isinstance(event, RunEvent) and event.status == "paused":
            run.command("resume")
        if isinstance(event, StepEvent) and statuses()[-2:] == ["paused", "running"]:
            run.request_stop("they went on")

    run = simulated_run(tmp_path, follow, max_steps=100_000)
    assert run.wait().status == "cancelled"
    last = {event.member: event.step for event in told if isinstance(event, StepEvent)}
    assert last.keys() == {0, 1, 2} and len(set(last.values())) == 1


@pytest.mark.slow
def test_a_member_that_fails_ends_the_run_with_its_own_cause_alone(tmp_path: Path) -> None:
    told: list[Event] = []
    failing = "if next(steps) == 8: raise ValueError('no such sound')"
    run = simulated_run(tmp_path, lambda run, event: told.append(event), failing)
    outcome = run.wait()
    assert outcome.status == "failed" and "no such sound" in outcome.message
    assert len([event for event in told if isinstance(event, ErrorEvent)]) == 1


def members(size: int, body: Callable[[SimulatedExchange], Any]) -> list[Any]:
    """Let every member do something; return what came of it, or what it raised."""
    room = SimulatedGroup(size, baton := Baton(CPU))
    return in_turns(room, baton, size, lambda rank: body(SimulatedExchange(room, rank)))


def test_everybody_has_random_generators_of_its_own() -> None:
    def draw(exchange: SimulatedExchange) -> list[float]:
        torch.manual_seed(exchange.rank)
        drawn = []
        for step in range(4):
            drawn.append(float(torch.rand(1)))
            exchange.gather(f"step/{step}", b"")
        return drawn

    drawn = members(3, draw)
    for rank in range(3):
        torch.manual_seed(rank)
        assert drawn[rank] == [float(torch.rand(1)) for _ in range(4)]


def test_islands_average_among_themselves_and_bytes_are_those_of_equal_shares() -> None:
    def mean(exchange: SimulatedExchange) -> tuple[list[float], int]:
        island = {0: (0, 1), 1: (0, 1), 2: (2, 3, 4)}.get(exchange.rank, (2, 3, 4))
        values = torch.full((600,), float(exchange.rank))
        found = exchange.mean("m", values, 1.0 + exchange.rank, codec_by_name("fp32"), members=island)
        return found.mean[:1].tolist(), exchange.traffic.bytes_sent

    means = members(5, mean)
    assert [value for (value,), _ in means] == pytest.approx([2 / 3, 2 / 3, *3 * [(2 * 3 + 3 * 4 + 4 * 5) / 12]])
    assert [sent for _, sent in means] == [2400, 2400, 3200, 3200, 3200]


def test_members_that_are_not_in_the_same_exchange_hear_of_it() -> None:
    found = members(3, lambda exchange: exchange.gather("left" if exchange.rank else "right", b""))
    assert all("the members wait for one another: left, right" in str(one) for one in found)


def test_who_waits_for_a_member_that_failed_ends() -> None:
    def fail(exchange: SimulatedExchange) -> None:
        if exchange.rank == 1:
            raise RunFailed("no memory")
        exchange.gather("a", b"")

    first, second, third = members(3, fail)
    assert (
        isinstance(first, OtherMemberFailed) and isinstance(third, OtherMemberFailed) and isinstance(second, RunFailed)
    )


def test_a_simulation_takes_this_machine_whatever_hosts_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "distributed_hosts.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert hosts_file_of(TrainRequest("nanogpt", {"simulate": "4"})) is None


def test_simulated_and_real_workers_do_not_go_together() -> None:
    with pytest.raises(BadInput, match="do not go together"):
        plan_of(TrainRequest("demo-scratch", {"simulate": "4", "workers": "2"}))
    for simulated in ({"simulate": "4"}, {"cluster": "laptops.json"}):
        with pytest.raises(BadInput, match="do not go together"):
            hosts_file_of(TrainRequest("demo-scratch", {"hosts": "hosts.json", **simulated}))
