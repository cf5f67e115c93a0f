"""Carries out what is asked of a scripted run, and says in its events what came of it."""

from __future__ import annotations

import time
from typing import Literal

from app.demo.stage import Stage
from app.demo.training_script import snapshot_event
from distributed.run.requests import Request, take_requests
from training.events import Event, MemberEvent, RequestEvent, RunEvent

_PAUSED_BY = "paused by the user"
_STOPPED_BY = "stopped by the user"


class Stopped(Exception):
    """The user stopped the run."""


class _Refused(Exception):
    """What was asked for cannot be done."""


class ScriptedDesk:
    """Answers the requests of one run."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._names = [member.name for member in stage.folder.plan().members]
        self._paused_at: float | None = None
        self._ends: Request | None = None

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def poll(self) -> None:
        """Carry out what was asked for since the last time.

        Raises:
            Stopped: the run shall end.
        """
        for request in take_requests(self._stage.folder.path):
            self._tell(request, "accepted")
            try:
                self._tell(request, "done", self._carry_out(request))
            except _Refused as refusal:
                self._tell(request, "refused", str(refusal))
            except Stopped:
                self._ends = request
                raise

    def close(self, status: str) -> None:
        """Say what became of the request that ended the run, and of those that came too late."""
        if self._ends is not None:
            self._tell(self._ends, "done", f"the run is {status}")
        for request in take_requests(self._stage.folder.path):
            self._tell(request, "refused", f"the run is {status}")

    def _carry_out(self, request: Request) -> str:
        match request.action:
            case "pause":
                return self._pause()
            case "resume":
                return self._resume()
            case "snapshot":
                return self._snapshot()
            case "drop":
                return self._drop(self._rank(request.machine))
            case "add":
                return self._add(self._rank(request.machine))
            case "stop":
                self._snapshot()
                for rank in self._live():
                    self._say(MemberEvent(member=rank, status="left", name=self._names[rank], message=_STOPPED_BY))
                raise Stopped("stopped")
            case "kill":
                raise Stopped("ended by the user")

    def _pause(self) -> str:
        if self.paused:
            raise _Refused("the run is paused already")
        self._paused_at = time.time()
        for rank in self._live():
            self._say(RunEvent(member=rank, status="paused", message=_PAUSED_BY))
        return "the run is paused"

    def _resume(self) -> str:
        """Go on; what is still to come moves by as much as the run stood still."""
        if self._paused_at is None:
            raise _Refused("the run is not paused")
        self._stage.shift(time.time() - self._paused_at)
        self._paused_at = None
        for rank in self._live():
            self._say(RunEvent(member=rank, status="running", total_steps=self._stage.total_steps))
        return "the run is running"

    def _snapshot(self) -> str:
        live = [rank for rank in self._live() if rank in self._stage.steps]
        step = max((self._stage.steps[rank] for rank in live), default=0)
        for rank in live:
            self._say(snapshot_event(rank, step))
        return f"of step {step}"

    def _drop(self, rank: int) -> str:
        if rank in self._stage.gone:
            raise _Refused(f"{self._names[rank]} is not in the run")
        if len(self._live()) < 2:
            raise _Refused("it is the last machine: stop the run instead")
        self._say(MemberEvent(member=rank, status="left", name=self._names[rank], message="let go by the user"))
        self._stage.dropped.add(rank)
        return "left after a synchronisation"

    def _add(self, rank: int) -> str:
        if rank not in self._stage.gone:
            raise _Refused(f"{self._names[rank]} trains already")
        self._stage.dropped.discard(rank)
        self._say(MemberEvent(member=rank, status="joined", name=self._names[rank], message="joins a running group"))
        self._say(MemberEvent(member=rank, status="ready", name=self._names[rank], message="has the anchor"))
        return "trains with the others"

    def _rank(self, machine: str) -> int:
        if machine not in self._names:
            raise _Refused(f"the script has no '{machine}' in this run; it has {', '.join(self._names)}")
        return self._names.index(machine)

    def _live(self) -> list[int]:
        return [rank for rank in range(len(self._names)) if rank not in self._stage.gone]

    def _say(self, event: Event) -> None:
        self._stage.say(event, time.time())

    def _tell(self, request: Request, outcome: Literal["accepted", "done", "refused"], message: str = "") -> None:
        self._say(
            RequestEvent(
                request=request.id,
                action=request.action,
                machine=request.machine,
                outcome=outcome,
                message=message,
            )
        )
