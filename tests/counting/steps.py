"""What steps ask of the device: ``python -m tests.counting.steps CASES``, a list in JSON, prints what each counted.

A case has the options of ``toy_plan``, and ``workers``. Counted are the steps from :data:`FIRST` on, of
all members together; the trainer, the strategies and the mesh are those of a run.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS / "training")]

import group  # noqa: E402
import torch  # noqa: E402
from group import run_group, run_member  # noqa: E402
from torch import nn  # noqa: E402
from toy_task import ToyTask, toy_plan  # noqa: E402

from tests.counting.device import DEVICE, counts  # noqa: E402
from tests.waiting import PATIENCE  # noqa: E402
from training.exchange.base import Exchange, SoloExchange  # noqa: E402
from training.exchange.group.coordinator_server import Coordinator  # noqa: E402
from training.exchange.group.coordinator_state import CoordinatorConfig  # noqa: E402
from training.exchange.group.join_config import JoinConfig  # noqa: E402
from training.exchange.links.certificates import issue_run_certificates  # noqa: E402
from training.exchange.mean.mesh_member import MeshMember  # noqa: E402
from training.loop import trainer  # noqa: E402
from training.optimization import optimizers  # noqa: E402
from training.records.events import SyncEvent  # noqa: E402
from training.records.plan import RunPlan  # noqa: E402
from training.run.orders import Control  # noqa: E402
from training.tasks.base import Batch, Progress  # noqa: E402

FIRST, STEPS = 3, 2
"""The first step that is counted, and how many are: a round of a strategy that merges weights."""
CPU = torch.device("cpu")
_VOCABULARY, _WIDTH, _LENGTH = 400, 16, 8


class Block(nn.Module):
    """A transformer's block, in operations that the device has."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.attend, self.project = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.widen, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.attend(self.norms[0](hidden)).chunk(3, -1)
        hidden = hidden + self.project(torch.softmax(queries @ keys.transpose(1, 2) / _WIDTH**0.5, -1) @ values)
        return hidden + self.narrow(nn.functional.gelu(self.widen(self.norms[1](hidden))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Text(ToyTask):
    """Made-up tokens."""

    uses_global_rng = False

    def prepare(self, progress: Progress) -> None:
        tokens = torch.randint(0, _VOCABULARY, (64, _LENGTH + 1), generator=torch.Generator().manual_seed(1))
        self.train = [(index, row[:-1], row[1:]) for index, row in enumerate(tokens)]
        self.evaluation = {"validation": self.train[:8]}

    def build_model(self) -> nn.Module:
        model, generator = LanguageModel(), torch.Generator().manual_seed(3)  # members of one process share torch's
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def save(self, model: nn.Module, directory: Path) -> None:
        pass


class Counted(trainer.Trainer):
    """Begins to count when all members are about to make the first step that is counted."""

    first: threading.Barrier
    last: threading.Barrier

    def _step(self) -> SyncEvent | None:
        if self.position.step + 1 == FIRST:
            self.first.wait()
        report = super()._step()
        if self.position.step + 1 == FIRST + STEPS:
            self.last.wait()
        return report


class Hungry(Text):
    """Runs out of memory once, in the first step after a round."""

    def prepare(self, progress: Progress) -> None:
        super().prepare(progress)
        self.passes = 0

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.passes += 1
        if self.passes == FIRST and batch["x"].device == DEVICE:
            raise torch.OutOfMemoryError("GPU out of memory")
        return super().loss(model, batch)


class Careless(Text):
    """Looks at its loss, and overwrites what is still being copied to the device."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = super().loss(model, batch)
        number = torch.ones(1).pin_memory()
        number.to(batch["x"].device, non_blocking=True)
        number.zero_()
        float(loss.detach())
        return loss


TASKS = {task.__name__: task for task in (Text, Careless, Hungry)}


def count(workers: int, task_name: str, compares: bool, free: int, **options: Any) -> dict[str, Any]:
    """Return what all members' steps asked for, by kind and place, and whether they end as on the CPU, if asked.

    Args:
        free: bytes of the device that nobody has.
    """
    task, counts.free = TASKS[task_name], free
    on_cpu = trained(task, workers, CPU, **options) if compares else None
    weights = trained(task, workers, DEVICE, **options)
    return {"weights": weights.numel(), "same": on_cpu is None or torch.equal(on_cpu, weights), **counts.report()}


def trained(
    task: type[Text], workers: int, device: torch.device, training: Mapping[str, Any], strategy: dict[str, Any]
) -> torch.Tensor:
    """Return the weights that a run ends with."""
    gc.collect()  # what the case before held
    Counted.first = threading.Barrier(workers, counts.begin, PATIENCE)
    Counted.last = threading.Barrier(workers, counts.end, PATIENCE)
    trainer.select_device = lambda *_: device  # type: ignore[assignment]
    optimizers.FUSED_ON |= {DEVICE.type}
    usual = {"max_steps": FIRST + STEPS, "max_grad_norm": 1.0, "seed": 1}
    plan = toy_plan(workers, training=usual | dict(training), strategy=strategy)
    with tempfile.TemporaryDirectory() as folder:
        members = _alone(plan, task, Path(folder)) if workers == 1 else _together(plan, task, Path(folder))
    for member in members:
        if member.error is not None:
            raise member.error
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in members[0].trainer.parameters])


def _alone(plan: RunPlan, task: type[Text], folder: Path) -> list[Any]:
    return [run_member(plan, 0, SoloExchange(), task(), folder, Control(), [])]


def _together(plan: RunPlan, task: type[Text], folder: Path) -> list[Any]:
    issue_run_certificates(folder, plan.run_id, range(plan.world_size), ["127.0.0.1"])
    names = tuple(member.name for member in plan.members)
    coordinator = Coordinator(CoordinatorConfig(run_id=plan.run_id, names=names, certificates=folder / "coordinator"))
    port = coordinator.start()
    try:
        connect = _connect(plan, folder, port)
        return list(run_group(plan, connect, lambda _: task(), folder / "run", timeout=PATIENCE).values())
    finally:
        coordinator.stop()


def _connect(plan: RunPlan, folder: Path, port: int) -> Callable[[int], Exchange]:
    def connect(rank: int) -> Exchange:
        secrets, size = folder / f"member-{rank}", plan.world_size
        return MeshMember(JoinConfig(f"127.0.0.1:{port}", secrets, plan.run_id, rank, size, f"worker-{rank}")).join(
            30.0
        )

    return connect


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    group.trainer_class = lambda plan: Counted  # type: ignore[assignment]
    print(json.dumps([_outcome(case) for case in json.loads(arguments[0])]))


def _outcome(case: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return count(**case)
    except Exception as error:  # noqa: BLE001 - the other cases are counted all the same
        return {"error": repr(error)}


if __name__ == "__main__":
    main(sys.argv[1:])
