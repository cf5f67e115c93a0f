"""A run on this machine: starts hub and workers, merges their events into the run folder, and says how it ended.

Nothing here imports torch: the process that watches a run stays small and starts at once.
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from profiles.errors import BadInput, ExitCode
from training.events import (
    ErrorEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RequestEvent,
    RunEvent,
    StepEvent,
    WarningEvent,
    from_line,
)
from training.local_engine import LocalEngine, StartHub
from training.membership import Membership, Watched
from training.plan import MemberPlan, RunPlan
from training.processes import SubprocessWorker, Worker
from training.run_folder import RunFolder

STOP_GRACE = 4.0
"""Seconds a worker has to reach the agreed step and write its snapshot before it is killed."""
_STOP_MARGIN = 0.5
"""Seconds of training to look ahead for the step at which all stop: our view of the members is that old at most."""


@dataclass(frozen=True)
class LocalOutcome:
    """How a local run ended."""

    status: str
    """``completed``, ``failed`` or ``cancelled``."""
    run_dir: Path
    metrics: dict[str, Any]
    exit_code: ExitCode
    message: str = ""
    hint: str = ""


@dataclass
class _Observed:
    """What the run knows of itself."""

    begun: bool = False
    """The first step could be taken: from here on a failure is the run's, not the input's."""
    status: str = "starting"
    started: float = 0.0
    first_error: ErrorEvent | None = None
    step_seconds: float = 1.0
    samples: int = 0
    before: dict[str, dict[str, float]] = field(default_factory=dict)
    after: dict[str, dict[str, float]] = field(default_factory=dict)


StartWorker = Callable[[int, BinaryIO], Worker]


class LocalRun:
    """One run on this machine.

    Args:
        plan: what to run.
        folder: where everything goes; held by this process.
        on_event: called with every event after it was written, always from the thread that calls :meth:`wait`.
        start_worker: starts the process of a rank; default: ``python -m training.worker``.
        listen: literal address of the hub.
        more_metrics: asked at the end for what else belongs into ``metrics.json``.
        start_hub: where the hub is to run; default: a process of this machine.
    """

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        on_event: Callable[[Event], None],
        start_worker: StartWorker | None = None,
        listen: str = "127.0.0.1",
        more_metrics: Callable[[], dict[str, Any]] = dict,
        start_hub: StartHub | None = None,
    ) -> None:
        self.plan = plan
        self._more_metrics = more_metrics
        self.folder = folder
        self._on_event = on_event
        self._start_worker = start_worker or self._start_subprocess
        self._inbox: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        self.members = Membership(plan)
        self._engine = LocalEngine(
            plan, folder, self._log, lambda lines: self._read_in_thread(-1, lines), listen, start_hub
        )
        self._seen = _Observed()
        self._stopping = ""  # why all members are to end; empty: they are not
        self._address = ""
        self._killer: threading.Timer | None = None
        self._logs: list[BinaryIO] = []

    # ------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Start hub and workers.

        Raises:
            BadInput: the hub's port is taken.
        """
        self._seen.started = time.monotonic()
        for event in self.folder.events():  # of an earlier attempt, where the run is resumed
            self._note_evaluation(event)
        self._record(RunEvent(status="starting", details={"workers": self.plan.world_size, "plan": self.plan.hash()}))
        try:
            for member in self.plan.members:
                worker = self._start_worker(member.rank, self._log(member.name))
                self.members.workers[member.rank] = Watched(worker)
                self._read_in_thread(member.rank, worker.lines())
            self._address = self._engine.start()
        except BaseException:
            self.kill()
            raise
        for watched in self.members.workers.values():
            watched.process.send({"address": self._address})

    def _start_subprocess(self, rank: int, log: BinaryIO) -> Worker:
        arguments = {
            "--plan": self.folder.path / "plan.json",
            "--rank": rank,
            "--run-dir": self.folder.path,
            "--secrets": self.folder.secrets,
        }
        flat = [str(part) for pair in arguments.items() for part in pair]
        return SubprocessWorker(flat, self.plan.members[rank].threads, log)

    def _log(self, name: str) -> BinaryIO:
        stream = self.folder.log_path(name).open("ab")
        self._logs.append(stream)
        return stream

    # ------------------------------------------------------------------------------------------------------- events

    def _read_in_thread(self, source: int, lines: Iterator[bytes]) -> None:
        threading.Thread(target=self._read, args=(source, lines), name=f"events-{source}", daemon=True).start()

    def _read(self, source: int, lines: Iterator[bytes]) -> None:
        try:
            with contextlib.suppress(ValueError, OSError):  # the stream was closed under us: the process is gone
                for line in lines:
                    self._inbox.put((source, line))
        finally:  # whatever went wrong: who waits for this process must not wait for ever
            self._inbox.put((source, None))

    def _record(self, event: Event) -> None:
        written = self.folder.append(event)
        self._on_event(written)

    def wait(self) -> LocalOutcome:
        """Merge events until all workers have ended; write the end into the run folder."""
        try:
            while self.members.goes_on():
                source, line = self._inbox.get()
                if line is not None:
                    self._take(source, line)
                elif source >= 0:
                    self._ended(source)
            return self._outcome()
        finally:
            self.kill()

    def _take(self, source: int, line: bytes) -> None:
        try:
            event = from_line(line)
        except ValueError:
            event = WarningEvent(member=source, message=f"not an event: {line!r:.200}")
        if isinstance(event, RunEvent) and not self._note_status(event):
            return
        if isinstance(event, RequestEvent):
            self.members.known_to.get(event.machine, set()).add(source)
            return
        if isinstance(event, ErrorEvent) and source in self.members.apart and self._others_go_on(source):
            return self._note_loss(source, event.message)
        if isinstance(event, MemberEvent) and event.status == "lost" and self._stopping:
            return  # :meth:`_ended` tells it
        if isinstance(event, MemberEvent) and not self.members.note(source, event):
            return
        self._record(event)
        if isinstance(event, StepEvent):
            self._note_step(source, event)
        elif isinstance(event, ErrorEvent):
            self._note_error(source, event)
        self._note_evaluation(event)

    def _note_status(self, event: RunEvent) -> bool:
        """The members report the run's status each; return whether this is the first to say it."""
        if event.status == self._seen.status:
            return False
        self._seen.status = event.status
        self._seen.begun = True
        self.folder.update_metadata(status=event.status)
        return True

    def _note_evaluation(self, event: Event) -> None:
        if isinstance(event, EvaluationEvent):
            known = self._seen.after if event.step else self._seen.before
            known[event.split] = dict(event.metrics)

    def _note_step(self, rank: int, event: StepEvent) -> None:
        self.members.workers[rank].step = event.step
        self._seen.samples += event.samples
        self._seen.step_seconds = event.compute + event.wait

    def _note_error(self, rank: int, event: ErrorEvent) -> None:
        self.members.workers[rank].error = event
        if self._seen.first_error is None and not self._stopping:
            self._seen.first_error = event
            self._end_all("another member failed", snapshot=False)

    def _ended(self, rank: int) -> None:
        watched = self.members.workers[rank]
        code = watched.exit_code = watched.process.exit_code()
        if self.members.only_guests():
            self._kill_workers()
        if code in (ExitCode.DONE, ExitCode.STOPPED) or watched.error is not None or rank in self.members.lost:
            return
        cause = watched.process.end_reason or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        if self._stopping:
            return self._note_gone(rank, "left", f"{self._stopping} ({cause})")
        if self._others_go_on(rank):
            return self._note_loss(rank, cause)
        name = self.members.name(rank)
        message = f"{name} ended before its work was done ({cause})"
        error = ErrorEvent(member=rank, message=message, hint=f"see {self.folder.logs / (name + '.log')}")
        self._record(error)
        self._note_error(rank, error)

    def _others_go_on(self, rank: int) -> bool:
        """Whether the run can do without a member: the hub can, as long as another trains or has come to the end."""
        return self._seen.begun and self.plan.engine == "hub" and self.members.can_do_without(rank)

    def _note_loss(self, rank: int, cause: str) -> None:
        name = self.members.name(rank)
        self.members.lost.append(rank)
        self._note_gone(rank, "lost", cause)
        self._record(WarningEvent(member=rank, message=f"{name} is lost ({cause}); the others go on"))

    def _note_gone(self, rank: int, status: Literal["left", "lost"], message: str) -> None:
        if self.members.note_gone(rank):
            self._record(MemberEvent(member=rank, status=status, name=self.members.name(rank), message=message))

    # --------------------------------------------------------------------------------------------------------- stop

    def request_stop(self, message: str) -> None:
        """Stop all members after the same step, with snapshots; whoever is not there in time is killed."""
        ahead = max(2, math.ceil(_STOP_MARGIN / max(self._seen.step_seconds, 1e-3)))
        step = max((w.step for w in self.members.workers.values()), default=0) + ahead
        self._end_all(message, step)

    def _end_all(self, message: str, at_step: int = 0, snapshot: bool = True) -> None:
        if self._stopping:
            return
        self._stopping = message
        for watched in self.members.workers.values():
            watched.process.send({"command": "stop", "at_step": at_step, "reason": message, "snapshot": snapshot})
            if not self._seen.begun:
                watched.process.signal(signal.SIGKILL)  # nothing to keep before the first step
        self._killer = threading.Timer(STOP_GRACE, self._kill_workers)
        self._killer.daemon = True
        self._killer.start()

    def command(self, name: str) -> None:
        """Pass ``pause``, ``resume`` or ``snapshot`` on, to act after the same step on all members."""
        ahead = max(2, math.ceil(_STOP_MARGIN / max(self._seen.step_seconds, 1e-3)))
        at_step = 0 if name == "resume" else max(w.step for w in self.members.workers.values()) + ahead
        for watched in self.members.workers.values():
            watched.process.send({"command": name, "at_step": at_step})

    # ------------------------------------------------------------------------------------------------- who takes part

    def drop(self, ranks: Collection[int]) -> None:
        """Ask members to leave at their next synchronisation point; the others go on. Who is not in yet is ended.

        Raises:
            BadInput: they cannot, or nobody would be left.
        """
        self.check_changeable()
        if set(ranks) <= self.members.guests:
            for rank in ranks:
                self.members.workers[rank].process.signal(signal.SIGKILL)
            return
        self.members.dismiss(ranks)
        for rank in ranks:
            order = {"command": "stop", "at_sync": True, "reason": "let go", "snapshot": False}
            self.members.workers[rank].process.send(order)

    def expect(self, member: MemberPlan) -> None:
        """Tell all members of one that is to come; :meth:`admit` it when no one is :meth:`Membership.unaware` of it.

        Raises:
            BadInput: there is no room.
        """
        self.check_changeable()
        self.members.announce(member)
        for watched in self.members.workers.values():
            watched.process.send({"command": "expect", "member": member.model_dump(mode="json")})

    def give_up(self, rank: int) -> None:
        """End a worker that the hub has lost and that may still be waited for; :meth:`admit` may follow its end."""
        if self.members.is_going(rank) and rank not in self.members.leaving:
            self.members.workers[rank].process.signal(signal.SIGKILL)

    def admit(self, rank: int) -> None:
        """Start a worker for a member that was lost or has left; the others hand it what it needs to go on with them.

        Raises:
            BadInput: it takes part, or nobody can let it in.
        """
        self.check_changeable()
        self.members.check_room(rank)
        worker = self._start_worker(rank, self._log(self.members.name(rank)))
        try:
            self.members.seat(rank, worker)
        except BadInput:
            worker.signal(signal.SIGKILL)
            raise
        self._read_in_thread(rank, worker.lines())
        worker.send({"address": self._address})

    def check_changeable(self) -> None:
        """Raise ``BadInput`` where nobody can leave or be let in."""
        self.members.refuse_change()
        if not self._seen.begun or self._stopping:
            raise BadInput("the run is about to end" if self._stopping else "the run has not begun to train yet")

    def _kill_workers(self) -> None:
        for watched in self.members.workers.values():
            if watched.exit_code is None:
                watched.process.signal(signal.SIGKILL)

    def kill(self) -> None:
        """End every process of the run at once. Idempotent."""
        if self._killer is not None:
            self._killer.cancel()
        self._kill_workers()
        self._engine.stop()
        for stream in self._logs:
            stream.close()
        self._logs = []

    # ---------------------------------------------------------------------------------------------------------- end

    def _outcome(self) -> LocalOutcome:
        error = self._seen.first_error
        status: Literal["completed", "failed", "cancelled"]
        if error is not None:
            status, code, message, hint = "failed", self._error_code(error), error.message, error.hint
        elif self._stopping:
            status, code, message, hint = "cancelled", ExitCode.STOPPED, "stopped", ""
        else:
            status, code, message, hint = "completed", ExitCode.DONE, "", ""
        metrics = self._metrics()
        if code == ExitCode.BAD_INPUT:
            self.folder.close()
            shutil.rmtree(self.folder.path, ignore_errors=True)
            return LocalOutcome(status, self.folder.path, metrics, code, message, hint)
        self._record(RunEvent(status=status, message=message))
        self.folder.finish(status, metrics, message)
        return LocalOutcome(status, self.folder.path, metrics, code, message, hint)

    def _error_code(self, error: ErrorEvent) -> ExitCode:
        """Bad input is exit code 2 only where nothing had begun yet."""
        if error.exit_code == ExitCode.BAD_INPUT and not self._seen.begun:
            return ExitCode.BAD_INPUT
        return ExitCode.RUN_FAILED

    def _metrics(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._seen.started
        return {
            "before": self._seen.before,
            "after": self._seen.after,
            "steps": max((w.step for w in self.members.workers.values()), default=0),
            "samples": self._seen.samples,
            "seconds": seconds,
            "samples_per_second": self._seen.samples / seconds if seconds else 0.0,
            "lost_members": self.members.lost,
            **self._more_metrics(),
        }
