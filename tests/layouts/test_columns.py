"""Members of several devices each: what one member exchanges with the others, it exchanges device by device."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.plan_table import way_text
from profiles.errors import BadInput, ExitCode, RunFailed
from tests.layouts.deep_model import deep_model
from tests.layouts.staged_records import (
    Record,
    assert_same_showcase,
    assert_same_weights,
    plan_of,
    resumed,
    stop_soon,
    tied_llama,
    trained,
    weights_in,
)
from tests.training.memory_exchange import RoomExchange, together
from training.exchange.base import ExchangeDropped, MeanResult, SoloExchange
from training.exchange.codecs import codec_by_name
from training.layouts.columns import ColumnExchange, check_in_parts
from training.layouts.staged import StagedModel
from training.loop.train_member import train
from training.loop.trainer import Trainer
from training.records.events import EvaluationEvent, Event, MemberEvent, PeerPath, StepEvent, WarningEvent, WaysEvent
from training.records.plan import DevicePlan, RunPlan
from training.run.intake import COORDINATOR
from training.run.meeting_point import columns_of
from training.run.members.membership import Membership, WorkerHandle
from training.run.orders import Control
from training.run.run_controller import RunController
from training.strategies.base import Strategy
from training.strategies.registry import strategy_class

CUSTOM: dict[str, Any] = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job", "codec": "fp32"}


def cut_at(plan: RunPlan, *bounds: tuple[int, int]) -> RunPlan:
    """Return a plan in which the devices of each member have these blocks."""

    def cut(device: DevicePlan, blocks: tuple[int, int]) -> DevicePlan:
        return device.model_copy(update={"blocks": blocks})

    members = [m.model_copy(update={"devices": tuple(map(cut, m.devices, bounds))}) for m in plan.members]
    return plan.model_copy(update={"members": tuple(members)})


def steps_of(record: Record) -> dict[tuple[int | None, int], tuple[float, float | None]]:
    """Loss and gradient norm, by member and step."""
    steps = record.of(StepEvent)
    figures = {(event.member, event.step): (event.loss, event.grad_norm) for event in steps}
    assert len(figures) == len(steps)
    return figures


def assert_same_run(run: Record, whole: Record) -> None:
    assert run.outcome.status == "completed", run.outcome.message
    figures, expected = steps_of(run), steps_of(whole)
    assert {member for member, _ in figures} == {0, 1}
    for key, pair in figures.items():
        assert pair == pytest.approx(expected[key], rel=1e-6)
    losses, expected_losses = ([event.loss for event in record.of(EvaluationEvent)] for record in (run, whole))
    assert losses == pytest.approx(expected_losses[-len(losses) :], rel=1e-6)
    assert_same_weights(run, whole)
    assert_same_showcase(run, whole)


@pytest.mark.slow
def test_diloco_between_members_of_two_uneven_devices(tmp_path: Path) -> None:
    options = {**CUSTOM, "strategy": "diloco", "sync_interval": 2}
    whole = trained(tmp_path / "whole", plan_of(2, **options, layout="replicate"), in_threads=True)
    run = trained(tmp_path, cut_at(plan_of(4, **options, stages=2), (0, 4), (4, 5)))
    assert_same_run(run, whole)
    assert {len(step.stages) for step in run.of(StepEvent)} == {2}
    samples = [event.samples for event in run.of(EvaluationEvent)]
    assert samples == [event.samples for event in whole.of(EvaluationEvent)]


@pytest.mark.slow
def test_allreduce_between_members_whose_devices_tie_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**tied_llama(tmp_path, blocks=3, lines=40), "codec": "fp32", "strategy": "allreduce"}
    options |= {"verify_interval": 2}
    whole = trained(tmp_path / "whole", plan_of(2, **options, layout="replicate"), in_threads=True)
    align_ties, compared = StagedModel.align_ties, list[int]()

    def note_comparison(layout: StagedModel, strategy: Strategy) -> None:
        compared.append(layout.part[0])
        align_ties(layout, strategy)

    monkeypatch.setattr(StagedModel, "align_ties", note_comparison)
    run = trained(tmp_path, plan_of(4, **options, stages=2), in_threads=True)
    assert_same_run(run, whole)
    assert not run.of(WarningEvent)
    assert Counter(compared) == {0: 8, 1: 8}  # by two members: after the first step, two and four, and at the end


@pytest.mark.slow
def test_adapters_of_members_of_two_devices_go_on_from_their_snapshots(tmp_path: Path) -> None:
    options = {**tied_llama(tmp_path, blocks=2, lines=40), "tuning": "lora", "lora_dropout": 0}
    options |= {"strategy": "diloco", "sync_interval": 2, "eval_interval": 0}
    never_stopped = trained(tmp_path / "never", plan_of(4, **options, stages=2), in_threads=True)
    first = trained(tmp_path, plan_of(4, **options, stages=2), stop_soon, in_threads=True)
    assert first.outcome.status == "cancelled"
    rest = resumed(first.outcome.run_dir, in_threads=True)
    assert len(steps_of(rest)) + len(steps_of(first)) == len(steps_of(never_stopped))
    assert_same_run(rest, never_stopped)


def staged(workers: int = 4, **options: Any) -> RunPlan:
    return plan_of(workers, **{"task": "custom", "model_path": "a:b", "stages": 2, **options})


def test_devices_that_hold_the_same_part_are_a_column() -> None:
    plan = staged(batch_size=6)
    assert [(m.batch_size, len(m.devices)) for m in plan.members] == [(6, 2), (6, 2)]
    assert columns_of(plan) == [(0, 2), (1, 3)]
    assert [process.folder for process in plan.processes] == [
        "member-0", "member-0-stage-2", "member-1", "member-1-stage-2"
    ]  # fmt: skip
    assert plan.has_coordinator
    machines = (DevicePlan(machine="a"), DevicePlan(machine="b"))
    both = plan.model_copy(update={"members": tuple(m.model_copy(update={"devices": machines}) for m in plan.members)})
    assert len({process.name for process in both.processes}) == 4
    assert both.processes[3].name == "b-member-1-stage-2"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stages": 3}, "cannot divide 4 devices into members of stages = 3"),
        ({"stages": 1}, "needs members of 2 devices or more"),
        ({"layout": "auto"}, "stages = 2 is for a pipeline, and layout = auto"),
        ({"layout": "shard"}, "stages = 2 is for a pipeline, and layout = shard"),
        ({"strategy": "zero1"}, "zero1, which limits gradients by the norm"),
        ({"strategy": "demo"}, "demo, which limits gradients by the norm"),
        ({"strategy": "async_diloco"}, "async_diloco, which lets each member"),
        ({"strategy": "allreduce", "allreduce.compressor": "dgc"}, "compressor = dgc limits gradients"),
        ({"engine": "nccl"}, "not engine = nccl"),
        ({"shares": "1,1,1,1"}, 'shares = "1,1,1,1" does not fit 2 members'),
    ],
)
def test_what_does_not_go_with_several_members_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        staged(**options)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"strategy": "diloco", "codec": "bf16"}, ""),
        ({"strategy": "allreduce", "codec": "fp32"}, ""),
        ({"strategy": "diloco", "codec": "int8"}, "diloco with codec = int8 would not keep"),
        ({"strategy": "streaming_diloco", "codec": "fp32"}, "streaming_diloco with codec = fp32 would not keep"),
        ({"strategy": "allreduce", "codec": "fp32", "allreduce.compressor": "powersgd"}, "allreduce with codec = fp32"),
        ({"strategy": "diloco", "codec": "bf16", "error_feedback": True}, "set error_feedback = false"),
    ],
)
def test_a_weight_of_two_columns_must_stay_alike(options: dict[str, Any], refusal: str) -> None:
    settings = staged(**options).profile.strategy
    check_in_parts(strategy_class(settings.strategy), settings, ties=False)
    with pytest.raises(BadInput, match=refusal) if refusal else nullcontext():
        check_in_parts(strategy_class(settings.strategy), settings, ties=True)


def test_a_device_that_its_column_has_dropped_ends_as_its_member_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop(trainer: Trainer) -> ExitCode:
        raise ExchangeDropped("dropped from the group: too far behind")

    monkeypatch.setattr(Trainer, "__init__", lambda *arguments: None)
    monkeypatch.setattr(Trainer, "giving_way", None, raising=False)
    monkeypatch.setattr(Trainer, "run", drop)
    exchanges, plan = iter([SoloExchange()]), staged()
    with pytest.raises(RunFailed, match="too far behind") as failure:  # and joins no second time
        train(plan, 1, cast(Any, None), lambda: next(exchanges), tmp_path, [].append, Control())
    assert failure.value.machine == plan.process(1).name


def test_a_column_is_an_exchange_of_members() -> None:
    def exchange(mesh: RoomExchange) -> tuple[int, MeanResult, dict[int, bytes]]:
        """Exchange among the processes 1 and 3 of four, members 0 and 1 of their column."""
        column = ColumnExchange(mesh, [0, 2] if mesh.rank % 2 == 0 else [1, 3])
        values, everybody = torch.full((2,), float(column.rank)), (0, 1)
        mean = column.mean("mean", values, 1.0, codec_by_name("fp32"), members=everybody)
        return column.rank, mean, column.gather("gather", bytes([column.rank]), members=everybody)

    results, _ = together(4, exchange)
    assert [results[process][0] for process in range(4)] == [0, 0, 1, 1]
    for _, mean, gathered in results.values():
        assert (mean.mean.tolist(), mean.members, mean.refused) == ([0.5, 0.5], (0, 1), ())
        assert gathered == {0: b"\0", 1: b"\1"}


def test_a_member_is_lost_with_any_of_its_devices() -> None:
    membership = Membership(staged())
    membership.workers = {rank: WorkerHandle(cast("Any", None)) for rank in range(4)}
    assert membership.can_continue_without(3)
    assert membership.note_lost(3)
    assert not membership.note_lost(2)
    assert membership.lost_members == [1]
    assert not membership.can_continue_without(0)
    assert membership.note_gone(3)
    assert not membership.note_gone(2)
    assert not membership.note(COORDINATOR, MemberEvent(member=2, status="left"))


def test_the_loss_of_a_member_that_fails_is_news_though_its_devices_have_left() -> None:
    membership = Membership(staged())
    for rank in (3, 2):  # as the coordinators say it, before a device says why
        membership.note(COORDINATOR, MemberEvent(member=rank, status="left"))
    membership.forget_left(2)
    assert membership.note_lost(2)
    assert membership.note_gone(2)


def test_a_plan_says_which_devices_are_one_member() -> None:
    plan = cut_at(staged(strategy="diloco", sync_interval=20), (0, 3), (3, 5))
    devices = "worker-0-stage-1 and worker-0-stage-2; worker-1-stage-1 and worker-1-stage-2"
    held = f"2 members hold the model, each divided over its devices ({devices}): layers 1-3, 4-5"
    assert way_text(plan) == f"{held}; the members merge what they have learnt every 20 steps."


def test_paths_between_devices_are_those_between_members() -> None:
    ways = WaysEvent(member=3, ways=(PeerPath(peer=1, name="worker-0-stage-2", how="dialled"),))
    attributed = Membership(staged()).attributed(ways)
    assert isinstance(attributed, WaysEvent)
    assert (attributed.member, attributed.ways[0].peer, attributed.ways[0].name) == (1, 0, "worker-0-stage-2")


@pytest.mark.slow
def test_the_other_members_go_on_when_a_device_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    gate.write_text("13")  # the first micro-batch of the fourth step waits
    monkeypatch.setenv("DEEP_GATE", str(gate))

    def kill(run: RunController, event: Event) -> None:
        if isinstance(event, StepEvent) and (event.member, event.step) == (0, 3):
            os.kill(run.members.workers[0].process.pid, signal.SIGKILL)
            gate.write_text("1000")

    run = trained(tmp_path, plan_of(4, **CUSTOM, stages=2, strategy="allreduce"), kill)
    assert run.outcome.status == "completed", run.outcome.message
    (loss,) = [event for event in run.of(MemberEvent) if event.status == "lost"]
    assert (loss.member, loss.name) == (0, "worker-0-stage-1")
    assert sorted(step for member, step in steps_of(run) if member == 1) == [1, 2, 3, 4, 5]
    assert run.outcome.metrics["lost_members"] == [0]
    assert weights_in(run.outcome.run_dir).keys() == {name for name, _ in deep_model().named_parameters()}
