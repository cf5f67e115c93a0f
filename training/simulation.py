"""Training from Python: ``LocalTrainer`` uses several workers of this machine, and its sister ``NetworkTrainer``
(:mod:`distributed.network_trainer`) those of other machines, through the very same trainer, exchange and strategies.

::

    trainer = LocalTrainer(model, train_dataset, val_dataset, workers=2)
    model = trainer.fit(strategy="diloco", epochs=3, learning_rate=1e-3)
"""

from __future__ import annotations

import io
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from profiles.errors import BadInput, ExitCode, MachinesNotReady, RunFailed, StoppedByUser
from profiles.schema import Profile
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
    from training.tasks.object_files import JobParts

__all__ = ["LocalOutcome", "LocalRun", "LocalTrainer", "ObjectTrainer", "plan_local_run"]

_ERRORS = {
    ExitCode.BAD_INPUT: BadInput,
    ExitCode.NOT_READY: MachinesNotReady,
    ExitCode.STOPPED: StoppedByUser,
}


class ObjectTrainer(ABC):
    """Trains what a person has in Python.

    Args:
        model: a module, or a function (also as text, ``module:name``) that takes nothing and returns one. Its forward
            gives a loss (a scalar, ``output.loss``, ``{"loss": ...}``), or ``loss`` is given.
        train_dataset: map-style data set of samples that ``collate`` (default: torch's) can batch, or a function (also
            as text) that takes nothing and returns one.
        val_dataset: evaluated before, at intervals, and after.
        loss: ``loss(output, target)`` for data sets of ``(input, target)`` pairs, or ``module:name``.
        collate: makes a batch of a list of samples, or ``module:name``.
        output_dir: folder of the run folders.
        on_event: called with every event of the run.
    """

    profile_name: ClassVar[str]

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str,
        train_dataset: SizedDataset | Callable[[], SizedDataset] | str,
        val_dataset: SizedDataset | Callable[[], SizedDataset] | str | None = None,
        *,
        loss: Callable[..., Any] | str | None = None,
        collate: Callable[..., Any] | str | None = None,
        output_dir: Path | str = "output",
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.model = model
        self.outcome: LocalOutcome | None = None
        self._given = (train_dataset, val_dataset, loss, collate)
        self._output_dir = Path(output_dir)
        self._on_event = on_event or (lambda event: None)

    def fit(self, strategy: str = "auto", **options: Any) -> nn.Module:
        """Train and return the model with its new weights; ``options`` are those of a profile.

        Raises:
            BadInput: an unknown option or strategy, or objects that cannot be used.
            MachinesNotReady: a machine cannot take part.
            RunFailed: the run failed; the message names the first cause.
            StoppedByUser: somebody stopped it.
        """
        from profiles.resolve import profile_from_options
        from training.tasks.object_files import JobParts, load_result, make_model

        chosen = {"task": "custom", "output_dir": self._output_dir, "strategy": strategy, **options}
        profile = profile_from_options(self.profile_name, chosen)
        parts = JobParts(self.model, *self._given)
        self._check(parts)
        model = make_model(self.model, profile.training.seed)
        self.outcome = self._run(profile, parts)
        if self.outcome.status != "completed":
            raise _ERRORS.get(self.outcome.exit_code, RunFailed)(self.outcome.message, self.outcome.hint)
        load_result(model, self.outcome.run_dir / "model")
        self.model = model
        return model

    @abstractmethod
    def _run(self, profile: Profile, parts: JobParts) -> LocalOutcome:
        """Carry the run out and say how it ended."""

    def _check(self, parts: JobParts) -> None:
        """Raise BadInput for what can never work, before anything is made."""


class LocalTrainer(ObjectTrainer):
    """Train with several workers of this machine.

    Model and data sets travel to the workers by pickle, as with any ``multiprocessing`` child: define their classes at
    module level and guard the script with ``if __name__ == "__main__":``.

    Args:
        model, train_dataset, val_dataset, loss, collate, output_dir, on_event: see :class:`ObjectTrainer`.
        workers: how many processes train together.
    """

    profile_name = "local"

    def __init__(
        self, model: Any, train_dataset: Any, val_dataset: Any = None, *, workers: int = 2, **settings: Any
    ) -> None:
        super().__init__(model, train_dataset, val_dataset, **settings)
        self.workers = workers

    def _run(self, profile: Profile, parts: JobParts) -> LocalOutcome:
        plan = plan_local_run(profile, self.workers)
        with RunFolder.create(Path(profile.run.output_dir), plan, ["LocalTrainer.fit"]) as folder:
            run = LocalRun(plan, folder, self._on_event, lambda rank, log: _start(parts, rank, folder, log))
            run.start()
            return run.wait()


def _start(parts: JobParts, rank: int, folder: RunFolder, log: BinaryIO) -> Worker:
    log.flush()
    payload = pickle.dumps(parts)
    return SpawnedWorker(_object_worker, (payload, rank, folder.path, folder.secrets, log.name))


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

    from training.tasks.custom import CustomTask
    from training.worker import run_worker

    sys.stdout = sys.stderr = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
    plan: RunPlan = read_plan(run_dir / "plan.json")
    parts: JobParts = pickle.loads(payload)  # our own parent wrote it; never from the network
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

    task = CustomTask(plan.profile, lambda profile: parts.made(profile.training.seed))
    code = run_worker(plan, rank, task, address, run_dir, secrets, emit, control)
    sys.exit(int(code))
