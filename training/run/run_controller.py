"""The control of one run: starts coordinator and workers, merges their events into the folder, reports the outcome.

Nothing here imports torch: the process that watches a run stays small and starts at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, BinaryIO, Literal

from profiles.errors import BadInput, ExitCode, MusterError, counted, exit_text
from training.numerics.gradient_norms import GradientNorms
from training.records.events import (
    AnswerEvent,
    ErrorEvent,
    Event,
    MemberEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    WarningEvent,
)
from training.records.plan import FinalStatus, MemberPlan, ProcessPlan, RunPlan
from training.records.run_folder import RunFolder
from training.run.intake import COORDINATOR, EventIntake
from training.run.local_plan import SESSION, record_session
from training.run.local_workers import AdoptWorker, StartWorker, local_starter
from training.run.meeting_point import MeetingPoint, StartCoordinator
from training.run.members.member_history import MemberHistory
from training.run.members.membership import Membership, WorkerHandle
from training.run.orders import OrderAction, OrderEnd
from training.run.outcome import RunOutcome, RunTotals, blaming, early_end, ending_of, write_end
from training.run.processes import Worker
from training.run.stopping import FAILED_GRACE, SCRIPT_GRACE, OrderDispatcher, ProgressMonitor, Stopping
from training.script.script_start import is_peer_loss


class RunController:
    """One run: its coordinator and workers, on this machine or, as the supervisor uses it, on others.

    Args:
        folder: the run folder, held by this process.
        on_event: called with every event after it was written, always from the thread that calls :meth:`wait`.
        start_worker: starts the process of a rank; default: ``python -m WORKER``.
        listen: literal address of the coordinator.
        more_metrics: called at the end for further entries of ``metrics.json``.
        start_coordinator: starts the coordinator; default: a process of this machine.
        worker: the module that a worker of this machine runs.
        progress: follows the run's pace; default: a new :class:`ProgressMonitor`.
    """

    returns_after: tuple[str, ...] = ()
    """Beginnings of the reasons of a loss after which a member comes back by itself."""

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        on_event: Callable[[Event], None],
        start_worker: StartWorker | None = None,
        listen: str = "127.0.0.1",
        more_metrics: Callable[[], dict[str, Any]] = dict,
        start_coordinator: StartCoordinator | None = None,
        worker: str = "training.workers.worker",
        progress: ProgressMonitor | None = None,
    ) -> None:
        self.plan, self.folder = plan, folder
        self._more_metrics, self._on_event = more_metrics, on_event
        module = "training.workers.script_worker" if plan.launch else worker
        self._start_worker = start_worker or local_starter(plan, folder, module)
        self.members = Membership(plan)
        self._intake = EventIntake(self.members, self._record, self._kill_invalid)
        self._orders = OrderDispatcher(self.members)
        self._progress = progress or ProgressMonitor()
        self.meeting_point = MeetingPoint(
            plan, folder, self._log, lambda lines: self._intake.listen(COORDINATOR, lines), listen, start_coordinator
        )
        self._has_begun = False
        """Whether the first step could be taken: from then on a failure is the run's, not the input's."""
        self._status = "starting"
        self._first_error: ErrorEvent | None = None
        self._late_error: ErrorEvent | None = None
        """Error of a member that had trained to the end: its model may not have been saved."""
        self._totals, self._norms = RunTotals(), GradientNorms()
        self._stopping = Stopping(self.members, self._orders, self._progress)
        self._logs = ExitStack()

    # ------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Start coordinator and workers.

        Raises:
            BadInput: the coordinator's port is taken.
        """
        self._note_earlier()
        self._record(RunEvent(status="starting", details={"workers": self.plan.world_size, "plan": self.plan.hash()}))
        self._begin({process.rank: self._start_worker for process in self._present_processes()})

    def take_over(self, adopt: AdoptWorker) -> None:
        """Go on with a run that trains, in the place of a supervisor that was killed.

        Args:
            adopt: returns the worker of a rank, which runs; called with the number of its last recorded line.
        """
        history = MemberHistory.of(self.folder.events())
        self._note_earlier()
        self.members.restore(history)
        self._orders.count_from(history.newest)
        self.meeting_point.elected = history.elected
        self._has_begun, self._status, self._intake.may_pause = True, history.run_status, True
        self._record(WarningEvent(message="the run's supervisor was killed; another one has taken its place"))
        self._begin({rank: partial(adopt, line=line) for rank, line in history.attached.items()}, again=True)

    def _note_earlier(self) -> None:
        """Note the events of an earlier attempt, where the run is resumed, or of a killed supervisor."""
        for event in self.folder.events():
            self._totals.note(event)
            self._intake.note_earlier(event)
            if isinstance(event, SnapshotEvent):
                self._progress(event)

    def _begin(self, starts: Mapping[int, StartWorker], again: bool = False) -> None:
        """Start the workers and the place where they meet."""
        try:
            for rank, start in starts.items():
                worker = start(rank, self._log(self.members.name(rank)))
                self.members.workers[rank] = WorkerHandle(worker)
                self._intake.listen(rank, worker.lines())
            self.meeting_point.start(again)
        except BaseException as error:
            if not again or not isinstance(error, MusterError):
                self.kill()
                raise
            self._first_error = ErrorEvent.of(error)
            self._record(self._first_error)
            return self._stopping.keep_and_end(error.message)
        for rank, handle in self.members.workers.items():
            handle.process.send(self.meeting_point.addresses(rank))

    def _present_processes(self) -> list[ProcessPlan]:
        """Return the processes to start; record the absent members as lost."""
        absent, message = self.plan.absent, "it is not there, and the run goes on without it"
        for rank in (self.plan.processes_of(member)[0] for member in absent):
            self._record(MemberEvent(member=rank, status="lost", name=self.members.name(rank), message=message))
        return [p for p in self.plan.processes if p.member.rank < self.plan.world_size and p.member.rank not in absent]

    def _log(self, name: str) -> BinaryIO:
        return self._logs.enter_context(self.folder.log_path(name).open("ab"))

    # ------------------------------------------------------------------------------------------------------- events

    def _record(self, event: Event) -> None:
        written = self.folder.append(self.members.attributed(event))
        self._totals.note(written)
        self._on_event(written)

    def wait(self) -> RunOutcome:
        """Merge events until all workers have ended; write the end into the run folder."""
        try:
            while self.members.is_running():
                source, line = self._intake.take()
                if line is not None:
                    self.take(source, line)
                elif source >= 0:
                    self.note_end(source)
            return self.outcome()
        except MusterError as error:  # the folder cannot be written: the members keep what they have done
            self._stopping.keep_and_end(error.message)
            self._intake.discard()
            raise
        finally:
            self._intake.close()
            self.kill()

    def take(self, source: int, line: bytes) -> None:
        """Merge a line of a member or of the coordinator, which is :data:`~training.run.intake.COORDINATOR`."""
        event = None if source in self.members.lost else self._intake.event(source, line)
        if event is not None and source != COORDINATOR:
            event = self.members.workers[source].process.note_event(event)
        if isinstance(event, RunEvent) and self.plan.is_script and SESSION in event.details:
            self.plan = self.members.plan = record_session(self.folder, self.members.plan, event.details[SESSION])
            return self._record(event)
        if event is None or (isinstance(event, RunEvent) and not self._note_status(event)):
            return
        if isinstance(event, RequestEvent):
            self.members.aware_members.get(event.machine, set()).add(source)
            return
        if isinstance(event, AnswerEvent):
            return self._orders.receive_answer(source, event)
        if isinstance(event, ErrorEvent) and self.plan.launch is not None and self._first_error is None:
            event = blaming(event, [self.members.name(rank) for rank in sorted(self.members.done - {source})])
        if isinstance(event, ErrorEvent) and not self._stopping.reason and self._can_continue_without(source):
            self._late_error = event if source in self.members.done else self._late_error
            self.members.workers[source].failure = "" if event.lost_others else event.message
            return self._continue_without(source, event.message, FAILED_GRACE)
        if isinstance(event, MemberEvent) and not self._note_member(source, event):
            return
        if self._intake.should_log(source, event, len(line)):
            self._record(event)
        else:
            self._totals.note(event)
        self._progress(self.members.attributed(event))
        self.meeting_point.note_event(event)
        if isinstance(event, RunEvent) and "step" in event.details and self._totals.given_up:
            newest = f"the newest snapshot that all machines have is of step {event.details['step']}"
            steps = counted(self._totals.given_up, "step is", "steps are")
            self._record(WarningEvent(message=f"{newest}: {steps} repeated"))
        elif isinstance(event, StepEvent):
            self.members.workers[source].step = event.step
            for warning in self._norms.warnings(source, event, self.members.name):
                self._record(warning)
        elif isinstance(event, ErrorEvent):
            self._note_error(source, event)

    def _kill_invalid(self, rank: int, cause: str) -> None:
        """Kill a member that writes invalid events, if the others can go on."""
        if not self._stopping.reason and self._can_continue_without(rank):
            self.members.workers[rank].failure = cause
            self._continue_without(rank, cause, 0.0)

    def _continue_without(self, rank: int, cause: str, grace: float) -> None:
        """Go on without a member that cannot, or must not; it has ``grace`` seconds to end by itself."""
        self.members.forget_left(rank)  # it may have left the coordinator before it reported why
        self._note_loss(rank, cause)
        self.members.detached.add(rank)
        self.meeting_point.ban(rank)
        if self.meeting_point.elected:
            self.members.send({"command": "ban", "rank": rank})
        self._orders.look()
        self.members.end_within(rank, grace)

    def _note_status(self, event: RunEvent) -> bool:
        """Record the run's status, which each member reports; return whether it is new."""
        if event.status == self._status:
            return False
        self._status = event.status
        self._has_begun = True
        self.folder.begin(event.status)
        return True

    def _note_member(self, source: int, event: MemberEvent) -> bool:
        """Record a change of a member; return whether it is new. After a stop, :meth:`note_end` records losses."""
        if event.status == "lost" and event.member is not None and self._stopping.reason:
            self.members.detached.add(event.member)
            news = False
        else:
            news = self.members.note(source, event)
        self._orders.look()
        return news

    def _note_error(self, rank: int, event: ErrorEvent) -> None:
        self.members.workers[rank].error, first = event, self._first_error
        if first is None and not self._stopping.reason:
            self._first_error = event
            self._stopping.end("another member failed", FAILED_GRACE)
        elif first is not None and self.plan.launch is None and is_peer_loss(first.message):
            self._first_error = first if is_peer_loss(event.message) else event  # the cause may arrive after its effect

    def note_end(self, rank: int) -> None:
        """Record that a member's process has ended."""
        handle = self.members.workers[rank]
        code = handle.exit_code = handle.process.exit_code()
        self._stopping.note_end()
        self.meeting_point.note_end(rank, handle.process.end_reason)
        if code in (ExitCode.DONE, ExitCode.STOPPED) or handle.error is not None or rank in self.members.lost:
            return
        cause = handle.failure or handle.process.end_reason or f"its worker {exit_text(code)}"
        if self._stopping.reason:
            cause = "its worker was killed, as it had not ended in time" if code == -signal.SIGKILL else cause
            self._note_gone(rank, "left", f"{self._stopping.reason} ({cause})")
            return
        if self._can_continue_without(rank):
            return self._note_loss(rank, cause)
        error = early_end(rank, self.members.name(rank), cause, code, self.folder.logs)
        self._record(error)
        self._note_error(rank, error)

    def _can_continue_without(self, rank: int) -> bool:
        """Whether the run can do without a member: as long as another trains or has come to the end."""
        return self._has_begun and self.plan.has_coordinator and self.members.can_continue_without(rank)

    def _note_loss(self, rank: int, cause: str) -> None:
        name = self.members.name(rank)
        if not self.members.note_lost(rank):
            return
        self.members.end_member_of(rank, FAILED_GRACE)
        cause = cause.removeprefix(f"{name}: ")  # readers of the event add the member's name
        is_news = self._note_gone(rank, "lost", cause)
        if not is_news and not cause.startswith(self.returns_after):  # the coordinator's report leaves this open
            self._record(ending_of(rank, name, cause, self.folder.path))

    def _note_gone(self, rank: int, status: Literal["left", "lost"], message: str) -> bool:
        """Record that a member is gone; return whether that is news."""
        if is_news := self.members.note_gone(rank):
            self._record(MemberEvent(member=rank, status=status, name=self.members.name(rank), message=message))
        return is_news

    # --------------------------------------------------------------------------------------------------------- stop

    def request_stop(self, message: str) -> None:
        """Stop all members after the first step that all can reach, with snapshots; a signal's handler may call it."""
        if self.plan.is_script:
            return self._stopping.end(message, SCRIPT_GRACE)
        self._stopping.stop(message, self._has_begun)

    def command(self, action: OrderAction, on_done: OrderEnd | None = None) -> None:
        """Pause, resume, or write a snapshot after the same step on all members; then call ``on_done``."""
        if self.plan.is_script:
            raise BadInput(f"a launched script cannot take the request '{action}'", "it can only be stopped")
        self._intake.may_pause |= action == "pause"
        self._orders.give(action, on_done)

    # ------------------------------------------------------------------------------------------------- who takes part

    def drop(self, members: Collection[int]) -> None:
        """Ask members to leave at their next synchronisation point; the others go on. Joining members are killed.

        Raises:
            BadInput: they cannot leave, or no member would be left.
        """
        self.check_changeable()
        self.members.dismiss(members)

    def expect(self, member: MemberPlan) -> None:
        """Announce a new member to all; :meth:`admit` it when :meth:`Membership.unaware` is empty.

        Raises:
            BadInput: the run cannot take another member.
        """
        self.check_changeable()
        self.members.announce(member)
        self.folder.record_added(self.members.plan.added)
        self.members.send({"command": "expect", "member": member.model_dump(mode="json")})

    def admit(self, member: int) -> None:
        """Start the workers of a member that was lost or has left; the others send them the joining state.

        Raises:
            BadInput: it already takes part, or no member can let it in.
        """
        self.check_changeable()
        self.members.check_can_join(member)
        workers: dict[int, Worker] = {}
        for rank in self.members.plan.processes_of(member) if self.meeting_point.elected else ():
            self.members.send({"command": "admit", "rank": rank})
        try:
            for rank in self.members.plan.processes_of(member):
                workers[rank] = self._start_worker(rank, self._log(self.members.name(rank)))
            self.members.add_workers(member, workers)
        except BaseException:
            for worker in workers.values():
                worker.signal(signal.SIGKILL)
            raise
        self.meeting_point.admit(workers)
        for rank, worker in workers.items():
            self._intake.listen(rank, worker.lines())
        for rank, worker in workers.items():
            worker.send(self.meeting_point.addresses(rank))

    def check_changeable(self) -> None:
        """Raise ``BadInput`` if no member can leave or join."""
        self.members.check_changeable()
        if not self._has_begun or self._stopping.reason:
            raise BadInput(f"the run {'is about to end' if self._stopping.reason else 'has not started training yet'}")

    def kill(self) -> None:
        """End every process of the run at once. Idempotent."""
        self._stopping.over()
        self.members.kill()
        self.meeting_point.stop()
        self._logs.close()

    # ---------------------------------------------------------------------------------------------------------- end

    def outcome(self) -> RunOutcome:
        """Return the outcome of the run, and write it into its folder."""
        error = self._first_error or (None if self.folder.model.is_dir() else self._late_error)
        status: FinalStatus
        resumable = True
        if error is not None:
            unusable = error.exit_code == ExitCode.BAD_INPUT and not self._has_begun  # later it is the run's failure
            code = ExitCode.BAD_INPUT if unusable else ExitCode.RUN_FAILED
            status, message, hint, resumable = "failed", error.message, error.hint, error.resumable
        elif self.members.stopped_early or (self._stopping.reason and not self.members.all_done()):
            status, code, hint = "cancelled", ExitCode.STOPPED, ""
            summary = self._stopping.reason if self.plan.is_script else self._progress.summary
            message = "; ".join([summary, *self.members.error_messages])
        else:
            status, code, message, hint = "completed", ExitCode.DONE, "", ""
        metrics = write_end(self.folder, self._record, status, code, message, self._metrics)
        return RunOutcome(status, self.folder.path, metrics, code, message, hint, resumable)

    def _metrics(self) -> dict[str, Any]:
        stopping = self._progress.metrics if self._stopping.reason or self.members.stopped_early else {}
        return {**self._totals.figures(), "lost_members": self.members.lost_members, **stopping, **self._more_metrics()}
