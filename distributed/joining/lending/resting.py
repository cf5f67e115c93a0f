"""Gives this computer back to its owner: freezes what others run within a second, and ends it where that lasts."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import psutil

from distributed.joining.lending.box import ProgramBox
from distributed.joining.lending.inside import PROCESSES
from distributed.joining.lending.ledger import LentPrograms
from distributed.joining.lending.presence import PresenceSensor, RestPolicy, is_input_hidden
from distributed.joining.lending.terms import LendingTerms
from profiles.errors import BadInput
from profiles.quantities import memory_text

LOOK = 0.25
"""Seconds between two looks for the owner."""
FROZEN = 30.0
"""Seconds after which frozen programs are ended, so that their memory is free, too."""
_ACCOUNT = 3.0
"""Seconds between two looks at memory and at what runs."""


class LentConnection(Protocol):
    """The connection to a pool, as far as it rests."""

    def rest(self, reason: str) -> None:
        """Serve nothing while there is a reason, and end what runs here for the pool."""


def require_limits(terms: LendingTerms) -> None:
    """Check that this system can hold the limits.

    Raises:
        BadInput: it cannot hold one of them.
    """
    if terms.while_idle and is_input_hidden():
        problem = "this desktop does not tell other programs when somebody types: only GNOME's and macOS' do"
        raise BadInput(problem, "lend it at fixed hours instead: --hours 22-7")
    if terms.cores and sys.platform == "darwin":
        raise BadInput("macOS keeps no program to some cores", "leave out --cores; --while-idle gives all of them back")


class LendingWatch:
    """Watches over what a pool runs here, in a thread, until it is closed.

    Args:
        connection: rests where there is a reason.
        tell: called with a line for people.
        programs: keeps account of what ran.
        sensor: looks at this computer.
    """

    def __init__(
        self,
        terms: LendingTerms,
        box: ProgramBox,
        connection: LentConnection,
        tell: Callable[[str], None],
        programs: LentPrograms,
        sensor: PresenceSensor | None = None,
    ) -> None:
        self._terms, self._box, self._connection, self._tell, self._programs = terms, box, connection, tell, programs
        self._policy = RestPolicy(terms)
        self._sensor = sensor or PresenceSensor(terms, self._seconds)
        self._frozen_at: float | None = None
        self._is_resting = False
        self._accounted = float("-inf")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lending", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(LOOK):
            now = time.monotonic()
            self._apply(self._policy.reason(self._sensor.look(), now), now)
            if now - self._accounted >= _ACCOUNT:
                self._accounted = now
                processes = self._box.processes()
                self._programs.account(processes)
                self._bound(processes)
        self._programs.close()

    def _apply(self, reason: str, now: float) -> None:
        """Freeze, end or continue what runs, by whether there is a reason to rest."""
        if not reason:
            return self._go_on()
        if self._is_resting:
            return
        processes = self._box.processes()
        freeze(processes)
        if self._frozen_at is None:
            self._frozen_at = now
            if processes:
                self._tell(f"{reason}: what others run here stands still")
        if not processes or now - self._frozen_at >= FROZEN:
            self._is_resting, self._frozen_at = True, None
            self._tell(f"{reason}: nothing of others runs here until that is over")
            self._connection.rest(reason)

    def _go_on(self) -> None:
        if self._frozen_at is not None:
            self._frozen_at = None
            thaw(self._box.processes())
            self._tell("what others run here goes on")
        if self._is_resting:
            self._is_resting = False
            self._connection.rest("")
            self._tell("others may use this computer again")

    def _bound(self, processes: list[psutil.Process]) -> None:
        """End all that the pool runs where it takes more memory than it is lent, or very many processes."""
        used, lent, problem = memory_of(processes) if self._terms.memory else 0, self._terms.memory, ""
        if used > lent:
            problem = f"took {memory_text(used)}, lent are {memory_text(lent)}"
        elif len(processes) > PROCESSES:
            problem = f"were {len(processes)} at a time"
        if problem:
            self._tell(f"programs of others {problem}: they were ended")
            self._box.close()

    def _seconds(self) -> dict[int, float]:
        seconds = {}
        for process in self._box.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
        return seconds

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def freeze(processes: list[psutil.Process]) -> None:
    """Stop processes; those that start others meanwhile are found by the next look."""
    _signal(processes, signal.SIGSTOP)


def thaw(processes: list[psutil.Process]) -> None:
    """Let stopped processes go on."""
    _signal(processes, signal.SIGCONT)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def memory_of(processes: list[psutil.Process]) -> int:
    """Return the bytes of memory that processes have for themselves."""
    used = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            used += max(0, memory.rss - getattr(memory, "shared", 0))
    return used
