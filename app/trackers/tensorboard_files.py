"""TensorBoard: event files by its own writer; one folder a member, so that their curves lie over each other."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from app.console import visible
from app.trackers.base import TrackedRun
from app.trackers.scalars import owner, scalars_of
from training.events import Event, StepEvent

RUN = "run"
"""Folder of what belongs to no single member: evaluations, settings."""


class TensorboardFiles:
    """One writer for the run and one for each member."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._writers: dict[int | None, EventFileWriter] = {}
        if not any(folder.glob(f"{RUN}/*")):
            lines = [f"    {visible(name)} = {visible(value)}" for name, value in run.settings.items()]
            summary = text_pb("settings", "\n".join(lines))
            self._writer(None).add_event(Record(wall_time=time.time(), step=0, summary=summary))

    def log(self, event: Event, newest_step: int) -> None:
        if isinstance(event, StepEvent) and event.step <= newest_step:
            self._begin_again(event)
        for figure in scalars_of(event, newest_step):
            value = Summary.Value(tag=visible(figure.name), simple_value=figure.value)
            record = Record(wall_time=event.time, step=figure.step, summary=Summary(value=[value]))
            self._writer(owner(event)).add_event(record)

    def _begin_again(self, event: StepEvent) -> None:
        """After a resume TensorBoard is told to forget the steps that are done once more."""
        log = SessionLog(status=SessionLog.START)
        self._writer(event.member).add_event(Record(wall_time=event.time, step=event.step, session_log=log))

    def _writer(self, member: int | None) -> EventFileWriter:
        if member not in self._writers:
            name = RUN if member is None else re.sub(r"[^A-Za-z0-9._-]+", "_", self._run.name(member))[:80]
            place = name if member is None or name not in (RUN, ".", "..") else f"member-{member}"
            self._writers[member] = EventFileWriter(str(self._folder / place))
        return self._writers[member]

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self, status: str) -> str:
        for writer in self._writers.values():
            writer.close()
        return f"{self._folder} (tensorboard --logdir {self._folder})"
