"""``LocalTrainer``: several workers on this machine through the very same trainer, exchange and strategies.

::

    trainer = LocalTrainer(model, train_dataset, val_dataset, workers=2)
    model = trainer.fit(strategy="diloco", epochs=3, learning_rate=1e-3)
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from profiles.errors import RunFailed
from training.control import Control
from training.events import Event, EventSink
from training.local_plan import plan_local_run
from training.local_run import LocalOutcome, LocalRun
from training.plan import RunPlan, read_plan
from training.processes import SpawnedWorker, Worker
from training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import nn

    from training.tasks.base import SizedDataset

__all__ = ["LocalOutcome", "LocalRun", "LocalTrainer", "plan_local_run"]


class LocalTrainer:
    """Train an in-memory model with several workers of this machine.

    Model and data sets travel to the workers by pickle, as with any ``multiprocessing`` child: define their classes at
    module level and guard the script with ``if __name__ == "__main__":``.

    Args:
        model: its forward gives a loss (a scalar, ``output.loss``, ``{"loss": ...}``), or ``loss`` is given.
        train_dataset: map-style data set of samples that ``collate`` (default: torch's) can batch.
        val_dataset: evaluated before, at intervals, and after.
        workers: how many processes train together.
        loss: ``loss(output, target)`` for data sets of ``(input, target)`` pairs.
        output_dir: folder of the run folders.
        on_event: called with every event of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: SizedDataset,
        val_dataset: SizedDataset | None = None,
        *,
        workers: int = 2,
        loss: Callable[..., Any] | None = None,
        collate: Callable[..., Any] | None = None,
        output_dir: Path | str = "output",
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.model = model
        self.workers = workers
        self.outcome: LocalOutcome | None = None
        self._objects = (model, train_dataset, val_dataset, loss, collate)
        self._output_dir = Path(output_dir)
        self._on_event = on_event or (lambda event: None)

    def fit(self, strategy: str = "auto", **options: Any) -> nn.Module:
        """Train and return the model with its new weights; ``options`` are those of a profile.

        Raises:
            BadInput: an unknown option or strategy, or objects that cannot be used.
            RunFailed: the run failed; the message names the first cause.
        """
        from profiles.resolve import profile_from_options

        profile = profile_from_options("local", {"task": "custom", "strategy": strategy, **options})
        plan = plan_local_run(profile, self.workers)
        with RunFolder.create(self._output_dir, plan, ["LocalTrainer.fit"]) as folder:
            run = LocalRun(plan, folder, self._on_event, lambda rank, log: self._start(rank, folder, log))
            run.start()
            self.outcome = run.wait()
        if self.outcome.status != "completed":
            raise RunFailed(self.outcome.message, self.outcome.hint)
        self._load_result(self.outcome.run_dir / "model")
        return self.model

    def _start(self, rank: int, folder: RunFolder, log: BinaryIO) -> Worker:
        log.flush()
        payload = pickle.dumps(self._objects)
        return SpawnedWorker(_object_worker, (payload, rank, folder.path, folder.secrets, log.name))

    def _load_result(self, directory: Path) -> None:
        from safetensors.torch import load_model

        load_model(self.model, directory / "model.safetensors")


class _PipeStream(io.StringIO):
    """Text stream whose writes are messages of a pipe."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        self._connection.send_bytes(text.encode())
        return len(text)


def _object_worker(
    connection: Connection[Any, Any], payload: bytes, rank: int, run_dir: Path, secrets: Path, log: str
) -> None:
    """Body of a spawned worker: the same as ``python -m training.worker`` with objects instead of a task by name."""
    import json

    from training.tasks.custom import ObjectTask
    from training.worker import run_worker

    sys.stdout = sys.stderr = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
    plan: RunPlan = read_plan(run_dir / "plan.json")
    model, train, validation, loss, collate = pickle.loads(payload)  # our own parent wrote it
    emit = EventSink(_PipeStream(connection), rank)
    control = Control()

    def lines() -> Any:
        while True:
            try:
                yield connection.recv_bytes()
            except (EOFError, OSError):
                return

    commands = lines()

    def address() -> str:
        found = str(json.loads(next(commands))["address"])
        control.read_from(commands, lambda message: print(message))
        return found

    task = ObjectTask(model, train, validation, loss=loss, collate=collate)
    code = run_worker(plan, rank, task, address, run_dir, secrets, emit, control)
    sys.exit(int(code))
