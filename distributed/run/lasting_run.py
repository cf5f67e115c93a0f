"""A run whose only member lies on several machines: when it loses one, it goes on with those that are left.

All processes end, as none can go on without what the lost one held; the next attempt cuts the model anew and reads the
parts of the last snapshot, and those of the lost machine from where they were copied to. Where the others cannot go on,
as the model does not fit them or they lack a part, the run is paused until the machine is back; who stops it meanwhile
has stopped a run that had not failed. A device that reports why it fails is not lost: the next attempt would fail
likewise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from distributed.workers.remote_worker import LOST, RemoteWorker
from profiles.errors import ExitCode, MusterError
from training.records.events import RunEvent, WarningEvent
from training.run.outcome import RunOutcome
from training.run.run_controller import RunController

GOES_ON = "goes on"
"""Status of an attempt that is followed by another one at once."""
_LOOKS_EVERY, _LONGEST_WAIT = 10.0, 12 * 3600.0
"""Seconds between two looks for a lost machine, and after which nobody looks any more."""


class LastingRun(RunController):
    """An attempt of such a run.

    Args:
        go_on: prepares another attempt without these machines, and returns a line about it; raises MusterError where
            they cannot be done without.
        is_back: whether one of these machines can be reached again; ``None``: no machine is waited for.
    """

    def __init__(
        self,
        *arguments: Any,
        go_on: Callable[[Sequence[str]], str],
        is_back: Callable[[Sequence[str]], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._go_on, self._is_back, self._is_stopped = go_on, is_back, threading.Event()
        self._lost: list[int] = []
        """Ranks of processes that ended, or cannot be reached, without having said why."""

    def request_stop(self, message: str) -> None:
        self._is_stopped.set()
        super().request_stop(message)

    def kill(self) -> None:
        self._is_stopped.set()
        super().kill()

    def note_end(self, rank: int) -> None:
        handle = self.members.workers[rank]
        has_reported, worker = handle.error is not None, handle.process
        super().note_end(rank)
        is_ours = isinstance(worker, RemoteWorker) and worker.is_unwanted and handle.exit_code != LOST
        if not has_reported and not is_ours and handle.exit_code not in (ExitCode.DONE, ExitCode.STOPPED):
            self._lost.append(rank)

    def outcome(self) -> RunOutcome:
        if not self._lost or not self._has_begun or self._first_error is None or self._is_stopped.is_set():
            return super().outcome()
        machines = [*dict.fromkeys(self.plan.process(rank).device.machine for rank in self._lost)]
        line, problem = "", ""
        try:
            line = self._next_attempt(machines)
        except MusterError as error:
            problem = f"the run does not go on without {', '.join(machines)}: {error}"
        if self._is_stopped.is_set():
            self._forget_loss()
            return super().outcome()
        self._record(WarningEvent(message=line or problem))
        if not line:
            return super().outcome()
        return RunOutcome(GOES_ON, self.folder.path, {}, ExitCode.RUN_FAILED, line)

    def _forget_loss(self) -> None:
        """Let the run end as one that was stopped: it would have gone on after the loss."""
        self._first_error = None
        for worker in self.members.workers.values():
            worker.error = None

    def _next_attempt(self, lost: Sequence[str]) -> str:
        """Prepare the next attempt, now or when a lost machine is back; return a line about it.

        Raises:
            MusterError: the others cannot go on, and it was not waited for, or in vain.
        """
        try:
            return self._go_on(lost)
        except MusterError as error:
            if self._is_back is None:
                raise
            problem = error
        names = ", ".join(lost)
        self._record(WarningEvent(message=f"the run waits for {names}, without which it cannot go on: {problem}"))
        self._record(RunEvent(status="paused", message=f"waits for {names}"))
        self.folder.begin("paused")
        deadline = time.monotonic() + _LONGEST_WAIT
        while time.monotonic() < deadline and not self._is_stopped.wait(_LOOKS_EVERY):
            if self._is_back(lost):
                try:
                    line = self._go_on(())
                except MusterError as error:  # another machine may be away now
                    problem = error
                else:
                    self.folder.begin("running")
                    return line
        raise problem
