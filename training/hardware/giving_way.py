"""A member that gives way to the owner of its machine: it has low priority, and computes a quarter of the time while
somebody uses the machine, other programs need its processors, it runs on battery, or is hot.

It rests between two steps, and its rest counts as computing: where shares follow speed, others take over its samples.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from profiles.quantities import share_text, temperature_text
from training.hardware.idle_time import IdleTime
from training.records.events import BUSY, Emit, MachineEvent, WarningEvent

SHARE = 0.25
"""Part of the time in which a member that gives way computes."""
IN_USE = 60.0
"""Seconds after a key was pressed, or the mouse moved, for which somebody uses a machine."""
HOT, COOL = 85.0, 75.0
"""Degrees Celsius from which a member gives way, and below which that is over."""
CALM = 60.0
"""Seconds without any reason after which it no longer gives way."""
MOST_REST = 60.0
"""Seconds that it rests after a step at most."""
_PRIORITY = 10
"""Niceness that is added: another program gets ten times the processor time, and heartbeats still theirs in time."""
_HEAT = "it is hot"
_ORDERS = 0.25  # seconds after which a member that rests looks whether it is to stop


class GivingWay:
    """Whether a member gives way, by the load of its machine, which a thread reports.

    Args:
        name: of the member.
        emit: takes a warning when it begins to give way, and when that is over.
        idle_seconds: returns since when nobody has used the machine; ``None``: unknown.
        clock: in seconds.
    """

    def __init__(
        self,
        name: str,
        emit: Emit,
        idle_seconds: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._emit, self._clock = name, emit, clock
        self._idle_seconds = idle_seconds or IdleTime().seconds
        self._last_reason = 0.0
        self._is_over = threading.Event()
        self.reason = ""
        """Why it gives way; empty: it does not."""
        self.rested: float | None = None
        """Seconds of its last rest; ``None``: there was none."""

    def note(self, event: MachineEvent) -> MachineEvent:
        """Follow the load of the machine; return its event with the reason for which this member gives way."""
        now, reason = self._clock(), self._reason_in(event)
        if reason:
            self._last_reason = now
            if not self.reason:
                self._emit(WarningEvent(message=f"{self._name} gives way: {reason}"))
                self._is_over.clear()
            self.reason = reason
        elif self.reason and now - self._last_reason >= CALM:
            self.reason = ""
            self._is_over.set()
            self._emit(WarningEvent(message=f"{self._name} no longer gives way"))
        return event.model_copy(update={"gives_way": self.reason or None})

    def rest(self, computed: float, is_stopping: Callable[[], bool]) -> None:
        """Rest after a step where this member gives way, until that is over or it is to stop.

        Args:
            computed: seconds that it computed in the step.
        """
        begun = time.monotonic()
        end = begun + min(MOST_REST, computed * (1 / SHARE - 1)) if self.reason else begun
        while (left := end - time.monotonic()) > 0 and not is_stopping() and not self._is_over.wait(min(left, _ORDERS)):
            pass
        self.rested = time.monotonic() - begun if end > begun else None

    def _reason_in(self, event: MachineEvent) -> str:
        celsius, others = event.celsius or 0.0, event.others_percent or 0.0
        if event.on_mains is False:
            return "it runs on battery"
        if event.throttled or celsius >= (COOL if self.reason.startswith(_HEAT) else HOT):
            return f"{_HEAT} ({temperature_text(celsius)})" if celsius else _HEAT
        if (idle := self._idle_seconds()) is not None and idle < IN_USE:
            return "somebody uses it"
        if others >= 100 * BUSY:
            return f"other programs use {share_text(others / 100)} of its processors"
        return ""


def lower_priority() -> None:
    """Give this thread low priority, and the threads and processes that it starts from now on."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_PRIORITY)
