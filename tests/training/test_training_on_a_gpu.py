"""Training on a CUDA device: what the CPU trains to, the same run after a resume, memory that really runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group import Serve, run_group
from test_trainer import losses, train
from toy_task import ToyTask, toy_plan

from training.hardware.machine_load import MachineLoad
from training.records.events import MachineEvent, WarningEvent
from training.run.orders import Command, Control
from training.snapshots.tensor_file import HostCopy, TensorFile
from training.strategies.registry import strategies
from training.tasks.base import Batch
from training.trial.short_run import facts, peak_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
GPU = torch.device("cuda", 0)
OFTEN = {"sync_interval": 4}
OWNED: dict[str, Any] = dict.fromkeys(("local_sgd", "diloco", "fedavg", "noloco", "streaming_diloco"), OFTEN) | {
    "sparseloco": {**OFTEN, "force": True}
}
OPTIONS: list[dict[str, Any]] = [
    *({"strategy": name} for name in sorted(strategies()) if name != "async_diloco"),
    {"strategy": "allreduce", "codec": "topk:0.1", "error_feedback": True},
    {"strategy": "allreduce", "codec": "mxfp4", "error_feedback": True},
    {"strategy": "allreduce", "owned": {"allreduce": {"compressor": "powersgd"}}},
    {
        "strategy": "allreduce",
        "owned": {"allreduce": {"compressor": "dgc", "dgc_share": 0.1}},
        "training": {"optimizer": "sgd"},
    },
    {"strategy": "diloco", "codec": "topk2bit:0.1", "error_feedback": True},
    {"strategy": "sparta + diloco"},
]


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in trainer.parameters])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_two_members_end_as_on_the_cpu(tmp_path: Path, serve: Serve, options: dict[str, Any]) -> None:
    found = {}
    strategy = {"verify_interval": 4, "owned": OWNED, **options}
    more = strategy.pop("training", {})
    for device in ("cpu", "cuda"):
        training = {"max_steps": 16, "device": device, "seed": 3, **more}
        plan = toy_plan(2, training=training, strategy=strategy)
        members = run_group(plan, serve(plan), lambda _: ToyTask(), tmp_path / device)
        assert [member.error for member in members.values()] == [None, None]
        assert members[0].trainer.device.type == device
        found[device] = weights(members[0].trainer)
        assert torch.equal(found[device], weights(members[1].trainer))
    start = torch.cat([parameter.detach().reshape(-1) for parameter in ToyTask().build_model().parameters()])
    apart, moved = ((found["cuda"] - other).abs().mean() for other in (found["cpu"], start))
    assert apart < 0.05 * moved


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    training = {"device": "cuda", "mixed_precision": "bf16"}
    _, whole = train(toy_plan(training=training), tmp_path / "a", ToyTask(dropout=0.3))
    control = Control()
    control.post(Command(command="stop", at_step=5))
    _, first = train(toy_plan(training=training), tmp_path / "b", ToyTask(dropout=0.3), control)
    _, rest = train(toy_plan(training=training, resume=True), tmp_path / "b", ToyTask(dropout=0.3))
    assert losses(first) + losses(rest) == losses(whole)


class Large(ToyTask):
    """Each sample takes three tenths of the device's memory for a moment."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        each = torch.cuda.get_device_properties(GPU).total_memory * 3 // 10
        torch.empty(len(batch["x"]) * each, dtype=torch.uint8, device=GPU)
        return super().loss(model, batch)


def test_a_step_whose_memory_runs_out_is_taken_in_smaller_passes(tmp_path: Path) -> None:
    training = {"device": "cuda", "max_steps": 2}
    whole, _ = train(toy_plan(training=training), tmp_path / "a")
    tight, events = train(toy_plan(training=training), tmp_path / "b", Large())
    torch.cuda.empty_cache()
    assert any("samples in one pass do not fit" in event.message for event in events if isinstance(event, WarningEvent))
    torch.testing.assert_close(weights(tight), weights(whole), rtol=0, atol=1e-6)


def test_what_the_gpu_tells_is_reported(tmp_path: Path) -> None:
    torch.ones(1, device=GPU)
    load = MachineLoad(GPU, tmp_path)
    load.event(0.0)
    event: MachineEvent = load.event(5.0)
    load.close()
    assert event.device_memory_used and event.celsius and 5 <= event.celsius <= 125 and event.throttled is not None
    assert event.meters and "gpu" in event.meters and event.joules is not None
    assert facts(GPU)["device"] == "cuda" and 0 < peak_memory(GPU) < facts(GPU)["memory_total"]


def test_a_snapshots_copy_is_pinned_and_stays_as_the_weights_go_on() -> None:
    weights = [torch.randn(1 << 22, device=GPU), torch.randn(7, 5, device=GPU).T, torch.ones(3)]
    file, copy = TensorFile({str(number): one for number, one in enumerate(weights)}), HostCopy(GPU)
    expected = b"".join(file.pieces())
    pieces = copy.take(file)
    for one in weights:
        one.zero_()
    torch.cuda.synchronize()
    assert b"".join(pieces) == expected
    assert all(memory.is_pinned() for memory in copy._memory)
