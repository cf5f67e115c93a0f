"""Carries out what is left in a run's ``requests`` folder, and says in the run's events what came of it."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from distributed.run.requests import Action, Request, take_requests
from profiles.errors import BadInput, MusterError
from training.events import Event, MemberEvent, RequestEvent, RunEvent, SnapshotEvent
from training.local_run import LocalRun
from training.plan import RunPlan

_POLL = 0.05
_ENDS = ("completed", "failed", "cancelled")
_LAST_WORD = 30.0
"""Seconds to wait for the end of a worker that was lost before another one takes its place, and for the others to say
that they count on a machine that they did not know."""

Note = Callable[[Event], object]


class Machines(Protocol):
    """The machines of a run."""

    def ranks(self, machine: str) -> tuple[int, ...]:
        """Return the members on a machine.

        Raises:
            BadInput: it is not one of the run.
        """
        ...

    def letting_go(self, machine: str) -> tuple[int, ...]:
        """Return the members that leave with a machine.

        Raises:
            BadInput: it is not one of the run, or the run cannot do without it.
        """
        ...

    def bring(self, request: Request) -> tuple[int, ...]:
        """Make a machine ready for the workers of a run, with code and data, and return its members.

        One that the run did not know is announced to it.

        Raises:
            MusterError: it cannot be had.
        """
        ...


class LocalMachines:
    """A run on this machine: its members by their names; nothing needs to be brought."""

    def __init__(self, plan: RunPlan) -> None:
        self._names = {member.name: member.rank for member in plan.members}

    def ranks(self, machine: str) -> tuple[int, ...]:
        if machine not in self._names:
            raise BadInput(f"no member '{machine}' in this run", f"known: {', '.join(self._names)}")
        return (self._names[machine],)

    def letting_go(self, machine: str) -> tuple[int, ...]:
        return self.ranks(machine)

    def bring(self, request: Request) -> tuple[int, ...]:
        return self.ranks(request.machine)


@dataclass
class _Open:
    """A request that was accepted and has not come to its end."""

    request: Request
    waits_for: set[int] = field(default_factory=set)
    """Members that have still to do their part."""


class RequestDesk:
    """Give it every event of the run, and :meth:`poll` or :meth:`open` it.

    Args:
        run: a run that has started.
        run_dir: its folder.
        note: writes an event into the run's log; called from any thread.
        machines: of the run.
    """

    def __init__(self, run: LocalRun, run_dir: Path, note: Note, machines: Machines) -> None:
        self._run = run
        self._run_dir = run_dir
        self._note = note
        self._machines = machines
        self._lock = threading.RLock()
        self._one_at_a_time = threading.Lock()
        self._open: list[_Open] = []
        self._paused = False
        self._closed = threading.Event()

    def open(self) -> None:
        """Look for requests in a thread of its own until the run has ended."""

        def look() -> None:
            while not self._closed.wait(_POLL):
                self.poll()

        threading.Thread(target=look, name="requests", daemon=True).start()

    def close(self) -> None:
        """Take no more requests. Idempotent."""
        self._closed.set()

    # ------------------------------------------------------------------------------------------------------- requests

    def poll(self) -> None:
        """Carry out what was asked for since the last time."""
        for request in take_requests(self._run_dir):
            try:
                self._accept(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, a stop that is asked for next must be heard
                self._tell(request, "refused", _reason(error))

    def _accept(self, request: Request) -> None:
        if request.action == "add":
            self._run.check_changeable()
            self._begin(request, set())
            threading.Thread(target=self._add, args=(request,), name="add", daemon=True).start()
            return
        self._check(request)
        if request.action == "drop":
            ranks = self._machines.letting_go(request.machine)
            with self._lock:  # its end may be there before it is entered
                self._run.drop(ranks)
                self._begin(request, set(ranks))
            return
        self._begin(request, set(self._run.members.taking_part) if request.action == "snapshot" else set())
        act(self._run, request.action)

    def _check(self, request: Request) -> None:
        if request.action == "pause" and self._paused:
            raise BadInput("the run is paused already")
        if request.action == "resume" and not self._paused:
            raise BadInput("the run is not paused")

    def _add(self, request: Request) -> None:
        try:
            with self._one_at_a_time:
                ranks = self._machines.bring(request)
                self._make_room(ranks)
                with self._lock:
                    for opened in self._open:
                        if opened.request is request:
                            opened.waits_for = set(ranks)
                    for rank in ranks:
                        self._run.admit(rank)
        except Exception as error:  # noqa: BLE001 - the end of this thread: who asked waits for an answer
            self._end(request, "refused", _reason(error))

    def _make_room(self, ranks: tuple[int, ...]) -> None:
        """End what is left of a lost member, and wait until the others know one that is new."""
        members, end = self._run.members, time.monotonic() + _LAST_WORD
        for rank in ranks:
            self._run.give_up(rank)
            while (members.is_going(rank) or members.unaware(rank)) and time.monotonic() < end:
                time.sleep(_POLL)
            if members.unaware(rank):
                silent = ", ".join(members.name(other) for other in members.unaware(rank))
                raise BadInput(f"{silent} has not heard of {members.name(rank)}", "try again when it is reached")

    # --------------------------------------------------------------------------------------------------------- events

    def __call__(self, event: Event) -> None:
        """Note what an event means for the requests that are open."""
        with self._lock:
            match event:
                case RunEvent(status="paused" | "running"):
                    self._paused = event.status == "paused"
                    self._finish("pause" if self._paused else "resume", f"the run is {event.status}")
                case RunEvent(status=status) if status in _ENDS:
                    self._last(event)
                case SnapshotEvent(member=int(rank)):
                    self._part("snapshot", rank, f"of step {event.step}")
                case MemberEvent(member=int(rank), status="left" | "lost" | "failed" | "done"):
                    self._gone(rank, event)
                case MemberEvent(member=int(rank), status="ready", device=device) if device:
                    self._part("add", rank, "trains with the others")
                case _:
                    pass

    def _gone(self, rank: int, event: MemberEvent) -> None:
        self._part("drop", rank, "left after a synchronisation" if event.status == "left" else event.message)
        self._part("snapshot", rank, "")
        back_again = rank not in self._run.members.lost  # the hub loses its old connection when it comes on a new one
        for opened in [o for o in self._open if o.request.action == "add" and rank in o.waits_for and not back_again]:
            self._end(opened.request, "refused", event.message or f"it is {event.status}")

    def _part(self, action: Action, rank: int, message: str) -> None:
        for opened in [o for o in self._open if o.request.action == action and rank in o.waits_for]:
            opened.waits_for.discard(rank)
            if not opened.waits_for:
                self._end(opened.request, "done", message)

    def _finish(self, action: Action, message: str) -> None:
        for opened in [o for o in self._open if o.request.action == action]:
            self._end(opened.request, "done", message)

    def _last(self, event: RunEvent) -> None:
        """The run is over: nothing stays without an answer."""
        self.close()
        for opened in list(self._open):
            ended = opened.request.action in ("stop", "kill") and event.status == "cancelled"
            self._end(opened.request, "done" if ended else "refused", f"the run is {event.status}")
        for request in take_requests(self._run_dir):
            self._tell(request, "refused", f"the run is {event.status}")

    # ---------------------------------------------------------------------------------------------------------- words

    def _begin(self, request: Request, waits_for: set[int]) -> None:
        with self._lock:
            self._tell(request, "accepted")
            self._open.append(_Open(request, waits_for))

    def _end(self, request: Request, outcome: Literal["done", "refused"], message: str) -> None:
        with self._lock:
            if any(opened.request is request for opened in self._open):
                self._open = [opened for opened in self._open if opened.request is not request]
                self._tell(request, outcome, message)

    def _tell(self, request: Request, outcome: Literal["accepted", "done", "refused"], message: str = "") -> None:
        self._note(
            RequestEvent(
                request=request.id,
                action=request.action,
                machine=request.machine,
                outcome=outcome,
                message=message,
            )
        )


def _reason(error: Exception) -> str:
    if isinstance(error, (MusterError, OSError)):
        return str(error)
    traceback.print_exception(type(error), error, error.__traceback__)
    return f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def act(run: LocalRun, action: Action) -> None:
    """Carry out a request that concerns all members."""
    if action == "stop":
        run.request_stop("stopped by the user")
    elif action == "kill":
        run.request_stop("ended by the user")
        run.kill()
    else:
        run.command(action)
