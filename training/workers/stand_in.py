"""The coordinator that a worker starts on its machine when the members elect it for that."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from profiles.errors import RunFailed
from training.records.events import MemberEvent, WarningEvent, from_line
from training.records.plan import RunPlan
from training.records.run_files import private_file, write_atomically
from training.run.meeting_point import coordinator_config
from training.run.processes import CoordinatorProcess

Note = Callable[[WarningEvent], None]


class StandInProcess:
    """Implements :class:`training.exchange.group.election.StandInCoordinator` with a process that outlives the worker.

    Args:
        rank: of the worker, whose keys are the coordinator's.
        listen: literal address to listen on.
        note: takes what the coordinator tells of the members.
    """

    def __init__(self, plan: RunPlan, rank: int, secrets: Path, listen: str, note: Note) -> None:
        self._note, self._secrets = note, secrets.resolve()
        self._name = plan.process(rank).name
        everybody = [process.rank for process in plan.processes]
        keys = str(self._secrets / f"member-{rank}")
        self._config: dict[str, Any] = coordinator_config(plan, everybody)
        self._config |= {"address": listen, "certificates": keys, "local": [rank], "absent": []}
        self._process: CoordinatorProcess | None = None
        self._prepared: CoordinatorProcess | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load the program of a coordinator, which may be needed soon."""
        with self._lock:
            self._prepared = self._prepared or self._loaded()

    def _loaded(self) -> CoordinatorProcess:
        with open(self._secrets.parent / "coordinator.log", "ab", opener=private_file) as log:
            return CoordinatorProcess(self._secrets / "coordinator.json", log, waits=True)

    def discard(self) -> None:
        """End what was prepared and not started. Idempotent."""
        with self._lock:
            prepared, self._prepared = self._prepared, None
        _end(prepared)

    def start(self, term: int) -> int:
        """Start the coordinator of a term; return its port.

        Raises:
            RunFailed: it does not start.
            OSError: its configuration cannot be written.
        """
        self.stop()
        write_atomically(self._secrets / "coordinator.json", json.dumps({**self._config, "term": term}).encode())
        with self._lock:  # another thread may discard what is prepared
            self._process = process = self._prepared or self._loaded()
            self._prepared = None
        process.send({"term": term})
        lines = process.lines()
        greeting = json.loads(next(lines, b"{}"))
        if not greeting.get("port"):
            self.stop()
            raise RunFailed(f"{self._name}: the coordinator did not start", str(greeting.get("error", "")))
        threading.Thread(target=self._read, args=(lines,), name="coordinator", daemon=True).start()
        return int(greeting["port"])

    def _read(self, lines: Iterator[bytes]) -> None:
        """Pass on, as this member's own words, whom the others have lost."""
        with contextlib.suppress(ValueError, OSError):
            for event in map(from_line, lines):
                if isinstance(event, MemberEvent) and event.status == "lost":
                    self._note(WarningEvent(message=f"{self._name}: {event.name} is lost ({event.message})"))
                elif isinstance(event, WarningEvent):
                    self._note(WarningEvent(message=f"{self._name}: {event.message}"))

    def stop(self) -> None:
        """End it: another one is followed. Idempotent."""
        process, self._process = self._process, None
        _end(process)

    def release(self) -> None:
        """Let it serve until the last member has left. Idempotent."""
        self.discard()
        process, self._process = self._process, None
        if process is not None:
            process.end_input()


def _end(process: CoordinatorProcess | None) -> None:
    if process is not None:
        process.signal(signal.SIGKILL)
        process.stop()
