"""What a member of several devices is in a plan, and how its parts become one model folder."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from distributed.hosts.schema import Hosts, Machine
from distributed.launcher import DistributedLauncher
from distributed.planning.layouts.divided_plan import fit_locally
from distributed.planning.memory import fitting
from distributed.planning.memory.fitting import MemoryBudget, fit_to_budgets
from profiles.errors import BadInput, RunFailed
from profiles.files.resolve import profile_from_options
from tests.layouts.pipeline_runs import queue_carriers, side_by_side
from training.exchange.base import SoloExchange
from training.layouts.carrier import gather_among
from training.layouts.parts import _announced, collect_parts
from training.layouts.stages.bounds import bounds_of
from training.local_trainer import LocalTrainer
from training.loop.trainer import Trainer
from training.model.model_files import join_files
from training.records.plan import DevicePlan
from training.run.local_plan import plan_local_run, with_workers
from training.run.orders import Control
from training.snapshots.member_snapshots import MemberSnapshots
from training.snapshots.snapshot_store import Snapshot
from training.tasks.custom import CustomTask
from training.tasks.inputs.model_size import BlockSize, sum_of_blocks


def profile_of(**options: Any) -> Any:
    return profile_from_options("p", {"task": "custom", "model_path": "a:b", "layout": "pipeline", **options})


def test_workers_of_a_pipeline_are_the_devices_of_one_member() -> None:
    plan = plan_local_run(profile_of(batch_size=6), 3)
    assert [(member.batch_size, len(member.devices)) for member in plan.members] == [(6, 3)]
    assert [process.name for process in plan.processes] == [f"worker-0-stage-{number}" for number in (1, 2, 3)]
    assert [process.folder for process in plan.processes] == ["member-0", "member-0-stage-2", "member-0-stage-3"]
    assert [process.is_lead for process in plan.processes] == [True, False, False]
    assert plan.is_staged
    assert not plan.has_coordinator


def test_processes_of_other_runs_are_their_members() -> None:
    plan = plan_local_run(profile_of(layout="replicate"), 2)
    assert [(process.rank, process.name, process.folder) for process in plan.processes] == [
        (0, "worker-0", "member-0"), (1, "worker-1", "member-1")
    ]  # fmt: skip
    assert not plan.is_staged
    assert "blocks" not in plan.model_dump_json(exclude_defaults=True)


@pytest.mark.parametrize(
    ("options", "workers", "reason"),
    [
        ({}, 1, "needs 2 workers or more, not 1"),
        ({"strategy": "diloco"}, 2, "no use for diloco"),
        ({"engine": "nccl"}, 2, "engine = nccl"),
        ({"mixed_precision": "fp16"}, 2, "fp16"),
        ({"compile": "on"}, 2, "compile = on"),
        ({"shares": "1,2"}, 2, "shares"),
        ({"eval_local": "on"}, 2, "eval_local = on"),
        ({"optimizer": "muon"}, 2, "optimizer = muon"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(options: dict[str, Any], workers: int, reason: str) -> None:
    with pytest.raises(BadInput, match=f"layout = pipeline .*{reason}"):
        plan_local_run(profile_of(**options), workers)


@pytest.mark.parametrize(
    ("options", "option", "reason"),
    [
        ({"layout": "auto", "stages": 2}, "stages", "stages = 2 is for a pipeline, and layout = auto"),
        ({"stages": 1}, "layout", "layout = pipeline needs members of 2 devices or more, not stages = 1"),
        ({"offload": True}, "offload", "offload = true: only shards can be kept in main memory"),
        ({"simulate": 2}, "layout", "layout = pipeline is for workers that are not simulated"),
        ({"strategy": "diloco"}, "layout", "layout = pipeline has one member, no use for diloco"),
        ({"strategy": "demo", "stages": 2}, "layout", "layout = pipeline does not work with demo"),
        ({"layout": "shard", "optimizer": "adafactor"}, "layout", "optimizer = adafactor needs whole ones"),
    ],
)
def test_what_no_machines_could_train_is_refused_with_the_profile(
    options: dict[str, Any], option: str, reason: str
) -> None:
    with pytest.raises(BadInput, match=reason) as caught:
        profile_of(**options)
    assert caught.value.option == option and "\n" not in str(caught.value)
    with pytest.raises(BadInput, match=reason):
        LocalTrainer(nn.Linear(1, 1), [0.0]).fit(**{"layout": "pipeline", **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stages": 2}, "cannot divide 3 devices into members of stages = 2"),
        ({"layout": "tensor"}, "not for a, b: each"),
    ],
)
def test_what_listed_machines_could_not_train_is_refused_before_they_are_asked(
    options: dict[str, Any], reason: str
) -> None:
    hosts = Hosts(machines=(Machine(name="a", devices=("cpu", "cpu")), Machine(name="b", devices=("cpu",))))
    with pytest.raises(BadInput, match=reason):
        DistributedLauncher(hosts, profile_of(**options)).plan()


def test_a_pipeline_needs_real_workers() -> None:
    with pytest.raises(BadInput, match="layout = pipeline is for workers that are not simulated"):
        plan_local_run(profile_of(), 2, simulated=True)


def test_blocks_are_as_planned_or_about_equal() -> None:
    assert bounds_of([DevicePlan()] * 3, 16) == (0, 5, 11, 16)
    assert bounds_of([DevicePlan(blocks=(0, 7)), DevicePlan(blocks=(7, 9))], 9) == (0, 7, 9)
    for blocks in ((8, 9), (7, 10), None):
        with pytest.raises(BadInput, match="are not the 9 blocks"):
            bounds_of([DevicePlan(blocks=(0, 7)), DevicePlan(blocks=blocks)], 9)
    with pytest.raises(BadInput, match="a model of 2 blocks cannot lie on 3 devices"):
        bounds_of([DevicePlan()] * 3, 2)


def test_every_stage_gets_the_payloads_of_all() -> None:
    payloads = [b"first", b"", b"third" * 1000]
    gathered = side_by_side([partial(gather_among, carrier, payload) for carrier, payload in
                             zip(queue_carriers(3), payloads)])  # fmt: skip
    assert gathered == [payloads] * 3


def test_stages_with_folders_of_their_own_send_their_tensors_to_the_first(tmp_path: Path) -> None:
    contents = [b"first", bytes(range(256)) * 20_000, b""]  # of which the second travels in two pieces
    for number, content in enumerate(contents):
        folder = tmp_path / str(number) / f"stage-{number}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_text("the same")
    folders = [[tmp_path / str(number) / f"stage-{stage}" for stage in range(3)] for number in range(3)]
    side_by_side([partial(collect_parts, carrier, one) for carrier, one in zip(queue_carriers(3), folders)])
    assert [(folder / "model.safetensors").read_bytes() for folder in folders[0]] == contents
    assert not (tmp_path / "2" / "stage-1").exists()


@pytest.mark.parametrize("sizes", ['{"../model.safetensors": 1}', '{"code.py": 1}', '{"a.safetensors": -1}', "[]", "?"])
def test_a_stage_that_announces_something_else_is_refused(sizes: str) -> None:
    with pytest.raises(RunFailed, match="it sent something else where the names of its files belongs"):
        _announced(queue_carriers(2)[0], 1, sizes.encode())


def test_a_stage_whose_snapshot_cannot_be_written_is_named(tmp_path: Path) -> None:
    plan = plan_local_run(profile_of(model_path="tests.layouts.deep_model:deep_job"), 2)
    trainer = Trainer(plan, 1, CustomTask(plan.profile), SoloExchange(), lambda event: None, Control(), tmp_path)
    (tmp_path / "checkpoints").write_text("a file where the folder belongs")
    trainer.writer.begin(Snapshot(1, {}), plan.hash(), in_background=False)
    with pytest.raises(RunFailed) as caught:
        trainer.writer.wait(is_required=True)
    assert caught.value.machine == "worker-0-stage-2"


def test_parts_that_nobody_writes_any_more_go_with_the_others(tmp_path: Path) -> None:
    plan = plan_local_run(profile_of(), 3)
    for rank, step in itertools.product(range(3), (1, 2)):
        MemberSnapshots(tmp_path, plan, rank).own.save(Snapshot(step, {}), plan.hash())
    fewer, steps = with_workers(plan, 2), []
    for step in (3, 4, 5):
        for rank in range(2):
            MemberSnapshots(tmp_path, fewer, rank).own.save(Snapshot(step, {}), plan.hash())
        steps.append(MemberSnapshots(tmp_path, plan, 2).own.steps())
    assert steps == [[2, 1], [2], []]


def test_tensors_of_several_files_become_one_file(tmp_path: Path) -> None:
    first = {"b": torch.arange(3, dtype=torch.uint8), "embedding": torch.randn(2, 3)}
    tied = nn.ParameterDict({"embedding": nn.Parameter(first["embedding"].clone())})
    tied["a_head"] = tied["embedding"]
    safetensors.torch.save_file(first, tmp_path / "1", {"format": "pt"})
    safetensors.torch.save_model(tied, str(tmp_path / "2"))
    safetensors.torch.save_file({"c": torch.randn(4).bfloat16()}, tmp_path / "3")
    join_files([tmp_path / name for name in "123"], tmp_path / "all")
    joined = safetensors.torch.load_file(tmp_path / "all")
    assert joined.keys() == {"a_head", "b", "c"}  # the name that safetensors gives the weight of both
    assert torch.equal(joined["a_head"], first["embedding"])
    assert torch.equal(joined["b"], first["b"])


def test_memory_is_that_of_the_largest_stage() -> None:
    block = BlockSize(100_000_000, 100_000_000, 100_000_000, 1_000_000, 1000)
    size, budgets = sum_of_blocks([block] * 8, outputs=0, evaluation=0), [MemoryBudget("here", 9 << 30, "cuda")]
    options = {"fit_memory": "off", "workers": 2, "batch_size": 1}
    assert fit_to_budgets(profile_of(**options), size, budgets).tightest is None
    assert fit_to_budgets(profile_of(**{**options, "workers": 4, "stages": 2}), size, budgets).tightest is None
    with pytest.raises(BadInput, match="here"):
        fit_to_budgets(profile_of(**options, layout="replicate"), size, budgets)


def test_a_run_is_resumed_with_other_workers_if_they_hold_one_model() -> None:
    plan = plan_local_run(profile_of(), 3)
    for workers, layout in ((1, "replicate"), (2, "pipeline"), (4, "pipeline")):
        other = with_workers(plan, workers)
        assert (len(other.processes), other.profile.run.layout, other.hash()) == (workers, layout, plan.hash())
    assert with_workers(plan, 3) is plan
    with pytest.raises(BadInput, match="0 workers cannot train"):
        with_workers(plan, 0)
    for layout in ("pipeline", "shard"):
        with pytest.raises(BadInput, match=f"layout = {layout} needs 2 workers or more, not 1"):
            with_workers(plan, 1, layout)
    with pytest.raises(BadInput, match="goes on with the workers it began with"):
        with_workers(plan_local_run(profile_of(stages=2), 4), 3)
    with pytest.raises(BadInput, match="layout = pipeline .*fp16"):
        with_workers(plan_local_run(profile_of(layout="replicate", mixed_precision="fp16"), 1), 2)


def test_workers_that_cannot_hold_a_model_each_hold_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    block = BlockSize(100_000_000, 100_000_000, 100_000_000, 1_000_000, 1000)
    size, lines = sum_of_blocks([block] * 8, outputs=0, evaluation=0), list[str]()
    monkeypatch.setattr(fitting, "size_for", lambda profile: size)
    budgets = [MemoryBudget("here", 18 << 30, "cuda", 2)]
    profile = profile_of(fit_memory="off", workers=2, batch_size=1, layout="auto")
    assert fit_locally(profile, budgets, lines.append).run.layout == "pipeline"
    assert lines[-1].endswith("the model is divided over 2 workers")
    with pytest.raises(BadInput, match="here"):
        fit_locally(profile, [MemoryBudget("here", 6 << 30, "cuda", 2)], lines.append)
    assert fit_locally(profile, [MemoryBudget("here", 80 << 30, "cuda", 2)], lines.append).run.layout == "auto"


@pytest.mark.parametrize("machine", ["", "desktop"])
def test_each_part_of_a_snapshot_is_checked_by_one_process(machine: str, tmp_path: Path) -> None:
    plan = plan_local_run(profile_of(), 3)
    devices = tuple(DevicePlan(machine=machine) for _ in range(3))
    plan = plan.model_copy(update={"members": (plan.members[0].model_copy(update={"devices": devices}),)})
    ranks = [str(process.rank) if machine else "" for process in plan.processes]  # a folder for each of a far machine
    folders = [tmp_path / rank / "checkpoints" for rank in ranks]
    for process, folder in zip(plan.processes, folders):
        (folder / process.folder).mkdir(parents=True)
    stores = [MemberSnapshots(folder, plan, rank).to_check for rank, folder in enumerate(folders)]
    checked = [store.directory for parts in stores for store in parts if store.directory.exists()]
    assert sorted(checked) == sorted(folder / process.folder for process, folder in zip(plan.processes, folders))
