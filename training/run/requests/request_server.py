"""Carries out the requests left in a run's ``requests`` folder, and reports their outcome as events of the run."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from profiles.errors import BadInput, MusterError
from profiles.installation import program
from training.records.events import Event, MemberEvent, RequestEvent, RunEvent
from training.records.plan import MemberPlan, RunPlan, status_word
from training.run.requests.request_book import Outcome, Request, RequestBook, take_requests
from training.run.run_controller import RunController

_POLL = 0.05
_DONE = {"pause": "the run is paused after step {step}", "resume": "the run goes on", "snapshot": "of step {step}"}
_SETTLE_TIMEOUT = 30.0
"""Seconds to wait for the end of a lost worker before its replacement starts, and for the other members to acknowledge
a new machine."""

Note = Callable[[Event], object]


class RunMachines(Protocol):
    """The machines of a run."""

    def ranks(self, machine: str) -> tuple[int, ...]:
        """Return the ranks on a machine, or that of a member, by name.

        Raises:
            BadInput: the run has no such machine.
        """
        ...

    def prepare(self, request: Request) -> tuple[int, ...]:
        """Prepare a machine for workers of the run, with code and data, and return its ranks.

        A new machine is announced to the run.

        Raises:
            MusterError: it cannot take part.
        """
        ...


class LocalMachines:
    """The members of a run on this machine only, by name; nothing needs to be prepared."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    def ranks(self, machine: str) -> tuple[int, ...]:
        if not (ranks := self._plan.ranks_of(machine)):
            names = ", ".join(member.name for member in self._plan.members)
            raise BadInput(f"no member '{machine}' in this run", f"known: {names}")
        return ranks

    def prepare(self, request: Request) -> tuple[int, ...]:
        try:
            return self.ranks(request.machine)
        except BadInput as error:
            several = program("train", self._plan.profile.name, "--hosts", "localhost,user@host")
            message = f"'{request.machine}' cannot join: this run has only workers of this computer"
            raise BadInput(message, f"{error.hint}; a run on several machines begins with {several}") from error


class RequestServer:
    """Serves the requests of one run; call it with every event of the run, and :meth:`poll` or :meth:`open` it.

    Args:
        note: writes an event to the run's log; called from any thread.
    """

    def __init__(self, run: RunController, run_dir: Path, note: Note, machines: RunMachines) -> None:
        self._run = run
        self._run_dir = run_dir
        self._note = note
        self._machines = machines
        self._lock = threading.RLock()
        self._adding = threading.Lock()
        self._book = RequestBook()
        self._closed = threading.Event()

    def open(self) -> None:
        """Poll for requests in a background thread until the run has ended."""

        def poll_repeatedly() -> None:
            while not self._closed.wait(_POLL):
                self.poll()

        threading.Thread(target=poll_repeatedly, name="requests", daemon=True).start()

    def take_over(self, events: Iterable[Event]) -> None:
        """Carry out again what a killed supervisor had accepted and not ended, by the events of the run."""
        requests = self._book.restore(events)
        with self._lock:
            for request in requests:
                if request.action == "add":  # how far it came is not known
                    self._tell(request.event("refused", "the run's supervisor was killed meanwhile; ask again"))
                else:
                    self._try(request)

    def close(self) -> None:
        """Stop taking requests. Idempotent."""
        self._closed.set()

    # ------------------------------------------------------------------------------------------------------- requests

    def poll(self) -> None:
        """Carry out the requests that have arrived since the last call."""
        for request in take_requests(self._run_dir):
            self._try(request)

    def _try(self, request: Request) -> None:
        try:
            self._accept(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, a later request to stop must still be served
            with self._lock:
                reason = _reason(error)
                self._tell(*(self._book.end(request, "refused", reason) or [request.event("refused", reason)]))

    def _accept(self, request: Request) -> None:
        if request.action == "add":
            self._run.check_changeable()
        leaving = self._machines.ranks(request.machine) if request.action == "drop" else ()
        with self._lock:
            self._tell(self._book.accept(request))
        match request.action:
            case "stop":
                self._run.request_stop("stopped by the user")
            case "kill":
                self._run.request_stop("ended by the user")
                self._run.kill()
            case "pause" | "resume" | "snapshot" as action:
                self._run.command(action, lambda step, failures: self._end_order(request, step, failures))
            case "drop":
                self._book.wait_for(request, leaving)
                self._run.drop(leaving)
            case "add":
                threading.Thread(target=self._add, args=(request,), name="add", daemon=True).start()

    def _end_order(self, request: Request, step: int, failures: str) -> None:
        self._end(request, "refused" if failures else "done", failures or _DONE[request.action].format(step=step))

    def _add(self, request: Request) -> None:
        try:
            with self._adding:
                ranks = self._machines.prepare(request)
                self._clear_ranks(ranks)
                with self._lock:
                    self._book.wait_for(request, ranks)
                    for rank in ranks:
                        self._run.admit(rank)
        except Exception as error:  # noqa: BLE001 - the end of this thread: the requester waits for an answer
            self._end(request, "refused", _reason(error))

    def take_back(self, member: MemberPlan) -> None:
        """Let a member that was lost join again, as a request to add it does.

        Raises:
            MusterError: it cannot, or need not.
        """
        with self._adding:
            self._run.members.check_can_join(member.rank)
            self._clear_ranks(self._machines.prepare(Request(action="add", machine=member.name)))
            self._run.admit(member.rank)

    def _clear_ranks(self, ranks: tuple[int, ...]) -> None:
        """End what is left of a lost member, and wait until the other members know a new one."""
        members, end = self._run.members, time.monotonic() + _SETTLE_TIMEOUT
        for rank in ranks:
            members.give_up(rank)
            while (members.is_ending(rank) or members.unaware(rank)) and time.monotonic() < end:
                time.sleep(_POLL)
            if members.unaware(rank):
                silent = ", ".join(members.name(other) for other in members.unaware(rank))
                raise BadInput(f"{silent} has not heard of {members.name(rank)}", "try again when it can be reached")

    # --------------------------------------------------------------------------------------------------------- events

    def __call__(self, event: Event) -> None:
        """Update the open requests from an event."""
        with self._lock:
            match event:
                case RunEvent(status="completed" | "failed" | "cancelled"):
                    self._end_all(event)
                case MemberEvent(member=int(rank), status="left" | "lost" | "failed" | "done"):
                    self._gone(rank, event)
                case MemberEvent(member=int(rank), status="ready", device=device) if device:
                    self._tell(*self._book.complete_for("add", rank, "trains with the others"))
                case _:
                    pass

    def _gone(self, rank: int, event: MemberEvent) -> None:
        message = "left after a synchronisation" if event.status == "left" else event.message
        self._tell(*self._book.complete_for("drop", rank, message))
        # Otherwise the coordinator lost the old connection of a member that rejoins over a new one.
        if rank in self._run.members.lost_members:
            self._tell(*self._book.refuse("add", rank, event.message or f"it is {event.status}"))

    def _end_all(self, event: RunEvent) -> None:
        """Answer all open requests: the run is over."""
        self.close()
        ended = f"the run is {status_word(event.status)}"
        self._tell(*self._book.close(event.status, f"{ended}: {event.message}".removesuffix(": ")))
        for request in take_requests(self._run_dir):
            self._tell(request.event("refused", ended))

    # -------------------------------------------------------------------------------------------------------- answers

    def _end(self, request: Request, outcome: Outcome, message: str) -> None:
        with self._lock:
            self._tell(*self._book.end(request, outcome, message))

    def _tell(self, *answers: RequestEvent) -> None:
        for answer in answers:
            try:
                self._note(answer)
            except MusterError:  # the log of a finished run is closed; its end is the answer
                if not self._closed.is_set():
                    raise


class LocalRequests:
    """Requests to a run of this machine: call it with every event of the run, and :meth:`open` it once that has begun.

    Args:
        on_event: called with every event first.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._server: RequestServer | None = None

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        if self._server is not None:
            self._server(event)

    def open(self, run: RunController) -> None:
        """Carry out what is left in the run's folder until its end, as for a run on several machines."""
        self._server = RequestServer(run, run.folder.path, run.folder.append, LocalMachines(run.plan))
        self._server.open()


def _reason(error: Exception) -> str:
    if isinstance(error, (MusterError, OSError)):
        return str(error)
    traceback.print_exception(type(error), error, error.__traceback__)
    return f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"
