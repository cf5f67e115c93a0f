"""A run at the seam of the command line: writes what it is told into the real run folder, trains nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.cli.train.request import TrainRequest
from app.cli.train.start import distributed_train
from profiles.errors import ExitCode
from tests.app import app_events
from tests.app.app_events import evaluation, sync
from training.records.events import Event, MachineEvent, RunEvent, SnapshotEvent, StepEvent
from training.records.plan import RunPlan, Status
from training.records.run_folder import RunFolder
from training.run.outcome import RunOutcome, write_end

DEADLINE = 20.0
SMALL = {"workers": "2", "dataset_path": "../speech"}
"""Options of a run for which nobody reads the tables of all spoken commands."""


def step(number: int, member: int, **fields: Any) -> StepEvent:
    costs = {"compute": 0.4, "wait": 0.1, "transfer": 0.2, "bytes_sent": 3000, "bytes_received": 5000}
    return app_events.step(number, member=member, **{"epoch": number / 100, **costs, **fields})


def training(steps: int = 6) -> list[Event]:
    """What two members say in a short training."""
    said: list[Event] = [RunEvent(status="running", total_steps=steps), evaluation(0, 0.98, "test")]
    for number in range(1, steps + 1):
        said += [step(number, member) for member in (0, 1)]
        exchanged = {"step": number, "bytes_sent": 1000, "bytes_received": 1000, "wait": 0.4}
        said += [sync(number // 3, member=member, **exchanged) for member in (0, 1) if number % 3 == 0]
    load = MachineEvent(member=0, cpu_percent=50.0, memory_used=200_000_000, memory_total=8_000_000_000)
    kept = [SnapshotEvent(member=m, step=steps, path="checkpoints/a", bytes=9, seconds=0.1) for m in (0, 1)]
    return [*said, *kept, load]


class FakeRun:
    """A run that says ``events``; it ends with ``status``, or waits for the stop if ``status`` is ``cancelled``."""

    plan: RunPlan
    """Of the run that was begun."""

    def __init__(
        self,
        events: Sequence[Event] = (),
        status: Status = "completed",
        code: ExitCode = ExitCode.DONE,
        message: str = "",
        on_wait: Callable[[FakeRun], None] = lambda run: None,
        on_start: Callable[[FakeRun], None] = lambda run: None,
    ) -> None:
        self._events = [*events, *([evaluation(6, 0.03, "test")] if status == "completed" else [])]
        self._status, self._code, self._message = status, code, message
        self._on_wait, self._on_start = on_wait, on_start
        self.stopped = threading.Event()
        self.calls: list[str] = []

    def __call__(self, plan: RunPlan, folder: RunFolder, on_event: Callable[[Event], None]) -> FakeRun:
        self.plan, self._folder, self._on_event = plan, folder, on_event
        return self

    def start(self) -> None:
        self.calls.append("start")
        self._on_start(self)

    def wait(self) -> RunOutcome:
        if self._events:
            self._folder.begin("running")
        for event in self._events:
            self._on_event(self._folder.append(event))
        self._on_wait(self)
        if self._status == "cancelled":
            assert self.stopped.wait(DEADLINE)
        if self._status == "completed":
            (self._folder.path / "model").mkdir()
            (self._folder.path / "model" / "config.json").write_text("{}")
        metrics = {"after": {"test": {"wer": 0.03}}, "seconds": 83.0, "samples_per_second": 32.0}
        write_end(self._folder, self._folder.append, self._status, self._code, self._message, lambda: metrics)
        return RunOutcome(self._status, self._folder.path, metrics, self._code, self._message, "the hint")

    def request_stop(self, message: str) -> None:
        self.calls.append(f"stop: {message}")
        self.stopped.set()

    def kill(self) -> None:
        self.calls.append("kill")
        self.stopped.set()


def finished_run(**options: str) -> Path:
    """Return the folder of a run that has just completed."""
    before = set(Path("output").glob("*"))
    distributed_train(TrainRequest("demo-scratch", SMALL | options), FakeRun(training()))
    (made,) = set(Path("output").iterdir()) - before
    return made
