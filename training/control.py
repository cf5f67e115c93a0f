"""Commands to a running worker: stop, snapshot, pause, resume.

The commanding side (the local run or a machine's agent) writes one JSON object a line to the worker's standard input:
``{"command": "stop", "at_step": 120}``; :mod:`training.orders` tells how all members find the step. When that channel
closes, nobody watches the worker any more, and it stops with a snapshot.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable

from training.events import AnswerEvent
from training.orders import Command, MemberOrders
from training.plan import MemberPlan, RunPlan

__all__ = ["Command", "Control"]


class Control:
    """Holds what was commanded until the trainer reaches the step.

    Args:
        on_expected: called with every member that is announced.
        answer: takes what is to be told to whoever gives the orders, from any thread.
    """

    def __init__(
        self,
        on_expected: Callable[[MemberPlan], None] = lambda member: None,
        answer: Callable[[AnswerEvent], None] = lambda answer: None,
    ) -> None:
        self._on_expected = on_expected
        self._answer = answer
        self._expected: tuple[MemberPlan, ...] = ()
        self._orders = MemberOrders()
        self._in_hand: Command | None = None
        self._changed = threading.Condition()

    def post(self, command: Command) -> None:
        """Hand a command over; safe to call from any thread or a signal handler's thread."""
        if command.member is not None:
            self._expected = (*self._expected, command.member)
            self._on_expected(command.member)
            return
        with self._changed:
            answer = self._orders.hear(command)
            self._changed.notify_all()
        if answer is not None:
            self._answer(answer)

    def grown(self, plan: RunPlan) -> RunPlan:
        """Return the plan with the members that were announced since."""
        known = {member.rank for member in plan.seats}
        fresh = tuple(member for member in self._expected if member.rank not in known)
        return plan.model_copy(update={"added": (*plan.added, *fresh)}) if fresh else plan

    def arrive(self, step: int) -> None:
        """This member has done so many steps: after them it may act."""
        with self._changed:
            answer = self._orders.arrive(step)
        if answer is not None:
            self._answer(answer)

    def next(self, step: int, at_sync: bool = True) -> Command | None:
        """Between two steps: return what is to be done there, or ``None`` when the next step may begin.

        Blocks while the run is paused, and while the members agree on a step. Whoever asks again has carried out the
        command before.

        Args:
            step: steps done.
            at_sync: whether all members hold the same weights.
        """
        carried_out, self._in_hand = self._in_hand, None
        if carried_out is not None and carried_out.order:
            self._answer(AnswerEvent(order=carried_out.order, step=step, done=True))
        self.arrive(step)
        with self._changed:
            while True:
                command = self._orders.due(step, at_sync)
                if command is not None or not self._orders.holds:
                    self._in_hand = command
                    return command
                self._changed.wait()

    def stop_is_near(self) -> bool:
        """Whether this member stops before its next step, so that what it does until then is in vain."""
        with self._changed:
            return self._orders.stop_is_near

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
                on_bad_line(f"no more commands can be read: {error}")
            finally:  # whatever broke the channel: nobody can command this worker any more
                self.post(Command(command="stop", reason="the process that started this worker is gone"))

        thread = threading.Thread(target=read, name="control", daemon=True)
        thread.start()
        return thread
