"""How the end of each member is told in a run's events: once, with the first cause, and as stopped after a stop."""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from profiles.errors import ExitCode
from profiles.resolve import profile_from_options
from training.events import Event, MemberEvent, RunEvent, WarningEvent, to_line
from training.local_plan import plan_local_run
from training.local_run import LocalRun
from training.run_folder import RunFolder


class Script:
    """A worker or a hub that says what it is told to say."""

    pid = 0
    end_reason = ""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._code = 0

    def say(self, event: Event) -> None:
        self._lines.put(to_line(event).encode())

    def end(self, code: int, reason: str = "") -> None:
        self._code, self.end_reason = code, reason
        self._lines.put(None)

    def lines(self) -> Iterator[bytes]:
        return iter(self._lines.get, None)

    def exit_code(self) -> int:
        return self._code

    def send(self, message: dict[str, Any]) -> None: ...

    def signal(self, number: int) -> None:
        self.end(-number)

    def stop(self) -> None:
        self._lines.put(None)


class Stage:
    """A run of scripted workers; what they say is merged by :meth:`take`."""

    def __init__(self, folder: Path, workers: int = 3) -> None:
        options = {"task": "custom", "model_path": "nowhere:build", "strategy": "allreduce", "engine": "hub"}
        plan = plan_local_run(profile_from_options("scripted", options), workers)
        self.workers = [Script() for _ in range(workers)]
        self.hub = Script()
        self.hub._lines.put(json.dumps({"port": 1}).encode())
        self.events: list[Event] = []
        self.folder = RunFolder.create(folder, plan, ["test"])
        self.run = LocalRun(plan, self.folder, self.events.append, self._worker, start_hub=lambda config, log: self.hub)
        self.run.start()

    def _worker(self, rank: int, log: BinaryIO) -> Script:
        return self.workers[rank]

    def take(self, source: int, event: Event) -> None:
        """Merge one event of a worker, or of the hub: -1."""
        self.run._take(source, to_line(event).encode())

    def ends(self, rank: int, code: int, reason: str = "") -> None:
        self.workers[rank].end(code, reason)
        self.run._ended(rank)

    def told(self, rank: int) -> list[tuple[str, str]]:
        return [(e.status, e.message) for e in self.events if isinstance(e, MemberEvent) and e.member == rank]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with stage.folder:
        stage.take(0, RunEvent(status="running"))
        yield stage
        stage.run.kill()


def lost(message: str) -> MemberEvent:
    return MemberEvent(member=1, status="lost", name="worker-1", message=message)


@pytest.mark.parametrize("hub_first", [True, False])
def test_a_loss_is_told_once_with_its_first_cause(stage: Stage, hub_first: bool) -> None:
    if hub_first:
        stage.take(-1, lost("silent for 5 s"))
    stage.ends(1, 255, "not reached for 40 s")
    if not hub_first:
        stage.take(-1, lost("silent for 5 s"))
    assert stage.told(1) == [("lost", "silent for 5 s" if hub_first else "not reached for 40 s")]
    assert sum(isinstance(event, WarningEvent) for event in stage.events) == 1
    assert stage.run.members.lost == [1]


def test_after_a_stop_every_member_has_stopped(stage: Stage) -> None:
    stage.take(-1, MemberEvent(member=2, status="lost", message="silent for 5 s"))
    stage.run.request_stop("stopped by the user")
    stage.take(0, MemberEvent(member=0, status="left", message="stopped by the user"))
    stage.take(-1, MemberEvent(member=0, status="left"))
    stage.ends(0, ExitCode.STOPPED)
    stage.take(-1, lost("its stream broke"))  # it was too slow, and is killed
    stage.ends(1, -signal.SIGKILL)
    stage.ends(2, 255, "not reached for 8 s")
    assert stage.told(0) == [("left", "stopped by the user")]
    assert stage.told(1) == [("left", "stopped by the user (killed by signal 9)")]
    assert stage.told(2) == [("lost", "silent for 5 s")]  # it was away before
    assert not any(isinstance(event, WarningEvent) for event in stage.events)
