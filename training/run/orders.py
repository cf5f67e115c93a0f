"""How all members of a run act after the same step: stop, snapshot, pause, resume.

A member trains on while an order is on its way, so a step chosen elsewhere may be past when the order arrives.
Therefore the members are asked first, and none goes beyond its answer until it knows the step::

    run -> all       {"command": "meet", "order": 7}
    member -> run    {"kind": "answer", "order": 7, "step": 41}      the first step after which it can act
    run -> all       {"command": "stop", "order": 7, "at_step": 42}  the largest answer: no member has passed it
    member -> run    {"kind": "answer", "order": 7, "step": 42, "done": true}

One member stops after its current step; several stop after the first one that all can reach. Orders are carried out
one after the other; a stop does not wait for its turn. :class:`MemberOrders` and
:class:`training.run.group_orders.GroupOrders` are pure: messages in, messages out; no clock, no thread.

If the process that started the run is gone, every member is eventually told to stop, and the members agree through the
coordinator with the same question and answer (:class:`training.exchange.halting.Halting`).

The commanding side (the local run or a machine's agent) writes one JSON object a line to the worker's standard input.
When that channel closes, the worker is no longer supervised and stops with a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from training.records.events import AnswerEvent
from training.records.plan import MemberPlan, RunPlan

if TYPE_CHECKING:
    from training.exchange.base import Exchange
    from training.exchange.halting import Halting

UNWATCHED = 5.0
"""Seconds that a worker without an agent has before the agent's guard kills it (``distributed/machine``)."""
_AGREE, _WAIT = 0.4, 0.6
"""Shares of the time until a process is killed: for the members to agree on a step, and for one to wait for others in a
step; the rest is for the snapshot."""
_HALT = 1 << 50
"""Number of the order whose step the members agree on by themselves."""
OrderAction = Literal["stop", "snapshot", "pause", "resume"]
OrderEnd = Callable[[int, str], None]
"""Called with the step after which all have answered an order, and why some could not carry it out (empty: all did)."""


class Command(BaseModel):
    """One command to a worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Literal["meet", "stop", "snapshot", "pause", "resume", "expect", "redial", "unattended", "ban", "admit"]
    """``unattended``: nobody has been heard who started the run; the members train on, unless they wait for an order,
    and stop together then."""
    order: int = 0
    """The order that it belongs to; 0: none, it concerns this member only."""
    at_step: int = 0
    """Act when this many steps are done, or at once if that is past."""
    reason: str = ""
    address: str = ""
    """Of ``redial``: ``host:port`` at which the coordinator is reached from now on, if its connection breaks."""
    relay: str = ""
    """Of ``redial``: the same of the relay."""
    rank: int = Field(0, ge=0)
    """Of ``ban`` and ``admit``: who is dropped for good, or let in again, by a coordinator that the members have
    elected."""
    member: MemberPlan | None = None
    """Of ``expect``: the member that will join. Carried out at once; the member joins when all have confirmed it."""
    at_sync: bool = False
    """Act where all members hold the same weights, so that nothing this member has learned is lost."""
    within: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Of ``stop``: seconds after which the process is killed; 0: it is not. A member that still waits for others then
    gives its group up before, so that it can write its snapshot."""
    snapshot: bool = True
    """Of ``stop``: write a snapshot first. Not where another member failed: the state may be what failed it."""


class MemberOrders:
    """A member's side: the commands it has received and not yet carried out."""

    def __init__(self) -> None:
        self._next_step: int | None = None  # not known before this member has its starting state
        self._open_question = 0
        self._paused = False
        self._waiting: list[Command] = []

    @property
    def is_held(self) -> bool:
        """Whether the member may not begin a step now."""
        return self._paused or self._open_question != 0

    @property
    def stop_is_near(self) -> bool:
        """Whether the member stops before its next step, so that work until then is wasted."""
        stops = [c.at_step for c in self._waiting if c.command == "stop" and not c.at_sync]
        return self._next_step is not None and min(stops, default=math.inf) <= self._next_step

    @property
    def is_dropped(self) -> bool:
        """Whether the member is to leave where all members hold the same weights."""
        return any(c.command == "stop" and c.at_sync for c in self._waiting)

    @property
    def stop_reason(self) -> str:
        """Why the member is to stop with a snapshot; empty: it is not to stop."""
        return next((c.reason for c in self._waiting if c.command == "stop" and c.snapshot and not c.at_sync), "")

    def has_work_by(self, step: int) -> bool:
        """Whether there is something to do, or to agree on, after at most so many steps."""
        return self._open_question != 0 or any(command.at_step <= step for command in self._waiting)

    def receive(self, command: Command) -> AnswerEvent | None:
        """Receive a command; return the answer to send."""
        if command.command == "meet":
            self._open_question = command.order
            return None if self._next_step is None else AnswerEvent(order=command.order, step=self._next_step)
        if command.order == self._open_question:
            self._open_question = 0
        if command.command == "resume" or (command.command == "stop" and not command.at_sync):
            for pause in [c for c in self._waiting if c.command == "pause"]:
                self._waiting.remove(pause)
        if command.command == "stop" and not command.at_sync:
            self._paused = False
        self._waiting.append(command)
        return None

    def arrive(self, step: int) -> AnswerEvent | None:
        """Note that the member has done ``step`` steps and may act; return the answer to an earlier question."""
        is_first, self._next_step = self._next_step is None, step
        return AnswerEvent(order=self._open_question, step=step) if is_first and self._open_question else None

    def take_due(self, step: int, at_sync: bool) -> Command | None:
        """Return the command to carry out between two steps, a stop first; ``None``: begin the next step unless held.

        Args:
            step: steps done, as :meth:`arrive` was told.
            at_sync: whether all members hold the same weights.
        """
        ready = [c for c in self._waiting if c.at_step <= step and (at_sync or not c.at_sync)]
        command = min(ready, key=lambda command: command.command != "stop", default=None)
        if command is None:
            self._next_step = step + (not self.is_held)
            return None
        with contextlib.suppress(ValueError):  # a signal's handler has taken it out meanwhile
            self._waiting.remove(command)
        if command.command in ("pause", "resume"):
            self._paused = command.command == "pause"
        return command


class Control:
    """Holds commands until the trainer reaches their step.

    Args:
        on_expected: called with every member that is announced.
        answer: sends an answer to the commanding side, from any thread.
        idle: entered while the trainer has to wait for a command.
    """

    def __init__(
        self,
        on_expected: Callable[[MemberPlan], None] = lambda member: None,
        answer: Callable[[AnswerEvent], None] = lambda answer: None,
        idle: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._idle = idle
        self._on_expected = on_expected
        self._answer = answer
        self._expected: tuple[MemberPlan, ...] = ()
        self.rendezvous: tuple[str, str] | None = None
        """Address of the coordinator and of the relay, where they are not those of the start any more."""
        self.readmitted: set[int] = set()
        """Ranks that may join again, under a coordinator that the members have elected."""
        self.banned: set[int] = set()
        """Ranks that were dropped for good under such a coordinator."""
        self._orders = MemberOrders()
        self._current: Command | None = None
        self.failure = ""
        """Why the command that :meth:`next` returned could not be carried out; empty: it could."""
        self._give_up: Callable[[str], None] = lambda why: None
        self._halting: Halting | None = None
        self._halt_requested = self._stop_agreed = False
        """Whether this member was asked to stop together with the others, and whether it knows after which step."""
        self._halt_reason = "the others stop"
        self._changed = threading.Condition()

    def serve(self, exchange: Exchange) -> None:
        """Use the exchange of the member that obeys these orders."""
        self._give_up, self._halting = exchange.give_up, exchange.halting
        if exchange.halting is not None:
            exchange.halting.on_request, exchange.halting.on_decision = self._halt, self._stop_after

    def post(self, command: Command) -> None:
        """Hand a command over; safe to call from any thread or a signal handler's thread."""
        if command.member is not None:
            self._expected = (*self._expected, command.member)
            self._on_expected(command.member)
            return
        if command.command in ("ban", "admit"):
            gains, loses = (self.banned, self.readmitted)[:: 1 if command.command == "ban" else -1]
            gains.add(command.rank)
            loses.discard(command.rank)
            return
        if command.command == "redial":
            self.rendezvous = command.address, command.relay
            return
        if command.command == "unattended":
            if not self._orders.is_held:
                return
            command = command.model_copy(update={"command": "stop"})
        if not command.within:
            return self._receive(command)
        _run_after(_WAIT * command.within, self._give_up_group)
        if self._halting is None:
            return self._receive(command)
        self._halt_reason = command.reason
        self._halt()
        _run_after(_AGREE * command.within, lambda: self._stop_after(0))  # the others may not hear it

    def _receive(self, command: Command) -> None:
        with self._changed:
            answer = self._orders.receive(command)
            self._changed.notify_all()
        self._reply(answer)

    def _halt(self) -> None:
        """Agree on a step without the commanding side: tell the other members after which step this one can stop."""
        if not self._halt_requested:
            self._halt_requested = True
            self._receive(Command(command="meet", order=_HALT))

    def _stop_after(self, step: int) -> None:
        """Stop after the step that the members have agreed on; 0: they have not."""
        if not self._stop_agreed:
            self._stop_agreed = True
            self._receive(Command(command="stop", order=_HALT, at_step=step, reason=self._halt_reason))

    def _reply(self, answer: AnswerEvent | None) -> None:
        if answer is None or (answer.order == _HALT and answer.done):
            return
        if answer.order != _HALT:
            self._answer(answer)
        elif self._halting is not None:
            self._halting.propose(answer.step)

    def _give_up_group(self) -> None:
        """Give up the group, as the time for a stop runs out."""
        if reason := self.stop_reason:  # it has not come to that yet
            self._give_up(reason)

    def with_announced(self, plan: RunPlan) -> RunPlan:
        """Return the plan with the members that have been announced since."""
        known_ranks = {member.rank for member in plan.all_members}
        fresh = tuple(member for member in self._expected if member.rank not in known_ranks)
        return plan.model_copy(update={"added": (*plan.added, *fresh)}) if fresh else plan

    def arrive(self, step: int) -> None:
        """Note that this member has done ``step`` steps, after which it may act."""
        with self._changed:
            answer = self._orders.arrive(step)
        self._reply(answer)

    def next(self, step: int, at_sync: bool = True) -> Command | None:
        """Return the command to carry out between two steps, or ``None`` when the next step may begin.

        Blocks while the run is paused, and while the members agree on a step. The next call confirms that the command
        was carried out, or says with :attr:`failure` why not.

        Args:
            step: steps done.
            at_sync: whether all members hold the same weights.
        """
        carried_out, self._current = self._current, None
        failure, self.failure = self.failure, ""
        if carried_out is not None and carried_out.order:
            self._reply(AnswerEvent(order=carried_out.order, step=step, done=True, failure=failure))
        self.arrive(step)
        with self._changed:
            while True:
                command = self._orders.take_due(step, at_sync)
                if command is not None or not self._orders.is_held:
                    self._current = command
                    return command
                with self._idle():
                    self._changed.wait()

    def stop_is_near(self) -> bool:
        """Whether this member stops before its next step, so that work until then is wasted."""
        with self._changed:
            return self._orders.stop_is_near

    @property
    def is_dropped(self) -> bool:
        """Whether this member is to leave where all members hold the same weights."""
        with self._changed:
            return self._orders.is_dropped

    @property
    def stop_reason(self) -> str:
        """Why this member is to stop with a snapshot, and has not yet; empty: it is not to stop."""
        with self._changed:
            return self._orders.stop_reason

    def has_work_by(self, step: int) -> bool:
        """Whether there is something to do, or to agree on, after at most so many steps; any thread may ask."""
        with self._changed:
            return self._orders.has_work_by(step)

    def read_from(self, lines: Iterable[str | bytes], on_bad_line: Callable[[str], None]) -> threading.Thread:
        """Read commands in a daemon thread; the end of the lines means: stop with a snapshot."""

        def read() -> None:
            try:
                for line in lines:
                    try:
                        self.post(Command.model_validate(json.loads(line)))
                    except (ValueError, RecursionError) as error:  # pydantic's are ValueErrors
                        on_bad_line(f"command not understood: {line!r:.200}: {error.__class__.__name__}")
            except OSError as error:
                on_bad_line(f"commands can no longer be read: {error}")
            finally:  # whatever broke the channel, this worker gets no more commands
                reason = "the process that started this worker is gone"
                self.post(Command(command="stop", reason=reason, within=UNWATCHED))

        thread = threading.Thread(target=read, name="control", daemon=True)
        thread.start()
        return thread


def _run_after(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
