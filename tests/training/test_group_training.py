"""Several members over a real mesh: what strategies promise to a run."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from group import Member, Serve, run_group, run_member
from memory_exchange import Room, RoomExchange
from toy_task import ToyTask, toy_plan

from profiles.errors import ExitCode
from training.exchange.base import SoloExchange
from training.exchange.mean.mesh_member import MeshMember
from training.records.events import EvaluationEvent, StepEvent, SyncEvent, WarningEvent
from training.records.plan import RunPlan
from training.run.orders import Command, Control
from training.strategies.weights import weight_hash

pytestmark = pytest.mark.slow

STREAMING = {
    "strategy": "streaming_diloco",
    "owned": {"streaming_diloco": {"sync_interval": 4, "fragments": 2, "sync_delay": 3, "merge": "rda"}},
}
"""Two fragments are under way most of the time."""
OWN_PACE = {"strategy": "async_diloco", "owned": {"async_diloco": {"sync_interval": 5, "meet_every": 1}}}


def alone(plan: RunPlan, run_dir: Path) -> Member:
    return run_group(plan, lambda _: SoloExchange(), lambda _: ToyTask(), run_dir)[0]


def weights(member: Member) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in member.trainer.parameters])


def losses(member: Member) -> list[float]:
    return [event.loss for event in member.events if isinstance(event, StepEvent)]


def check_no_errors(members: dict[int, Member]) -> None:
    assert [member.error for member in members.values()] == [None] * len(members)


@pytest.mark.parametrize("shares", ["", "3,1"], ids=["equal", "3 to 1"])
def test_allreduce_equals_one_worker_with_the_joint_batch(tmp_path: Path, serve: Serve, shares: str) -> None:
    plan = toy_plan(2, run={"shares": shares}, strategy={"bucket_mb": 0.0002, "verify_interval": 4})
    members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    joint = alone(toy_plan(1, training={"batch_size": 8}), tmp_path / "alone")
    assert torch.equal(weights(members[0]), weights(members[1]))
    torch.testing.assert_close(weights(members[0]), weights(joint), rtol=0, atol=1e-5)


def test_zero1_equals_it_too_with_a_part_of_the_state_on_each(tmp_path: Path, serve: Serve) -> None:
    training = {"max_grad_norm": 0.05, "weight_decay": 0.1}
    plan = toy_plan(3, training=training, strategy={"strategy": "zero1", "verify_interval": 4})
    members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    joint = alone(toy_plan(1, training=training | {"batch_size": 12}), tmp_path / "alone")
    for member in members.values():
        torch.testing.assert_close(weights(member), weights(joint), rtol=1e-6, atol=1e-6)
        syncs = [e for e in member.events if isinstance(e, SyncEvent)]
        assert [(e.drift, e.correlation) for e in syncs] == [(0.0, 1.0)] * 4
        assert all(e.compression is None or 0.3 < e.compression <= 1.0 for e in syncs) and syncs[0].compression
        told, expected = ([e.grad_norm for e in m.events if isinstance(e, StepEvent)] for m in (member, joint))
        assert told == pytest.approx(expected, rel=1e-4) and min(filter(None, told)) > 0.05
    kept = [
        sum(v.numel() for s in m.trainer.optimizer.state.values() for v in s.values() if v.dim())
        for m in members.values()
    ]
    assert sum(kept) == 2 * weights(joint).numel() and max(kept) == 2 * 96  # of 129


def test_islands_meet_and_end_with_one_model(tmp_path: Path, serve: Serve) -> None:
    own = {"fedavg": {"sync_interval": 3, "island_size": 2, "fraction": 0.5}}
    plan = toy_plan(4, strategy={"strategy": "fedavg", "owned": own}, evaluation={"eval_interval": 6})
    members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    assert len({tuple(weights(member).tolist()) for member in members.values()}) == 2
    saved = torch.load(tmp_path / "model" / "weights.pt")
    mean = torch.stack([weights(member) for member in members.values()]).mean(0)
    torch.testing.assert_close(torch.cat([value.reshape(-1) for value in saved.values()]), mean)
    evaluated = [e.step for member in members.values() for e in member.events if isinstance(e, EvaluationEvent)]
    assert sorted(evaluated) == [6, 12]


def test_allreduce_over_an_uneven_epoch_sees_every_sample_once(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(2, training={"max_steps": 0, "epochs": 1}, run={"shares": "3,1"})
    tasks = {rank: ToyTask(samples=45) for rank in range(2)}
    members = run_group(plan, serve(plan), tasks.__getitem__, tmp_path)
    check_no_errors(members)
    assert sorted(tasks[0].seen + tasks[1].seen) == list(range(45))


def test_different_weights_at_the_start_are_equalised(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(2, strategy={"verify_interval": 1})

    def own_start(rank: int) -> ToyTask:
        task = ToyTask()
        task.start_seed = rank
        return task

    members = run_group(plan, serve(plan), own_start, tmp_path)
    check_no_errors(members)
    assert torch.equal(weights(members[0]), weights(members[1]))


def test_weights_that_drift_apart_are_mended_and_said(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(2, strategy={"verify_interval": 2})

    class Drifting(ToyTask):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.drift = 1e-6 * (rank + 1)

        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            if model.training:
                with torch.no_grad():
                    next(model.parameters()).add_(self.drift)
            return super().loss(model, batch)

    members = run_group(plan, serve(plan), Drifting, tmp_path)
    check_no_errors(members)
    assert torch.equal(weights(members[0]), weights(members[1]))
    messages = [e.message for m in members.values() for e in m.events if isinstance(e, WarningEvent)]
    assert any("weights differed" in message for message in messages)


def test_diloco_synchronises_first_after_exactly_h_steps(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(2, strategy={"strategy": "diloco", "sync_interval": 5, "codec": "fp32"})
    members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    syncs = [event for event in members[0].events if isinstance(event, SyncEvent)]
    assert [event.step for event in syncs] == [5, 10, 12]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "mxfp4"])
def test_diloco_ends_with_the_same_bits_everywhere(tmp_path: Path, serve: Serve, codec: str) -> None:
    plan = toy_plan(3, strategy={"strategy": "diloco", "sync_interval": 4, "codec": codec, "error_feedback": True})
    members = run_group(plan, serve(plan), lambda _: ToyTask(dropout=0.1), tmp_path)
    check_no_errors(members)
    assert torch.equal(weights(members[0]), weights(members[1]))
    assert torch.equal(weights(members[0]), weights(members[2]))


def test_an_overlapped_exchange_keeps_the_steps_made_meanwhile(tmp_path: Path, serve: Serve) -> None:
    options = {"strategy": "diloco", "sync_interval": 4, "sync_delay": 2, "codec": "fp32"}
    plan = toy_plan(2, strategy=options, evaluation={"eval_interval": 4})
    members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    syncs = [[(e.step, e.weight_hash) for e in m.events if isinstance(e, SyncEvent)] for m in members.values()]
    assert [step for step, _ in syncs[0]] == [6, 10, 12]
    assert syncs[0] == syncs[1]
    since = members[0].trainer.position.since  # the mean that arrived after step 10 began two steps before
    assert since is not None and since.step == 8
    assert torch.equal(weights(members[0]), weights(members[1]))


@pytest.mark.parametrize(
    "strategy",
    [
        {"strategy": "allreduce", "codec": "int8", "error_feedback": True},
        {"strategy": "diloco", "sync_interval": 4, "sync_delay": 3},
        STREAMING,
    ],
    ids=["allreduce int8 with feedback", "diloco overlapped", "streaming"],
)
def test_a_resumed_group_gives_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, serve: Serve, strategy: dict[str, Any]
) -> None:
    """What each strategy saves is that of all (``test_every_strategy.py``); here the trainer and the mesh do it."""
    whole_plan = toy_plan(2, strategy=strategy)
    whole = run_group(whole_plan, serve(whole_plan), lambda _: ToyTask(), tmp_path / "whole")
    check_no_errors(whole)

    def stopping(rank: int) -> Control:
        control = Control()
        control.post(Command(command="stop", at_step=6))
        return control

    first_plan = toy_plan(2, strategy=strategy)
    first = run_group(first_plan, serve(first_plan), lambda _: ToyTask(), tmp_path / "cut", stopping)
    assert {member.ending for member in first.values()} == {ExitCode.STOPPED}
    rest_plan = toy_plan(2, strategy=strategy, resume=True)
    rest = run_group(rest_plan, serve(rest_plan), lambda _: ToyTask(), tmp_path / "cut")
    check_no_errors(rest)
    for rank in range(2):
        assert losses(first[rank]) + losses(rest[rank]) == pytest.approx(losses(whole[rank]), abs=1e-6)


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "local_sgd", "zero1"])
def test_a_member_without_the_others_snapshot_takes_it_over(tmp_path: Path, serve: Serve, strategy: str) -> None:
    own = {"local_sgd": {"sync_interval": 4}}
    options = {"strategy": strategy, "sync_interval": 4, "codec": "fp32", "owned": own}
    first = toy_plan(3, snapshot={"snapshot_interval": 4}, strategy=options)

    def leaving(rank: int) -> Control:
        control = Control()
        control.post(Command(command="stop", at_step=2 if rank == 1 else 8, at_sync=rank == 1, snapshot=rank != 1))
        return control

    check_no_errors(run_group(first, serve(first), lambda _: ToyTask(), tmp_path, leaving))
    again = toy_plan(3, snapshot={"snapshot_interval": 4}, strategy=options, resume=True)
    members = run_group(again, serve(again), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    assert [next(e.step for e in m.events if isinstance(e, StepEvent)) for m in members.values()] == [9, 9, 9]
    assert torch.equal(weights(members[0]), weights(members[1])) and torch.equal(
        weights(members[0]), weights(members[2])
    )
    assert sorted(members[0].trainer.position.batch_sizes) == [0, 1, 2]
    said = [e.message for m in members.values() for e in m.events if isinstance(e, WarningEvent)]
    assert said == ["worker-1 has no snapshot of step 8 and continues with the state of worker-0"]


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, 9), ({"strategy": "local_sgd", "owned": {"local_sgd": {"sync_interval": 4}}}, 5)],
    ids=["all hold the same", "each holds a state of its own"],
)
def test_members_take_the_newest_snapshot_that_serves_all(
    tmp_path: Path, serve: Serve, options: dict[str, Any], first: int
) -> None:
    plan = toy_plan(2, snapshot={"snapshot_interval": 4, "snapshot_keep": 3}, strategy=options)
    check_no_errors(run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path))
    damaged = tmp_path / "checkpoints" / "member-1" / "step-00000008" / "manifest.json"
    damaged.write_text(damaged.read_text()[:50])
    again = toy_plan(2, snapshot={"snapshot_interval": 4, "snapshot_keep": 3}, strategy=options, resume=True)
    members = run_group(again, serve(again), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    assert [next(e.step for e in m.events if isinstance(e, StepEvent)) for m in members.values()] == [first, first]


@pytest.mark.parametrize(
    "strategy", [{}, STREAMING, OWN_PACE], ids=["allreduce", "two fragments under way", "own pace"]
)
def test_a_member_that_fails_does_not_stop_the_others(tmp_path: Path, serve: Serve, strategy: dict[str, Any]) -> None:
    plan = toy_plan(3, training={"max_steps": 30}, strategy=strategy)

    class Failing(ToyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            if len(self.seen) > 12:
                raise RuntimeError("this member breaks")
            return super().loss(model, batch)

    members = run_group(plan, serve(plan), lambda rank: Failing() if rank == 2 else ToyTask(), tmp_path)
    assert str(members[2].error) == "this member breaks"
    assert [members[rank].ending for rank in (0, 1)] == [ExitCode.DONE] * 2
    assert torch.equal(weights(members[0]), weights(members[1]))
    assert sorted(members[0].trainer.position.batch_sizes) == [0, 1]


@pytest.mark.parametrize(("batch", "evaluated"), [(1, [5, 8, 12]), (11, [4, 8, 12])], ids=["between", "at the end"])
def test_who_stops_during_an_evaluation_leaves_no_half_of_it(
    tmp_path: Path, serve: Serve, batch: int, evaluated: list[int]
) -> None:
    plan = toy_plan(2, evaluation={"eval_interval": 4, "eval_batch_size": 1})
    controls = {0: Control(), 1: Control()}

    class Stopping(ToyTask):
        count = itertools.count(1)

        def evaluate(self, model: torch.nn.Module, samples: Any, generate: bool) -> dict[str, float]:
            if next(self.count) == batch:
                controls[1].post(Command(command="stop"))
            return super().evaluate(model, samples, generate)

    members = run_group(
        plan, serve(plan), lambda rank: Stopping() if rank else ToyTask(), tmp_path, controls.__getitem__
    )
    check_no_errors(members)
    assert {rank: member.ending for rank, member in members.items()} == {0: ExitCode.DONE, 1: ExitCode.STOPPED}
    told = [e for e in members[0].events if isinstance(e, EvaluationEvent)]
    assert [e.step for e in told] == evaluated and {e.samples for e in told} == {10}


@pytest.mark.parametrize(
    "strategy",
    [
        {"strategy": "allreduce"},
        {"strategy": "diloco", "sync_interval": 5},
        STREAMING,
        {"strategy": "zero1"},
        {"strategy": "fedavg", "owned": {"fedavg": {"sync_interval": 5}}},
        OWN_PACE,
    ],
    ids=["allreduce", "diloco", "two fragments under way", "zero1", "fedavg", "own pace"],
)
def test_a_newcomer_takes_the_anchor_and_trains_on_with_the_others(
    tmp_path: Path, serve: Serve, strategy: dict[str, Any]
) -> None:
    plan = toy_plan(2, training={"max_steps": 60}, strategy=strategy)
    connect = serve(plan)
    left, leaving, back = threading.Event(), Control(), {}
    leaving.post(Command(command="stop", at_step=10))

    class Patient(ToyTask):
        """Lets rank 0 make its last 35 steps only when the newcomer is in."""

        steps = 0

        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            self.steps += 1
            if self.steps == 25:
                left.set()
                deadline = time.monotonic() + 60
                while not exchange.must_publish_state and time.monotonic() < deadline:
                    time.sleep(0.01)
            return super().loss(model, batch)

    exchange = None

    def connected(rank: int) -> MeshMember:
        nonlocal exchange
        member = connect(rank)
        if rank == 0:
            exchange = member
        return member

    def come_back() -> None:
        left.wait(60)
        back[1] = run_member(plan, 1, connect(1), ToyTask(), tmp_path / "back", Control(), [])

    newcomer = threading.Thread(target=come_back)
    newcomer.start()
    controls = {0: Control(), 1: leaving}
    members = run_group(
        plan, connected, lambda rank: Patient() if rank == 0 else ToyTask(), tmp_path, controls.__getitem__
    )
    newcomer.join(60)
    check_no_errors({0: members[0]} | back)
    assert members[1].ending is ExitCode.STOPPED
    assert back[1].ending is ExitCode.DONE
    assert 10 < next(e.step for e in back[1].events if isinstance(e, StepEvent)) < 60
    assert sorted(members[0].trainer.position.batch_sizes) == [0, 1]
    assert torch.equal(weights(members[0]), weights(back[1]))


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "local_sgd", "zero1"])
def test_a_member_without_a_sample_takes_part_under_loss_scaling(tmp_path: Path, serve: Serve, strategy: str) -> None:
    plan = toy_plan(
        2,
        training={"max_steps": 0, "epochs": 1, "mixed_precision": "fp16"},
        run={"shares": "3,1"},
        strategy={"strategy": strategy, "sync_interval": 2},
    )
    members = run_group(plan, serve(plan), lambda _: ToyTask(samples=10), tmp_path)
    check_no_errors(members)
    assert min(e.samples for e in members[1].events if isinstance(e, StepEvent)) == 0
    assert torch.equal(weights(members[0]), weights(members[1]))


def test_early_stopping_ends_a_group(tmp_path: Path, serve: Serve) -> None:
    plan = toy_plan(
        2,
        training={"max_steps": 200, "learning_rate": 1.0, "max_grad_norm": 0, "lr_schedule": "constant"},
        evaluation={"eval_interval": 2, "early_stopping_patience": 2},
    )
    members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    assert members[0].trainer.position.step == members[1].trainer.position.step < 200
    assert torch.equal(weights(members[0]), weights(members[1]))


def test_members_with_a_pace_of_their_own_go_on_from_where_all_met(tmp_path: Path, serve: Serve) -> None:
    def stopping(rank: int) -> Control:
        control = Control()
        control.post(Command(command="stop", at_step=6))
        return control

    own = {"sync_interval": 5, "meet_every": 8}  # a stop does not wait for the eighth interval
    strategy = OWN_PACE | {"owned": {"async_diloco": own}}
    first = toy_plan(2, strategy=strategy)
    stopped = run_group(first, serve(first), lambda _: ToyTask(), tmp_path, stopping)
    assert {member.ending for member in stopped.values()} == {ExitCode.STOPPED}
    again = toy_plan(2, strategy=strategy, resume=True)
    members = run_group(again, serve(again), lambda _: ToyTask(), tmp_path)
    check_no_errors(members)
    one, other, *ends = (member.trainer.position.step for member in (*stopped.values(), *members.values()))
    assert 6 <= one == other < 12 and ends == [12, 12]
    assert sum(len(losses(member)) for member in (*stopped.values(), *members.values())) == 24
    assert torch.equal(weights(members[0]), weights(members[1]))


def test_sparse_changes_over_a_mesh_give_the_bits_of_a_simulation(tmp_path: Path, serve: Serve) -> None:
    sparse = {
        "strategy": "sparseloco",
        "codec": "topk2bit:0.1",
        "owned": {"sparseloco": {"sync_interval": 1, "force": True}},
    }
    plan = toy_plan(2, training={"max_steps": 20}, strategy=sparse)
    meshed = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path / "mesh")
    room = Room(2, lambda name: ())
    simulated = run_group(plan, lambda rank: RoomExchange(room, rank), lambda _: ToyTask(), tmp_path / "room")
    check_no_errors(meshed)
    check_no_errors(simulated)
    assert len({weight_hash(weights(member)) for member in (*meshed.values(), *simulated.values())}) == 1
