"""What was asked of a run, and what became of it: every request that is accepted comes to exactly one end. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distributed.run.requests import Action, Request
from profiles.errors import BadInput

Outcome = Literal["accepted", "done", "refused"]


class Answer(NamedTuple):
    """What is to be told about a request."""

    request: Request
    outcome: Outcome
    message: str = ""


@dataclass
class _Open:
    request: Request
    waits_for: set[int] = field(default_factory=set)
    """Of ``drop`` and ``add``: members that have still to leave or to come."""


class RequestBook:
    """The requests of one run.

    Pause and resume take turns: what is asked for is judged by what the run will have done when all that was accepted
    before is carried out.
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._paused = False
        self._stopping = False
        self._over = ""

    def accept(self, request: Request) -> Answer:
        """Enter a request.

        Raises:
            BadInput: it cannot be carried out; the message says why.
        """
        if self._over:
            raise BadInput(f"the run is {self._over}")
        if self._stopping and request.action not in ("stop", "kill"):
            raise BadInput("the run is stopping")
        if request.action == "pause" and self._paused:
            raise BadInput("the run is about to pause" if self._has("pause") else "the run is already paused")
        if request.action == "resume" and not self._paused:
            raise BadInput("the run is about to resume" if self._has("resume") else "the run is not paused")
        if request.action in ("pause", "resume"):
            self._paused = request.action == "pause"
        self._stopping = self._stopping or request.action in ("stop", "kill")
        self._open.append(_Open(request))
        return Answer(request, "accepted")

    def wait_for(self, request: Request, ranks: Collection[int]) -> None:
        """A request is at its end when these members have left, or have come."""
        for entry in self._of(request):
            entry.waits_for = set(ranks)

    def end(self, request: Request, outcome: Outcome, message: str = "") -> list[Answer]:
        """End a request, if it has not come to its end yet."""
        found = self._of(request)
        self._open = [entry for entry in self._open if entry not in found]
        return [Answer(entry.request, outcome, message) for entry in found]

    def part(self, action: Action, rank: int, message: str) -> list[Answer]:
        """A member has left, or has come."""
        answers = []
        for entry in [e for e in self._open if e.request.action == action and rank in e.waits_for]:
            entry.waits_for.discard(rank)
            if not entry.waits_for:
                answers += self.end(entry.request, "done", message)
        return answers

    def refuse(self, action: Action, rank: int, message: str) -> list[Answer]:
        """A member cannot do its part."""
        waiting = [e.request for e in self._open if e.request.action == action and rank in e.waits_for]
        return [answer for request in waiting for answer in self.end(request, "refused", message)]

    def close(self, status: str, message: str) -> list[Answer]:
        """The run is over: nothing stays without an answer.

        Args:
            status: ``completed``, ``failed`` or ``cancelled``.
            message: how it ended.
        """
        self._over = status
        entries, self._open = self._open, []
        ends = {"stop", "kill"} if status == "cancelled" else set()
        return [
            Answer(e.request, "done" if e.request.action in ends else "refused", message or f"the run is {status}")
            for e in entries
        ]

    def _of(self, request: Request) -> list[_Open]:
        return [entry for entry in self._open if entry.request is request]

    def _has(self, action: Action) -> bool:
        return any(entry.request.action == action for entry in self._open)
