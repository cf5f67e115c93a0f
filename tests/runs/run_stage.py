"""A run at the seam of its workers: scripted ones, in this process."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from profiles.files.resolve import profile_from_options
from tests.layouts.machine_folders import on_machines
from training.records.events import Event, MemberEvent, to_line
from training.records.run_folder import RunFolder
from training.run.local_plan import plan_local_run
from training.run.run_controller import RunController
from training.run.stopping import ProgressMonitor


class Script:
    """A worker or a coordinator that says what it is told to say."""

    pid = 0
    end_reason = ""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._code = 0
        self.on_stop: int | None = None
        """Exit code with which it ends when it is told to stop; ``None``: it goes on."""
        self.sent: list[dict[str, Any]] = []
        self.signals: list[int] = []

    def say(self, event: Event) -> None:
        self._lines.put(to_line(event).encode())

    def end(self, code: int, reason: str = "") -> None:
        self._code, self.end_reason = code, reason
        self._lines.put(None)

    def lines(self) -> Iterator[bytes]:
        return iter(self._lines.get, None)

    def note_event(self, event: Event) -> Event:
        return event

    def exit_code(self) -> int:
        return self._code

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message.get("command") == "stop" and self.on_stop is not None:
            self.end(self.on_stop)

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self.end(-number)

    def tell_port(self, port: int) -> None:
        """As a coordinator."""
        self._lines.put(json.dumps({"port": port}).encode())

    def refuse(self, error: str, option: str) -> None:
        self._lines.put(json.dumps({"port": 0, "error": error, "hint": "choose another", "option": option}).encode())

    def stop(self) -> None:
        self._lines.put(None)


class Stage:
    """A run of scripted workers; what they say is merged by :meth:`take`."""

    def __init__(
        self,
        folder: Path,
        workers: int = 3,
        strategy: str = "allreduce",
        kind: Callable[..., RunController] = RunController,
        machines: Sequence[str] = (),
        **more: Any,
    ) -> None:
        options = {"task": "custom", "model_path": "nowhere:build", "strategy": strategy, "engine": "mesh", **more}
        plan = plan_local_run(profile_from_options("scripted", options), workers)
        if machines:  # of the devices of the only member
            plan = on_machines(plan, *machines)
        self.workers = [Script() for _ in range(workers)]
        of_columns = [Script() for _ in plan.members[0].devices]
        self.coordinator, coordinators = of_columns[0], iter(of_columns)
        for coordinator in of_columns:
            coordinator.tell_port(1)
        self.events: list[Event] = []
        self.progress = ProgressMonitor()
        self.folder = RunFolder.create(folder, plan, ["test"])
        self.run = kind(
            plan,
            self.folder,
            self.events.append,
            self._worker,
            start_coordinator=lambda config, log: next(coordinators, self.coordinator),
            progress=self.progress,
        )
        self.run.start()

    def _worker(self, rank: int, log: BinaryIO) -> Script:
        return self.workers[rank]

    def take(self, source: int, event: Event) -> None:
        """Merge one event of a worker, or of the coordinator: -1."""
        self.run.take(source, to_line(event).encode())

    def ends(self, rank: int, code: int, reason: str = "") -> None:
        self.workers[rank].end(code, reason)
        self.run.note_end(rank)

    def told(self, rank: int) -> list[tuple[str, str]]:
        return [(e.status, e.message) for e in self.events if isinstance(e, MemberEvent) and e.member == rank]
