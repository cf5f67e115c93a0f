"""The run folder ``output/<id>-<profile>/``: the single source of truth about a run, to show, resume or compare it.

::

    metadata.json   what, when, with which versions, how it ended      events.jsonl   everything that happened
    plan.json       what all members agreed on                          metrics.json   the figures at the end
    logs/  checkpoints/  model/                                         completed      marker of a finished run
    command.sh      starts the same once more, as a new run

Run folders are removed only here. One that holds a snapshot is removed only at the user's request.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from profiles.errors import BadInput, RunFailed
from training.records.event_log import EventLog, read_events
from training.records.events import Event, SnapshotEvent
from training.records.plan import (
    Earlier,
    MemberPlan,
    RunMetadata,
    RunPlan,
    RunType,
    Status,
    metadata_of,
    read_metadata,
    read_plan,
)
from training.records.run_files import (
    FolderLock,
    atomic_folder,
    document,
    explain,
    finite,
    is_live,
    private_folder,
    utc_now,
    write_atomically,
)

if TYPE_CHECKING:
    from typing_extensions import Self


_ADDED, _ADDED_MEMBERS = "secrets/added.json", TypeAdapter(tuple[MemberPlan, ...])
"""Removed with the keys at the end of an attempt: a resumed run has the members of its plan."""
_EARLIER_PLAN = "plan.earlier.json"
"""The plan of a run that is being resumed with another one, until it trains again: restored if it never does."""
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


def new_run_id() -> str:
    """Return an id that sorts by time: ``20261121-013005-ab12`` (UTC)."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def folder_name(plan: RunPlan) -> str:
    """Return the name of the plan's run folder, safe on every file system."""
    return f"{plan.run_id}-{re.sub(r'[^A-Za-z0-9._-]+', '_', plan.profile.name)[:80]}"


def log_stem(name: str) -> str:
    """Return the stem of the log files of a machine or member; from the second one on, a number follows it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80] or "machine"


class RunFolder:
    """One run's folder. :meth:`open` only reads; the other constructors hold it for this process."""

    def __init__(self, path: Path, metadata: RunMetadata) -> None:
        self.path = path
        self._metadata = metadata
        self._folder_lock = FolderLock(path)
        self._log: EventLog | None = None
        self._guard = threading.RLock()

    @classmethod
    def create(
        cls,
        output_dir: Path,
        plan: RunPlan,
        command: list[str],
        *,
        run_type: RunType = "local",
        strategy_reason: str = "",
    ) -> RunFolder:
        """Make the folder of a new run and hold it.

        Raises:
            BadInput: the folder cannot be made; nothing is left behind.
        """
        metadata = metadata_of(plan, command, run_type, strategy_reason)
        with atomic_folder(output_dir, folder_name(plan)) as temporary:
            for name in ("logs", "checkpoints"):
                (temporary / name).mkdir(mode=0o755)
            for name in ("requests", "secrets"):
                private_folder(temporary / name)
            write_atomically(temporary / "plan.json", plan_text(plan))
            write_atomically(temporary / "metadata.json", document(metadata.model_dump()))
            write_atomically(temporary / "events.jsonl", b"")
            if command and (Path(command[0]).is_file() or shutil.which(command[0])):  # not a call of our classes
                write_atomically(temporary / "command.sh", rerun_script(command).encode(), 0o700)
        folder = cls(output_dir / folder_name(plan), metadata)
        try:
            folder._hold()
        except BadInput:
            remove_unused(folder.path)
            raise
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a run to read it.

        Raises:
            BadInput: there is no run, or its metadata is damaged.
        """
        return cls(path, read_metadata(path))

    @classmethod
    def resume(cls, path: Path, plan: RunPlan, command: list[str]) -> RunFolder:
        """Hold an earlier run to continue it: events, logs and snapshots stay, event numbers go on.

        Raises:
            BadInput: no run, a damaged one, one that is being worked on, or a folder that cannot be written.
        """
        folder = cls.open(path)
        folder._hold()
        try:
            now = read_metadata(path)  # the run is held only since a moment ago
            earlier = now.earlier or Earlier.model_validate(now.model_dump())
            (path / "completed").unlink(missing_ok=True)
            for request in (path / "requests").glob("*.json"):  # one to stop that nobody was there to hear would end it
                request.unlink(missing_ok=True)
            if now.earlier is None or not (path / _EARLIER_PLAN).exists():
                _keep_plan(path, plan)
            folder.update_metadata(
                status="starting",
                end_time=None,
                error_message="",
                command=command,
                folder=os.getcwd(),
                attempt=earlier.attempt + 1,
                earlier=earlier,
            )
            write_atomically(path / "plan.json", plan_text(plan))
        except (OSError, RunFailed) as error:
            with contextlib.suppress(RunFailed):
                folder.put_back()
            folder.close()
            words = (error.message, error.hint) if isinstance(error, RunFailed) else explain(error, path)
            raise BadInput(*words) from error
        return folder

    @classmethod
    def take_over(cls, path: Path, lock: int | None = None) -> RunFolder:
        """Hold a run that another process has prepared and released, or whose holder was killed.

        Args:
            lock: descriptor of the killed process's lock, which this process has inherited.

        Raises:
            BadInput: no run, a damaged one, or one that is being worked on.
        """
        folder = cls.open(path)
        folder._hold(lock)
        return folder

    @property
    def metadata(self) -> RunMetadata:
        return self._metadata

    @property
    def live(self) -> bool:
        """Whether a process works on this run."""
        return self._folder_lock.held or is_live(self.path)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """Folder of the finished model; made when the model is saved."""
        return self.path / "model"

    @property
    def secrets(self) -> Path:
        """Folder (0700) for the run's keys; removed by :meth:`close`."""
        return private_folder(self.path / "secrets")

    def plan(self) -> RunPlan:
        """Read ``plan.json``. Raises BadInput if it is missing or damaged."""
        return read_plan(self.path / "plan.json")

    def plan_before(self) -> RunPlan:
        """Read the plan that the run had before a resume that never began to train, else :meth:`plan`."""
        earlier = self.path / _EARLIER_PLAN
        return read_plan(earlier) if self._metadata.earlier is not None and earlier.is_file() else self.plan()

    def record_added(self, members: tuple[MemberPlan, ...]) -> None:
        """Record the members that were added to the plan, for a supervisor that takes over.

        Raises:
            RunFailed: the file cannot be written.
        """
        self._write(_ADDED, _ADDED_MEMBERS.dump_json(members))

    def added_members(self) -> tuple[MemberPlan, ...]:
        """Return the members that were added to the plan in this attempt of a live run."""
        path = self.path / _ADDED
        return _ADDED_MEMBERS.validate_json(path.read_bytes()) if path.is_file() else ()

    def events(self) -> Iterator[Event]:
        """Yield all events so far, oldest first, passing over damaged lines."""
        return read_events(self.path / "events.jsonl")

    def append(self, event: Event) -> Event:
        """Append an event and return it with its ``seq``.

        Raises:
            RunFailed: the first time the disk refuses it; later events are tried again without another error.
        """
        if self._log is None:
            raise RunFailed(f"{self.path.name}: this run is open for reading only")
        return self._log.append(event)

    def log_path(self, machine: str) -> Path:
        """Make an empty log file for a machine, never one of an earlier attempt."""
        stem = log_stem(machine)
        number = 1
        while True:
            path = self.logs / (f"{stem}.log" if number == 1 else f"{stem}.{number}.log")
            try:
                self.logs.mkdir(mode=0o755, exist_ok=True)  # somebody may have removed old logs
                path.touch(mode=0o600, exist_ok=False)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise RunFailed(*explain(error, path)) from error
            else:
                return path

    def update_metadata(self, **changes: Any) -> None:
        """Change fields of ``metadata.json``.

        Raises:
            RunFailed: the file cannot be written; the old one is still whole.
        """
        with self._guard:
            changed = RunMetadata.model_validate({**self._metadata.model_dump(), **changes})
            self._write("metadata.json", document(changed.model_dump()))
            self._metadata = changed

    def go_on(self, plan: RunPlan) -> None:
        """Let the run go on at once in another attempt, which this process starts with another plan.

        Raises:
            RunFailed: it cannot be written.
        """
        shutil.rmtree(self.path / "secrets", ignore_errors=True)  # keys are of one attempt
        self._write("plan.json", plan_text(plan))
        self.update_metadata(attempt=plan.attempt)

    def begin(self, status: Status) -> None:
        """Record that the run trains: from now on its end is that of this attempt.

        Raises:
            RunFailed: see :meth:`update_metadata`.
        """
        self.update_metadata(status=status, earlier=None)
        (self.path / _EARLIER_PLAN).unlink(missing_ok=True)

    def put_back(self) -> None:
        """Restore metadata and plan from before an attempt that never began to train.

        Raises:
            RunFailed: see :meth:`update_metadata`.
        """
        if self._metadata.earlier is not None:
            if (earlier := self.path / _EARLIER_PLAN).exists():
                self._write("plan.json", earlier.read_bytes())
                earlier.unlink()
            self.update_metadata(**self._metadata.earlier.model_dump(), earlier=None)

    def finish(self, status: Status, metrics: Mapping[str, Any], error_message: str = "") -> None:
        """Write how the run ended: ``metrics.json``, metadata and, if it completed, the marker.

        Raises:
            RunFailed: one of the files cannot be written.
        """
        figures = finite(dict(metrics))
        self._write("metrics.json", document(figures))
        ending = {"status": status, "end_time": utc_now(), "error_message": error_message}
        self.update_metadata(metrics=figures, earlier=None, **ending)
        if status == "completed":
            self._write("completed", b"")

    def close(self, keys_stay: bool = False) -> None:
        """Remove the keys, unless they stay for whoever takes the run up, and release the folder. Idempotent."""
        if self._folder_lock.held and not keys_stay:
            shutil.rmtree(self.path / "secrets", ignore_errors=True)
        if self._log is not None:
            self._log.close()
            self._log = None
        self._folder_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lock(self) -> int:
        """Descriptor of the lock: a child process that inherits it holds the run, too, until this one closes it."""
        return self._folder_lock.descriptor

    def _hold(self, lock: int | None = None) -> None:
        try:
            self._folder_lock.acquire(lock)
            self._log = EventLog(self.path / "events.jsonl")
        except OSError as error:
            self._folder_lock.release()
            raise BadInput(*explain(error, self.path)) from error

    def _write(self, name: str, data: bytes) -> None:
        try:
            write_atomically(self.path / name, data)
        except OSError as error:
            raise RunFailed(*explain(error, self.path / name)) from error


def rerun_script(command: Sequence[str]) -> str:
    """Return a shell script that starts ``command`` again from this folder, a Python program with this Python;
    arguments of the script are appended to those of the command."""
    words = [sys.executable, *command] if command[0].endswith(".py") else command
    return f'#!/bin/sh\ncd -- {shlex.quote(os.getcwd())} || exit\nexec {shlex.join(words)} "$@"\n'


def _keep_plan(folder: Path, plan: RunPlan) -> None:
    """Keep the plan of a run beside another one with which it is resumed."""
    (folder / _EARLIER_PLAN).unlink(missing_ok=True)  # of an attempt that was killed as it began
    with contextlib.suppress(BadInput):  # one that cannot be read is no use
        before = read_plan(folder / "plan.json")
        if (before.profile, before.members) != (plan.profile, plan.members):
            write_atomically(folder / _EARLIER_PLAN, plan_text(before))


def plan_text(plan: RunPlan) -> bytes:
    """Return the text of ``plan.json``."""
    return plan.model_dump_json(indent=2).encode() + b"\n"


def has_snapshots(folder: Path) -> bool:
    """Whether a run has snapshots: here, or on the machines that its events tell of."""
    if any(folder.glob("checkpoints/*/step-*")):
        return True
    return any(isinstance(event, SnapshotEvent) for event in read_events(folder / "events.jsonl"))


def remove_unused(folder: Path) -> bool:
    """Remove the folder of a run that never began; return whether it is gone. One with snapshots stays."""
    with contextlib.suppress(OSError):  # a folder that cannot be read or removed stays
        if not has_snapshots(folder):
            shutil.rmtree(folder)
    return not folder.exists()


def remove_run_folder(folder: Path) -> None:
    """Remove a run with its snapshots, as a person asked.

    Raises:
        OSError: some of it cannot be removed.
    """
    shutil.rmtree(folder)
