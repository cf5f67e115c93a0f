"""The workers of a run on this machine: a process each, or the one process of a simulated run."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

from profiles.errors import ExitCode
from training.records.events import ErrorEvent, Event, MemberEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.processes import SubprocessWorker, Worker

_ONE_HEAP = {"MALLOC_ARENA_MAX": "1", "MKL_DISABLE_FAST_MM": "1"}
"""One member computes at a time, and the next one can use the memory it frees. But glibc gives each thread its own
heap, with which a step of 64 members took half as long again, and MKL keeps buffers for each, 48 MB a member."""


StartWorker = Callable[[int, BinaryIO], Worker]
"""Starts the process of a rank, its log going there."""


class AdoptWorker(Protocol):
    """Returns the worker of a rank that runs already, of whose lines the run has those up to ``line``."""

    def __call__(self, rank: int, log: BinaryIO, *, line: int) -> Worker: ...


def local_starter(plan: RunPlan, folder: RunFolder, module: str) -> StartWorker:
    """Return what starts the workers of a plan on this machine: ``python -m MODULE``."""

    def arguments(rank: int) -> list[str]:
        options = {
            "--plan": folder.path / "plan.json",
            "--rank": rank,
            "--run-dir": folder.path,
            "--secrets": folder.secrets,
        }
        return [str(item) for pair in options.items() for item in pair]

    if plan.engine == "simulated":
        return SharedProcess(module, arguments(0), plan.world_size, plan.members[0].lead.threads).start
    return lambda rank, log: SubprocessWorker(module, arguments(rank), plan.process(rank).device.threads, log)


class SharedProcess:
    """``python -m training.workers.worker`` with a plan, all of whose members it runs.

    Args:
        module: of the worker.
        arguments: of its command line.
        members: number of members.
        threads: processor threads for the member that runs.
    """

    def __init__(self, module: str, arguments: list[str], members: int, threads: int) -> None:
        self._module, self._arguments, self._threads = module, arguments, threads
        self.lines: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(members)]
        self.process: SubprocessWorker | None = None

    def start(self, rank: int, log: BinaryIO) -> Worker:
        """Return the worker of one rank; the first call starts the process, with its log."""
        if self.process is None:
            self.process = SubprocessWorker(self._module, self._arguments, self._threads, log, _ONE_HEAP)
            threading.Thread(target=self._sort, args=(self.process,), name="sorts events", daemon=True).start()
        return _Member(self.process, rank, self.lines[rank])

    def _sort(self, process: SubprocessWorker) -> None:
        """Sort the process's lines by member; all streams end with the process."""
        try:
            for line in process.lines():
                self.lines[_rank_of(line, len(self.lines))].put(line)
        finally:
            for lines in self.lines:
                lines.put(None)


def _rank_of(line: bytes, members: int) -> int:
    """Return the member of an event; a malformed line counts as the first member's, and is refused there."""
    try:
        rank = json.loads(line)["member"]
    except (ValueError, KeyError, TypeError):
        return 0
    return rank if isinstance(rank, int) and 0 <= rank < members else 0


class _Member:
    """One of the members as a worker."""

    end_reason = ""

    def __init__(self, process: SubprocessWorker, rank: int, lines: queue.SimpleQueue[bytes | None]) -> None:
        self.pid = process.pid
        self._process, self._rank, self._lines = process, rank, lines
        self._code: int | None = None

    def send(self, message: dict[str, Any]) -> None:
        if "command" in message:  # addresses of other members are not needed here
            self._process.send({**message, "rank": self._rank})

    def lines(self) -> Iterator[bytes]:
        while (line := self._lines.get()) is not None:
            yield line

    def note_event(self, event: Event) -> Event:
        """Note how this member ended: the process has one exit code for all."""
        if isinstance(event, ErrorEvent):
            self._code = event.exit_code
        elif isinstance(event, MemberEvent) and event.status in ("done", "left"):
            self._code = ExitCode.DONE if event.status == "done" else ExitCode.STOPPED
        return event

    def exit_code(self) -> int:
        code = self._process.exit_code()
        return code if self._code is None else self._code

    def signal(self, number: int) -> None:
        self._process.signal(number)
