"""The coordinator of a run on another machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from distributed.workers.remote_worker import RemoteWorker
from training.records.events import Event, from_line


@dataclass(eq=False)
class RemoteCoordinator(RemoteWorker):
    """A :class:`training.run.meeting_point.CoordinatorHandle`."""

    note: Callable[[Event], object] = lambda event: None
    """Called with events about the connection, which are not the coordinator's own."""

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of its standard output: first ``{"port": N}``, then events."""
        begun = False
        for line in super().lines():
            begun = begun or line.startswith(b'{"port"')
            if begun:
                yield line
            else:  # an event about the connection, before the coordinator's first line
                self.note(from_line(line))

    def stop(self, timeout: float = 5.0) -> None:
        """End the coordinator and wait until nothing of it is left on its machine; else its lease ends it."""
        self.signal(signal.SIGTERM)
        if not self.wait(timeout):
            self.signal(signal.SIGKILL)
            self.wait(timeout)
