"""Commands to a running worker: stop, snapshot, pause, resume.

The commanding side (the local run or a machine's agent) writes one JSON object a line to the worker's standard input:
``{"command": "stop", "at_step": 120}``. ``at_step`` lets all members act after the same step. When
that channel closes, nobody watches the worker any more, and it stops with a snapshot.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from training.plan import MemberPlan, RunPlan


class Command(BaseModel):
    """One command to a worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Literal["stop", "snapshot", "pause", "resume", "expect"]
    at_step: int = 0
    """Act when this many steps are done, or at once if that is past."""
    reason: str = ""
    member: MemberPlan | None = None
    """Of ``expect``: who will join. Taken at once; it is said when it is known, and the member comes only then."""
    at_sync: bool = False
    """Act where all members hold the same weights, so that nothing which this member has learned is lost."""
    snapshot: bool = True
    """Of ``stop``: write a snapshot first. Not where another member failed: the state may be what failed it."""


class Control:
    """Holds what was commanded until the trainer reaches the step."""

    def __init__(self, on_expected: Callable[[MemberPlan], None] = lambda member: None) -> None:
        self._on_expected = on_expected
        self._expected: tuple[MemberPlan, ...] = ()
        self._commands: list[Command] = []
        self._changed = threading.Condition()

    def post(self, command: Command) -> None:
        """Hand a command over; safe to call from any thread or a signal handler's thread."""
        if command.member is not None:
            self._expected = (*self._expected, command.member)
            self._on_expected(command.member)
            return
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def grown(self, plan: RunPlan) -> RunPlan:
        """Return the plan with the members that were announced since."""
        known = {member.rank for member in plan.seats}
        fresh = tuple(member for member in self._expected if member.rank not in known)
        return plan.model_copy(update={"added": (*plan.added, *fresh)}) if fresh else plan

    def due(self, steps_done: int, at_sync: bool = True) -> list[Command]:
        """Take the commands whose step has come, in the order in which they were given."""

        def is_due(command: Command) -> bool:
            return command.at_step <= steps_done and (at_sync or not command.at_sync)

        with self._changed:
            ready = [c for c in self._commands if is_due(c)]
            for command in ready:  # one by one: a signal's handler may have posted another meanwhile
                self._commands.remove(command)
            return ready

    def wait_for(self, wanted: Callable[[Command], bool]) -> Command:
        """Block until a command for which ``wanted`` is true; take and return it."""
        with self._changed:
            while True:
                for command in self._commands:
                    if wanted(command):
                        self._commands.remove(command)
                        return command
                self._changed.wait()

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
