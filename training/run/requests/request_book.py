"""Requests to a running run: small files in its ``requests`` folder, and the outcome of each.

Every accepted request gets exactly one final outcome.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import BadInput
from training.records.events import Event, RequestEvent, RunEvent
from training.records.plan import status_word
from training.records.run_files import explain_errors, private_folder, write_atomically

Action = Literal["stop", "kill", "pause", "resume", "snapshot", "drop", "add"]
Outcome = Literal["accepted", "done", "refused"]
FOLDER = "requests"


class Request(BaseModel):
    """One request to a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field("", exclude=True)
    """Identifier; the stem of its file's name."""
    action: Action
    machine: str = Field("", max_length=1000)
    """For ``drop`` and ``add``: the machine's name."""
    entry: dict[str, Any] | None = None
    """For ``add``: the entry of a hosts file for a machine that the run's does not have."""

    def event(self, outcome: Outcome, message: str = "") -> RequestEvent:
        """Return the event that reports it."""
        return RequestEvent(request=self.id, action=self.action, machine=self.machine, outcome=outcome, message=message)


def leave_request(run_dir: Path, action: Action, machine: str = "", entry: BaseModel | None = None) -> str:
    """Leave a request to a run; its outcome is reported by ``request`` events with the returned id.

    A run without a process never answers: check with :func:`training.records.run_files.is_live`.

    Args:
        entry: for ``add``: the machine as a hosts file has it, if the run's has not.

    Raises:
        BadInput: no machine is named where one is needed, or the run folder cannot be written.
    """
    if action in ("drop", "add") and not machine and entry is None:
        raise BadInput(f"'{action}' needs the name of a machine", "name one of the run's machines")
    identity = f"{time.time_ns()}-{secrets.token_hex(4)}"
    path = run_dir / FOLDER / f"{identity}.json"
    fields = entry.model_dump(mode="json", exclude_defaults=True) if entry is not None else {}
    request = Request(action=action, machine=machine or fields.get("name", ""), entry=fields or None)
    with explain_errors(path):
        private_folder(path.parent)
        write_atomically(path, request.model_dump_json(exclude_defaults=True).encode())
    return identity


def withdraw_request(run_dir: Path, identity: str) -> bool:
    """Withdraw a request; return whether it had not been taken yet."""
    with contextlib.suppress(OSError):
        (run_dir / FOLDER / f"{identity}.json").unlink()
        return True
    return False


def take_requests(run_dir: Path) -> list[Request]:
    """Remove and return the requests left since the last call, oldest first; invalid ones are dropped."""
    requests: list[Request] = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValidationError):
            request = Request.model_validate_json(path.read_bytes())
            requests.append(request.model_copy(update={"id": path.stem}))
        with contextlib.suppress(OSError):
            path.unlink()
    return requests


@dataclass
class _OpenRequest:
    request: Request
    waits_for: set[int] = field(default_factory=set)
    """For ``drop`` and ``add``: ranks that have yet to leave or to join."""


class RequestBook:
    """The open requests of one run.

    Pause and resume alternate: a request is judged by the state that the run will have after all accepted requests.
    """

    def __init__(self) -> None:
        self._open: dict[str, _OpenRequest] = {}
        self._paused = False
        self._stopping = False
        self._over = ""

    def restore(self, events: Iterable[Event]) -> list[Request]:
        """Take over from a killed process whether the run is paused; return the requests that it had not ended."""
        unanswered: dict[str, Request] = {}
        for event in events:
            if isinstance(event, RunEvent) and event.status == "starting":  # another attempt
                unanswered, self._paused = {}, False
            if not isinstance(event, RequestEvent):
                continue
            if event.outcome == "accepted":
                fields = {"id": event.request, "action": event.action, "machine": event.machine}
                unanswered[event.request] = Request.model_validate(fields)
            else:
                unanswered.pop(event.request, None)
            if event.outcome == "done" and event.action in ("pause", "resume"):
                self._paused = event.action == "pause"
        return list(unanswered.values())

    def accept(self, request: Request) -> RequestEvent:
        """Accept a request.

        Raises:
            BadInput: it cannot be carried out; the message says why.
        """
        if self._over:
            raise BadInput(f"the run is {status_word(self._over)}")
        if self._stopping and request.action not in ("stop", "kill"):
            raise BadInput("the run is stopping")
        if request.action == "pause" and self._paused:
            raise BadInput("the run is about to pause" if self._has("pause") else "the run is already paused")
        if request.action == "resume" and not self._paused:
            raise BadInput("the run is about to resume" if self._has("resume") else "the run is not paused")
        if request.action in ("pause", "resume"):
            self._paused = request.action == "pause"
        self._stopping = self._stopping or request.action in ("stop", "kill")
        self._open[request.id] = _OpenRequest(request)
        return request.event("accepted")

    def wait_for(self, request: Request, ranks: Collection[int]) -> None:
        """Let a request end when these ranks have left or joined."""
        if request.id in self._open:
            self._open[request.id].waits_for = set(ranks)

    def end(self, request: Request, outcome: Outcome, message: str = "") -> list[RequestEvent]:
        """End a request, if it is still open."""
        return [request.event(outcome, message)] if self._open.pop(request.id, None) is not None else []

    def complete_for(self, action: Action, rank: int, message: str) -> list[RequestEvent]:
        """Record that a rank has left or joined; end the requests that waited only for it."""
        answers = []
        for entry in [e for e in self._open.values() if e.request.action == action and rank in e.waits_for]:
            entry.waits_for.discard(rank)
            if not entry.waits_for:
                answers += self.end(entry.request, "done", message)
        return answers

    def refuse(self, action: Action, rank: int, message: str) -> list[RequestEvent]:
        """Refuse the requests that wait for a rank which cannot leave or join."""
        waiting = [e.request for e in self._open.values() if e.request.action == action and rank in e.waits_for]
        return [answer for request in waiting for answer in self.end(request, "refused", message)]

    def close(self, status: str, message: str) -> list[RequestEvent]:
        """Answer all open requests: the run is over.

        Args:
            status: ``completed``, ``failed`` or ``cancelled``.
        """
        self._over = status
        entries, self._open = self._open.values(), {}
        fulfilled_actions = {"stop", "kill"} if status == "cancelled" else set()
        refusal = f"the run is {status_word(status)}"
        return [
            e.request.event("done", message or refusal)
            if e.request.action in fulfilled_actions
            else e.request.event("refused", refusal)
            for e in entries
        ]

    def _has(self, action: Action) -> bool:
        return any(entry.request.action == action for entry in self._open.values())
