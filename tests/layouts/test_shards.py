"""Plans of members whose devices each hold a shard of every weight, and the pieces of tensors in their snapshots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import GPT2Config, LlamaConfig

from app.plan_table import way_text
from distributed.planning.layouts import divided_plan
from distributed.planning.memory import fitting
from distributed.planning.memory.fitting import MemoryBudget
from profiles.errors import BadInput, RunFailed
from profiles.files.resolve import profile_from_options
from training.hardware.device import Precision
from training.layouts.inside.sharded import mixed, offload
from training.layouts.inside.shards import rows_of
from training.run.local_plan import plan_local_run, with_workers
from training.snapshots.member_snapshots import MemberSnapshots, Origin
from training.snapshots.pieces import Rows, weight_of
from training.snapshots.snapshot_store import Snapshot, SnapshotStore
from training.tasks.inputs.model_size import BlockSize, sum_of_blocks


def profile_of(**options: Any) -> Any:
    return profile_from_options("p", {"task": "custom", "model_path": "a:b", "layout": "shard", **options})


def test_its_workers_are_the_devices_of_one_member() -> None:
    plan = plan_local_run(profile_of(batch_size=6), 2)
    assert [(member.batch_size, len(member.devices)) for member in plan.members] == [(6, 2)]
    assert [process.name for process in plan.processes] == ["worker-0-shard-1", "worker-0-shard-2"]
    assert plan.is_staged
    slices = plan_local_run(profile_of(layout="tensor"), 2)
    assert [process.name for process in slices.processes] == ["worker-0-slice-1", "worker-0-slice-2"]
    devices = "worker-0-slice-1 and worker-0-slice-2"
    assert way_text(slices) == f"{devices}: a slice of every matrix on each; all compute each sample together."


@pytest.mark.parametrize(
    ("options", "workers", "reason"),
    [
        ({}, 1, "needs 2 workers or more, not 1"),
        ({"layout": "tensor"}, 1, "needs 2 workers or more, not 1"),
        ({"layout": "tensor", "optimizer": "muon"}, 2, "optimizer = muon needs whole ones"),
        ({"strategy": "diloco"}, 2, "no use for diloco"),
        ({"mixed_precision": "fp16"}, 2, "fp16"),
        ({"optimizer": "muon"}, 2, "optimizer = muon needs whole ones"),
        ({"optimizer": "adafactor"}, 2, "optimizer = adafactor needs whole ones"),
        ({"task": "causal_lm", "tuning": "lora", "base_precision": "int8"}, 2, "base_precision = int8 packs"),
    ],
)
def test_what_does_not_go_with_shards_is_refused(options: dict[str, Any], workers: int, reason: str) -> None:
    with pytest.raises(BadInput, match=f"layout = (shard|tensor) .*{reason}"):
        plan_local_run(profile_of(**options), workers)


def test_a_run_is_resumed_in_another_layout() -> None:
    plan = plan_local_run(profile_of(), 2)
    others = (3, "", "shard"), (2, "pipeline", "pipeline"), (2, "tensor", "tensor"), (1, "", "replicate")
    for workers, layout, expected in others:
        other = with_workers(plan, workers, layout)
        assert (len(other.processes), other.profile.run.layout, other.hash()) == (workers, expected, plan.hash())
    assert with_workers(plan, 2, "shard") is plan
    whole = plan_local_run(profile_of(layout="replicate"), 1)
    assert with_workers(whole, 2, "shard").is_staged
    with pytest.raises(BadInput, match="add --local 1"):
        with_workers(plan, 2, "replicate")
    with pytest.raises(BadInput, match="goes on with the workers it began with"):
        with_workers(plan_local_run(profile_of(layout="replicate"), 2), 2, "shard")


@pytest.mark.parametrize("total", [0, 1, 2, 5, 6, 7])
def test_rows_are_divided_as_torch_divides_them(total: int) -> None:
    weight = torch.arange(total)
    chunks = [*weight.chunk(3), *[weight[:0]] * 3][:3]
    assert [weight[rows.start : rows.end].tolist() for rows in (rows_of(total, rank, 3) for rank in range(3))] == [
        chunk.tolist() for chunk in chunks
    ]


WHOLE = {
    "model/w": torch.arange(14.0).view(7, 2), "optimizer/w/exp_avg": torch.arange(14.0).view(7, 2) / 8,
    "optimizer/w/step": torch.tensor(3.0), "rng/torch": torch.arange(4), "best/w": torch.ones(7, 2),
}  # fmt: skip


def cut(parts: int, number: int) -> tuple[dict[str, torch.Tensor], dict[str, Rows]]:
    """Return what one of so many devices has of the tensors, and its rows; one device has all."""
    if parts == 1:
        return WHOLE, {}
    rows = rows_of(7, number, parts)
    tensors = {name: tensor[rows.start : rows.end] if tensor.ndim == 2 else tensor for name, tensor in WHOLE.items()}
    return tensors, {"w": rows}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (5, 1), (1, 5)])
def test_each_device_reads_its_rows_whatever_wrote_them(before: int, after: int, tmp_path: Path) -> None:
    plan = plan_local_run(profile_of(), 5)
    for number in range(before):
        tensors, rows = cut(before, number)
        state = {"part": (number, before), "rows": rows}
        SnapshotStore(tmp_path / plan.processes[number].folder, 1).save(Snapshot(4, tensors, state), "plan")
    for number in range(after):
        expected, rows = cut(after, number)
        loaded = MemberSnapshots(tmp_path, plan, number).load(4, "plan", Origin(before, ()), lambda name: True, rows)
        assert loaded.tensors.keys() == expected.keys()
        assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())


def test_rows_that_no_part_has_are_an_error(tmp_path: Path) -> None:
    plan = plan_local_run(profile_of(), 2)
    tensors, rows = cut(2, 0)
    SnapshotStore(tmp_path / "member-0", 1).save(Snapshot(4, tensors, {"part": (0, 2), "rows": rows}), "plan")
    with pytest.raises(RunFailed, match="4 of 7 rows of .*w are here"):
        MemberSnapshots(tmp_path, plan, 0).load(4, "plan", Origin(2, ()), lambda name: True)


@pytest.mark.parametrize(
    ("names", "options", "layout"),
    [(("box", "box"), {}, "shard"), (("a", "b"), {}, "pipeline"), (("box", "box"), {"engine": "nccl"}, "refused")],
)
def test_gpus_of_one_machine_hold_shards_where_no_setting_fits_one(
    names: tuple[str, ...], options: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = BlockSize(100_000_000, 100_000_000, 100_000_000, 1_000_000, 1000)
    size = sum_of_blocks([block] * 8, outputs=0, evaluation=0)
    for module in (fitting, divided_plan):
        monkeypatch.setattr(module, "size_for", lambda profile: size)
    profile = profile_of(fit_memory="off", batch_size=1, layout="auto", **options)
    budgets = [MemoryBudget(name, 9 << 30, "cuda") for name in names]
    if layout == "refused":
        with pytest.raises(BadInput, match="it is not divided: a pipeline has one member: engine = nccl has nothing"):
            divided_plan.fit_or_divide(profile, budgets)
        return
    assert divided_plan.fit_or_divide(profile, budgets).run.layout == layout
    local = profile.model_copy(update={"run": profile.run.model_copy(update={"workers": 2})})
    lines: list[str] = []
    if names == ("box", "box"):
        assert divided_plan.fit_locally(local, budgets[:1], lines.append).run.layout == layout
    if layout == "shard":
        assert lines[0] == "layout = tensor is not taken: only published models have a plan of what can be divided"


@pytest.mark.parametrize(
    ("config", "batch_size", "layout", "reason"),
    [
        (LlamaConfig(), 8, "tensor", ""),
        (LlamaConfig(), 4000, "shard", "it would exchange for "),
        (LlamaConfig(num_attention_heads=1), 8, "shard", "num_attention_heads = 1 cannot be shared evenly"),
        (GPT2Config(), 8, "shard", "gpt2 has none"),
    ],
)
def test_gpus_of_one_machine_take_slices_where_these_exchange_less(
    config: Any, batch_size: int, layout: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.save_pretrained(tmp_path)
    block = BlockSize(100_000_000, 100_000_000, 100_000_000, 1_000_000, 100_000)
    size = sum_of_blocks([block] * 8, outputs=0, evaluation=0)
    for module in (fitting, divided_plan):
        monkeypatch.setattr(module, "size_for", lambda profile: size)
    profile = profile_of(
        fit_memory="off", batch_size=batch_size, layout="auto", task="causal_lm", model_path=str(tmp_path)
    )
    lines: list[str] = []
    fitted = divided_plan._inside(profile, [MemoryBudget("box", 900 << 30, "cuda")] * 2, lines.append)
    assert fitted is not None and fitted.run.layout == layout
    assert reason in "".join(lines)


def test_gpus_gather_in_16_bits_and_keep_shards_in_main_memory_if_asked() -> None:
    gpu: Any = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"))
    assert mixed(gpu).param_dtype is torch.bfloat16 and mixed(gpu).reduce_dtype is torch.float32
    assert mixed(Precision(torch.bfloat16, torch.device("cpu"))).param_dtype is None
    assert isinstance(offload(profile_of(offload=True), gpu), CPUOffloadPolicy)
    assert not isinstance(offload(profile_of(), gpu), CPUOffloadPolicy)
    with pytest.raises(BadInput, match="offload = true: cpu computes in main memory anyway"):
        offload(profile_of(offload=True), Precision(None, torch.device("cpu")))
    with pytest.raises(BadInput, match="offload = true: only shards can be kept in main memory"):
        plan_local_run(profile_of(offload=True, layout="pipeline"), 2)


def test_tensors_are_named_after_weights() -> None:
    names = ("model/a.b", "optimizer/a.b/exp_avg", "best/a.b", "strategy/a.b", "rng/torch")
    assert [weight_of(name) for name in names] == ["a.b", "a.b", "a.b", "", ""]
