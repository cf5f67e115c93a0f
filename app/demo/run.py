"""Plays the recorded run as a live one, in a process of its own that holds the run folder and obeys requests::

.venv/bin/python -m app.demo.run RUN_FOLDER --seed 0 --speed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.console import tour_profile
from app.demo.course import LOG, TourScript, recorded_training
from app.run_view.run_state import RunState, apply
from distributed.planning.feedback import prediction_metrics, write_planning
from distributed.planning.reasons import why_in_words
from profiles.errors import BadInput, ExitCode
from training.records.events import (
    EvaluationEvent,
    Event,
    MemberEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    TimingEvent,
    UnknownEvent,
)  # fmt: skip
from training.records.plan import FinalStatus, RunPlan, status_word
from training.records.run_folder import RunFolder
from training.run.outcome import figures_of, write_end
from training.run.processes import BackgroundProcess, run_from_stdin
from training.run.requests.request_book import Outcome, Request, RequestBook, leave_request, take_requests
from training.run.requests.request_server import LocalMachines
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME

if TYPE_CHECKING:
    from distributed.launcher import PlannedRun

_POLL = 0.05
_DURATIONS = ("compute", "wait", "transfer", "seconds")
_WITH_DURATIONS = (StepEvent, SyncEvent, EvaluationEvent, SnapshotEvent, TimingEvent)


def recorded(plan: RunPlan, seed: int = 0) -> list[Event]:
    """Return the events of a plan's run, with times in seconds since its start."""
    return TourScript(plan, seed).events()


class PlaybackStopped(Exception):
    """The user ended the run."""


class Player:
    """Writes the events and logs of one run into its folder.

    Args:
        run: held by this process.
        events: see :func:`recorded`.
        start: Unix time at which the run starts.
        speed: playback speed relative to the recording; durations are scaled with it, so that figures stay consistent.
    """

    def __init__(self, run: RunFolder, events: Sequence[Event], start: float, speed: float) -> None:
        self._run, self._events, self._start, self._speed = run, events, start, speed
        self._names = [member.name for member in run.plan().members]
        self._machines, self._book = LocalMachines(run.plan()), RequestBook()
        self._state = RunState()
        """State after the events written so far."""
        self._dropped: set[int] = set()
        """Members whose events are left out because they were dropped by request."""
        self._paused_at: float | None = None
        self._logs: dict[str, Path] = {}

    def write(self, until: float | None) -> None:
        """Write the events up to ``until`` seconds after the start, at once; ``None``: to the end."""
        for event in self._events:
            if until is not None and event.time / self._speed > until:
                return
            self._put(event)
        self._end("completed", self._due(self._events[-1]))

    def play(self) -> str:
        """Write every event when it is due; return how the run ended."""
        try:
            for event in self._events:
                self._wait_for(event)
                self._put(event)
        except PlaybackStopped as stop:
            self._end("cancelled", time.time(), str(stop))
            return "cancelled"
        self._end("completed", time.time())
        return "completed"

    def _due(self, event: Event) -> float:
        return self._start + event.time / self._speed

    def _put(self, event: Event) -> None:
        """Write an event, or a log line, with its due time."""
        due_at = self._due(event)
        if isinstance(event, UnknownEvent) and event.kind == LOG:
            log_line = event.model_extra or {}
            stamp = f"{datetime.fromtimestamp(due_at, timezone.utc):%Y-%m-%dT%H:%M:%S.%f}"[:-3]
            if log_line["log"] not in self._logs:
                self._logs[log_line["log"]] = self._run.log_path(log_line["log"])
            with self._logs[log_line["log"]].open("a", encoding="utf-8") as stream:
                stream.write(f"{stamp}Z {log_line['text']}\n")
        elif event.member not in self._dropped:
            shrunk = {}
            if self._speed != 1.0 and isinstance(event, _WITH_DURATIONS):
                shrunk = {name: getattr(event, name) / self._speed for name in _DURATIONS if hasattr(event, name)}
            self._say(event.model_copy(update=shrunk), due_at)

    def _say(self, event: Event, moment: float | None = None) -> None:
        event = event.model_copy(update={"time": time.time() if moment is None else moment})
        self._state = apply(self._state, event)
        self._run.append(event)
        if isinstance(event, RunEvent) and event.status in ("running", "paused"):
            self._run.update_metadata(status=event.status)

    def _end(self, status: FinalStatus, moment: float, message: str = "") -> None:
        if status == "completed":
            recorded_training().showcase.write(self._run.path / FOLDER / NAME)
        write_end(self._run, lambda event: self._say(event, moment), status, ExitCode.DONE, message, self._metrics)
        for request in take_requests(self._run.path):
            self._say(request.event("refused", f"the run is {status_word(status)}"))
        times = {"start_time": _utc_text(self._start), "end_time": _utc_text(moment)}
        self._run.update_metadata(**times)

    def _metrics(self) -> dict[str, Any]:
        lost = [member.rank for member in self._state.members.values() if member.status == "lost"]
        predicted = prediction_metrics(self._run, learn=False) if self._speed == 1.0 else {}
        return {**figures_of(self._run), "lost_members": lost, **predicted}

    # -------------------------------------------------------------------------------------------------------- requests

    def _wait_for(self, event: Event) -> None:
        while True:
            for request in take_requests(self._run.path):
                self._answer(request)
            left = self._due(event) - time.time()
            if self._paused_at is None and left <= 0:
                return
            time.sleep(_POLL if self._paused_at is not None else min(left, _POLL))

    def _answer(self, request: Request) -> None:
        """Carry out a request, and report its outcome.

        Raises:
            PlaybackStopped: the request ends the run.
        """
        try:
            self._say(self._book.accept(request))
            self._tell(request, "done", self._carry_out(request))
        except BadInput as refusal:
            self._tell(request, "refused", refusal.message)
        except PlaybackStopped:
            self._tell(request, "done", "the run is stopped")
            raise

    def _tell(self, request: Request, outcome: Outcome, message: str) -> None:
        self._book.end(request, outcome)
        self._say(request.event(outcome, message))

    def _carry_out(self, request: Request) -> str:
        match request.action:
            case "pause" | "resume":
                return self._pause(request.action == "pause")
            case "snapshot":
                return self._snapshot()
            case "drop" | "add":
                return self._change(request.machine, request.action == "add")
            case "stop":
                self._snapshot()
                for rank in self._live():
                    self._say_of(rank, "left", "stopped by the user")
                raise PlaybackStopped("stopped")
        raise PlaybackStopped("ended by the user")

    def _pause(self, pause: bool) -> str:
        """Pause or resume; later events are delayed by the length of the pause."""
        now = time.time()
        self._start += 0.0 if self._paused_at is None else now - self._paused_at
        self._paused_at = now if pause else None
        for rank in self._live():
            self._say(RunEvent(member=rank, status="paused" if pause else "running"))
        return f"the run is {'paused' if pause else 'running'}"

    def _snapshot(self) -> str:
        members = self._state.members
        live = [rank for rank in self._live() if rank in members and members[rank].step]
        step = max((members[rank].step for rank in live), default=0)
        size = next((event.bytes for event in self._events if isinstance(event, SnapshotEvent)), 0)
        for rank in live:
            path = f"checkpoints/member-{rank}/step-{step:08d}"
            self._say(SnapshotEvent(member=rank, step=step, path=path, bytes=size, seconds=0.1, live=tuple(live)))
        return f"of step {step}"

    def _change(self, machine: str, add: bool) -> str:
        (rank,) = self._machines.ranks(machine)
        if add == (rank in self._live()):
            raise BadInput(f"{machine} {'trains already' if add else 'is not in the run'}")
        if not add and len(self._live()) < 2:
            raise BadInput("it is the last machine; stop the run instead")
        if add:
            self._dropped.discard(rank)
            self._say_of(rank, "joined", "joins a running group")
            self._say_of(rank, "ready", "")
            return "trains with the others"
        self._say_of(rank, "left", "dropped by the user")
        self._dropped.add(rank)
        return "left after a synchronisation"

    def _live(self) -> list[int]:
        members = self._state.members
        return [rank for rank in range(len(self._names)) if rank not in members or members[rank].active]

    def _say_of(self, rank: int, status: str, message: str) -> None:
        document = {"member": rank, "status": status, "name": self._names[rank], "message": message}
        self._say(MemberEvent.model_validate(document))


def _utc_text(moment: float) -> str:
    """Return a time in the format of ``metadata.json``."""
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="seconds")


def start_demo_run(
    output_dir: Path, planned: PlannedRun, command: Sequence[str], seed: int = 0, speed: float = 1.0
) -> Path:
    """Start the recorded run with this plan and return its folder; it outlives this process and its terminal.

    Raises:
        BadInput: the folder cannot be created.
        RunFailed: the run's process did not start.
    """
    run = create(output_dir, planned, command)
    run.close()
    BackgroundProcess("app.demo.run", "--seed", str(seed), "--speed", str(speed)).start(run.path)
    return run.path


def pace_of(seed: int) -> float:
    """Return the playback speed: 1 for seed 0, up to 5 % slower or faster for others."""
    return random.Random(seed).uniform(0.95, 1.05) if seed else 1.0


def create(output_dir: Path, planned: PlannedRun, command: Sequence[str]) -> RunFolder:
    """Create and hold the folder of a run of the tour.

    Raises:
        BadInput: the folder cannot be created.
    """
    profile = planned.plan.profile.model_copy(update={"name": tour_profile(planned.plan.world_size)})
    plan = planned.plan.model_copy(update={"profile": profile})
    reason = "recorded" if planned.planning is None else f"recorded: {why_in_words(planned.planning)}"
    run = RunFolder.create(output_dir, plan, list(command), run_type="distributed", strategy_reason=reason)
    if planned.planning is not None:
        write_planning(run.path, planned.planning, planned.figures)
    return run


def main() -> int:
    """Play the run whose folder is read from stdin, to its end."""
    parser = argparse.ArgumentParser(prog="python -m app.demo.run", description="Play the recorded run.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", type=float, default=1.0)
    arguments = parser.parse_args()
    path = run_from_stdin()
    if path is None:
        return os.EX_OK
    signal.signal(signal.SIGTERM, lambda *_: leave_request(path, "stop"))
    with RunFolder.take_over(path) as run:
        Player(run, recorded(run.plan()), time.time(), pace_of(arguments.seed) * arguments.speed).play()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
