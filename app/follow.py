"""A run as its folder tells it, followed while it goes on: readers come and go, the run does not notice."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from app.report import Ended
from app.run_state import RunState, at_its_end
from profiles.errors import MusterError
from training.event_log import follow_events
from training.event_log import follow_lines as follow_lines
from training.events import Event
from training.outcome import NewestAttempt
from training.plan import RunPlan
from training.run_files import explain, is_live
from training.run_folder import RunFolder
from training.run_metadata import FINAL

_INTERRUPTED = "interrupted: its supervisor is gone"
_ROOM = 1_000_000
"""Bytes without which the end of a run cannot be written down."""


class Follower:
    """Reads the events of a run and remembers how it ended.

    Args:
        path: the run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: RunPlan = RunFolder.open(path).plan()
        self._events = follow_events(path / "events.jsonl", lambda: is_live(path))
        self._attempt = NewestAttempt()

    def events(self) -> Iterator[Event | None]:
        """Yield the events from the first one on, and ``None`` every now and then while nothing happens."""
        for event in self._events:
            if event is not None:
                self._attempt.note(event)
            yield event

    def now(self) -> float:
        """Return the present, in seconds since the epoch."""
        return time.time()

    def ended(self, state: RunState) -> Ended:
        """Return how the run ended; to be called after the last event."""
        error = self._attempt.error
        try:
            metadata = RunFolder.open(self.path).metadata
            status, message = self._attempt.ending(metadata)
            metrics = metadata.metrics
        except MusterError:  # its input could not be used, so nothing of it was kept
            status, message, metrics = "failed", error.message if error else "", {}
        hint = error.hint if error else ""
        if status not in FINAL:
            message, hint = self._interruption()
        shown = status if status in FINAL else "failed"
        code = self._attempt.exit_code(shown)
        return Ended(self.plan, self.path, shown, code, message, hint, metrics, at_its_end(state, shown, message))

    def _interruption(self) -> tuple[str, str]:
        """Return message and hint where nobody wrote the end down: its supervisor was killed, or could not write."""
        error = self._attempt.error
        if error is not None:
            return error.message, error.hint
        if shutil.disk_usage(self.path).free < _ROOM:
            return explain(OSError(errno.ENOSPC, ""), self.path)
        return _INTERRUPTED, ""
