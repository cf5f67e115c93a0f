"""Lines about a run on standard error, for scripts that train from Python and show nothing of it themselves."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from profiles.errors import counted
from profiles.quantities import duration_text, loss_text, throughput_text
from profiles.schema import Profile
from training.numerics.schedule import ends_in_warm_up
from training.records.events import (
    ElectionEvent,
    EvaluationEvent,
    Event,
    MemberEvent,
    RunEvent,
    StepEvent,
    WarningEvent,
)

INTERVAL = 10.0
"""Seconds between two lines about steps."""


def loss_sentence(name: str, cause: str) -> str:
    """Return the sentence of a machine that a run has lost."""
    return f"{name} is lost{f' ({cause})' if cause else ''}; the others go on"


class RunNarrator:
    """Writes lines about the events of a run.

    Args:
        profile: of the run, for remarks on its options.
        write: takes a line.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        profile: Profile,
        write: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._profile, self._write, self._clock = profile, write, clock
        self._start = self._due = clock()
        self._total: int | None = None
        self._warnings: set[str] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case RunEvent(status="starting", details={"workers": int(workers)}):
                self._line(f"starting {counted(workers, 'worker')}")
            case RunEvent(status="running", total_steps=int(total)) if self._total is None:  # else after a pause
                self._total = total
                self._line(f"training of {counted(total, 'step')}")
                self._warn(ends_in_warm_up(total, self._profile))
            case RunEvent(status="completed"):
                self._line("completed")
            case WarningEvent() | ElectionEvent():
                self._warn(event.message)
            case MemberEvent(status="lost"):
                self._line(loss_sentence(event.name, event.message))
            case EvaluationEvent():
                figures = ", ".join(f"{name} {loss_text(value)}" for name, value in event.figures.items())
                self._line(f"step {event.step}, {event.split}: {figures}")
            case StepEvent():
                self._tell_step(event)

    def _tell_step(self, event: StepEvent) -> None:
        if event.member not in (0, None) or (self._clock() < self._due and event.step != self._total):
            return
        self._due = self._clock() + INTERVAL
        total = f"/{self._total}" if self._total else ""
        rate = f", {throughput_text(event.samples / event.seconds)} a worker" if event.seconds else ""
        self._line(f"step {event.step}{total}, loss {loss_text(event.loss)}{rate}")

    def _warn(self, message: str) -> None:
        if message and message not in self._warnings:  # several members send the same warning
            self._warnings.add(message)
            self._line(f"warning: {message}")

    def _line(self, text: str) -> None:
        seen = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
        with contextlib.suppress(OSError, ValueError):  # the reader is gone; the run goes on
            self._write(f"[{duration_text(self._clock() - self._start)}] {seen}")
