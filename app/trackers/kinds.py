"""The tracker protocol and the four trackers; a tracker's library is imported when the tracker is opened."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TextIO, get_args

from app.console import visible
from app.run_view.run_series import Figure
from training.records.events import EvaluationEvent, Event, KnownEvent, MachineEvent, StepEvent, SyncEvent, UnknownEvent
from training.records.plan import RunMetadata

PROJECT = "muster"
_STEP = ("loss", "learning_rate", "epoch", "grad_norm", "compute", "wait", "transfer", "bytes_sent", "bytes_received")
_SYNC = ("seconds", "wait", "bytes_sent", "bytes_received", "drift", "correlation", "delta_norm", "compression")
_MACHINE = ("cpu_percent", "memory_used", "device_memory_used", "celsius", "watts", "joules", "battery_percent")
_FIRST = ("seq", "time", "member", "name")
_EVALUATION = ("step", "split", "metric", "value", "samples", "seconds")
_FORMULA = ("=", "+", "-", "@")


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it."""

    path: Path
    metadata: RunMetadata

    @property
    def names(self) -> Mapping[int, str]:
        """Unique names of the members by rank; workers that share a name get their rank appended."""
        planned = {host["rank"]: str(host.get("name", "")) for host in self.metadata.hosts if "rank" in host}
        taken = list(planned.values())
        return {
            rank: name if name and taken.count(name) == 1 else f"{name or 'member'}-{rank}"
            for rank, name in planned.items()
        }

    def name(self, rank: int) -> str:
        """Return the name of a member; ``member-RANK`` for one that joined later and is not in the plan."""
        return self.names.get(rank, f"member-{rank}")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run, flat, for the tracker's table."""
        sections = {key: value for key, value in self.metadata.config.items() if isinstance(value, dict)}
        flat = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
        about = ("model", "dataset", "strategy", "strategy_reason", "engine")
        return {**flat, **{name: getattr(self.metadata, name) for name in about}}


class Tracker(Protocol):
    """Receives the events of one run, in the order of its log."""

    def log(self, event: Event, newest_step: int) -> None:
        """Log one event; kinds that the tracker does not use are ignored.

        Args:
            newest_step: of the event's member, before this event.
        """

    def flush(self) -> None:
        """Make what was logged durable, also if this process is killed afterwards."""

    def close(self, status: str, message: str = "") -> str:
        """Finish with the status of the run and why it failed, and return in one line where its figures are."""


def scalars_of(event: Event, newest_step: int) -> Iterator[Figure]:
    """Yield the scalars of an event, with the names that TensorBoard, Weights & Biases and trackio get.

    Args:
        newest_step: of the event's member, for figures without a step.
    """
    match event:
        case StepEvent():
            if event.seconds > 0:
                yield Figure("train/samples_per_second", event.step, event.samples / event.seconds)
            yield from _fields(event, "train", _STEP, event.step)
        case SyncEvent():
            yield from _fields(event, "sync", _SYNC, event.step)
        case MachineEvent():
            yield from _fields(event, "machine", _MACHINE, newest_step)
        case EvaluationEvent():
            for name, value in event.figures.items():
                if isfinite(value):
                    yield Figure(f"{event.split}/{name}", event.step, float(value))
        case _:
            return


def _fields(
    event: StepEvent | SyncEvent | MachineEvent, group: str, names: tuple[str, ...], step: int
) -> Iterator[Figure]:
    for name in names:
        value = getattr(event, name)
        if value is not None and isfinite(value):
            yield Figure(f"{group}/{name}", step, float(value))


def owner(event: Event) -> int | None:
    """Return the rank that an event's figures belong to; ``None``: the whole run."""
    return None if isinstance(event, EvaluationEvent) else event.member


def by_name(event: Event, newest_step: int, name: Callable[[int], str]) -> tuple[int, dict[str, float]]:
    """Return step and figures of an event for trackers with flat names: a member's name is the suffix."""
    figures, member = list(scalars_of(event, newest_step)), owner(event)
    end = "" if member is None else f"/{name(member)}"
    return (figures[0].step if figures else newest_step), {f"{figure.name}{end}": figure.value for figure in figures}


def columns() -> Mapping[str, tuple[str, ...]]:
    """Return the columns of the CSV files, by kind of event."""
    columns_by_kind: dict[str, tuple[str, ...]] = {}
    for model in get_args(get_args(KnownEvent)[0]):
        fields = [name for name in model.model_fields if name not in (*_FIRST, "v", "kind")]
        columns_by_kind[model.model_fields["kind"].default] = (*_FIRST, *fields)
    return {**columns_by_kind, "evaluation": (*_FIRST, *_EVALUATION)}


class CsvFiles:
    """CSV files for spreadsheets and scripts: one per kind of event (``step.csv`` ...), appended to."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._columns = columns()
        self._files: dict[str, TextIO] = {}

    def log(self, event: Event, newest_step: int) -> None:
        if isinstance(event, UnknownEvent):
            return
        names = self._columns[event.kind]
        writer = csv.writer(self._file(event.kind))
        for row in self._rows(event):
            writer.writerow([cell(row.get(name)) for name in names])

    def _rows(self, event: Event) -> Iterator[Mapping[str, Any]]:
        row = event.model_dump()
        if event.member is not None:
            row.setdefault("name", "")
            row["name"] = row["name"] or self._run.name(event.member)
        if not isinstance(event, EvaluationEvent):
            yield row
            return
        for metric, value in {"loss": event.loss, **event.metrics}.items():
            yield {**row, "metric": metric, "value": value}

    def _file(self, kind: str) -> TextIO:
        if kind not in self._files:
            path = self._folder / f"{kind}.csv"
            fresh = not path.exists() or path.stat().st_size == 0
            self._files[kind] = path.open("a", newline="", encoding="utf-8")
            if fresh:
                csv.writer(self._files[kind]).writerow(self._columns[kind])
        return self._files[kind]

    def flush(self) -> None:
        for stream in self._files.values():
            stream.flush()

    def close(self, status: str, message: str = "") -> str:
        for stream in self._files.values():
            stream.close()
        return str(self._folder)


def cell(value: object) -> object:
    """Return a value for a cell; text that a spreadsheet would read as a formula is quoted."""
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


class TensorboardFiles:
    """Event files by TensorBoard's own writer: one folder per member, so that their curves overlay."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._records, self._summaries, self._open = event_pb2, summary_pb2, EventFileWriter
        self._run = run
        self._folder = folder
        self._writers: dict[int | None, Any] = {}
        if not any(folder.glob("run/*")):
            lines = [f"    {visible(name)} = {visible(value)}" for name, value in run.settings.items()]
            self._write(None, time.time(), 0, summary=text_pb("settings", "\n".join(lines)))

    def log(self, event: Event, newest_step: int) -> None:
        if isinstance(event, StepEvent) and event.step <= newest_step:  # after a resume: drop the repeated steps
            begin = self._records.SessionLog(status=self._records.SessionLog.START)
            self._write(event.member, event.time, event.step, session_log=begin)
        for figure in scalars_of(event, newest_step):
            value = self._summaries.Summary.Value(tag=visible(figure.name), simple_value=figure.value)
            self._write(owner(event), event.time, figure.step, summary=self._summaries.Summary(value=[value]))

    def _write(self, member: int | None, moment: float, step: int, **content: Any) -> None:
        """Write into the folder of a member; evaluations and settings, which belong to no member, go to ``run``."""
        if member not in self._writers:
            name = "run" if member is None else re.sub(r"[^A-Za-z0-9._-]+", "_", self._run.name(member))[:80]
            folder_name = name if member is None or name not in ("run", ".", "..") else f"member-{member}"
            self._writers[member] = self._open(str(self._folder / folder_name))
        self._writers[member].add_event(self._records.Event(wall_time=moment, step=step, **content))

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self, status: str, message: str = "") -> str:
        for writer in self._writers.values():
            writer.close()
        return f"{self._folder} (tensorboard --logdir {self._folder})"


class _Flat:
    """Base of trackers with one run for all members, where figures carry the members' names."""

    _tracked: Any
    """The run object of the library."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._folder = folder

    def log(self, event: Event, newest_step: int) -> None:
        step, figures = by_name(event, newest_step, self._run.name)
        if figures:
            self.send(step, figures)

    def send(self, step: int, figures: dict[str, float]) -> None:
        self._tracked.log(figures, step=step)

    def flush(self) -> None:
        """Do nothing: the library writes continuously."""


class WandbRun(_Flat):
    """Weights & Biases: online if this machine is logged in, else offline files; figures over the training step."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        import wandb

        super().__init__(run, folder)
        os.environ.setdefault("WANDB_SILENT", "true")
        mode = None if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False) else "offline"
        self._tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.metadata.run_id,
            name=run.path.name,
            dir=str(folder),
            config=run.settings,
            resume="allow",
            mode=mode,
            settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off"),
        )
        self._tracked.define_metric("*", step_metric="step")

    def send(self, step: int, figures: dict[str, float]) -> None:
        self._tracked.log({"step": step, **figures})

    def close(self, status: str, message: str = "") -> str:
        self._tracked.finish(exit_code=0 if status == "completed" else 1)
        return str(self._tracked.url or f"{self._folder} (wandb sync {self._folder}/wandb/offline-run-*)")


class TrackioRun(_Flat):
    """trackio: one run in its local database; ``trackio show`` draws it."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        import trackio

        super().__init__(run, folder)
        self._project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._tracked = trackio.init(
            project=self._project,
            name=run.path.name,
            config=run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def close(self, status: str, message: str = "") -> str:
        self._tracked.finish()
        return f"trackio show --project {self._project}"


KINDS: dict[str, Callable[[TrackedRun, Path], Tracker]] = {
    "csv": CsvFiles,
    "tensorboard": TensorboardFiles,
    "wandb": WandbRun,
    "trackio": TrackioRun,
}
"""Constructors of the trackers, called with the run and the tracker's own folder, which outlives attempts."""
