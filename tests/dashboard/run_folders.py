"""Run folders for tests of what shows a run: real ones, written event by event by the test itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.run_view.run_state import RunState
from app.run_view.view import RunView
from distributed.planning.run_time import RunTime
from profiles.files.resolve import profile_from_options
from training.records.events import Event, MemberEvent, RunEvent, StepEvent
from training.records.plan import MemberPlan, RunPlan
from training.records.run_folder import RunFolder, new_run_id

BEGAN = 1_790_000_000.0
NAMES = ("studio", "air", "pc")


def new_folder(output: Path, machines: int = 3, run_id: str = "") -> Path:
    """Make the folder of a run that nobody works on yet."""
    plan = RunPlan(
        run_id=run_id or new_run_id(),
        profile=profile_from_options("p", {"model_path": "none", "dataset_path": "none", "strategy": "diloco"}),
        members=tuple(MemberPlan(rank=rank, name=NAMES[rank], batch_size=8) for rank in range(machines)),
        engine="mesh",
    )
    run = RunFolder.create(output, plan, ["test"], run_type="distributed")
    run.close()
    return run.path


@contextmanager
def live(path: Path, events: Iterable[Event] = ()) -> Iterator[RunFolder]:
    """Hold a run folder, with these events in it."""
    with RunFolder.take_over(path) as run:
        for event in events:
            run.append(event)
        yield run


def started(machines: int = 3, total: int = 100, at: float = BEGAN) -> list[Event]:
    """Return the events of a start."""
    members = [
        MemberEvent(member=rank, time=at, status="started", name=NAMES[rank], device="cpu") for rank in range(machines)
    ]
    running: list[Event] = [
        RunEvent(time=at, status="starting"),
        RunEvent(time=at, status="running", total_steps=total),
    ]
    return [*running, *members]


def steps(first: int, last: int, ranks: Iterable[int] = (0, 1, 2), at: float = BEGAN, **fields: Any) -> list[Event]:
    """Return a step a second of each member."""
    shared: dict[str, Any] = {"epoch": 0.0, "learning_rate": 1e-3, "samples": 8, "weight": 8.0, "compute": 0.75,
                              "wait": 0.25, "transfer": 0.5, **fields}  # fmt: skip
    return [
        StepEvent(member=rank, time=at + step, step=step, **{"loss": 2.0 / step, **shared})
        for step in range(first, last + 1)
        for rank in ranks
    ]


@dataclass(frozen=True)
class _PromisedView(RunView):
    promise: RunTime | None = None

    @property
    def time(self) -> RunTime | None:
        return self.promise


def view_of(state: RunState, now: float, time: RunTime | None = None, **fields: Any) -> RunView:
    """Return a run at one moment, whose plan promised a time."""
    return _PromisedView(Path("run"), state, now, promise=time, **fields)
