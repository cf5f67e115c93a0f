"""The hub of a run on another machine than the one that starts it: the face of a local hub process, over its agent."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

from distributed.machine.link import Link
from distributed.preparation.code_sync import Inputs
from distributed.workers.agent_records import Assignment, Timeouts
from distributed.workers.remote_worker import RemoteWorker
from training.events import Event, from_line
from training.processes import thread_limits

PLACE = "hub"
"""Its folder there, beside those of the members."""


class RemoteHub:
    """Implements :class:`training.local_engine.HubHandle`.

    Args:
        link: the machine.
        run_id: of the run.
        config: the hub's; what is a path in it is replaced by the one there.
        log: takes what the hub writes to stderr.
        run_dir: run folder here; its ``secrets`` hold the hub's certificate.
        inputs: the code of the run.
        ready: the hub is started when it is done.
        note: told of a connection that was lost, and of what else is not the hub's own word.
    """

    def __init__(
        self,
        link: Link,
        run_id: str,
        config: Mapping[str, Any],
        log: BinaryIO,
        run_dir: Path,
        inputs: Inputs,
        timeouts: Timeouts,
        ready: Future[None],
        note: Callable[[Event], None],
    ) -> None:
        there = {**config, "address": "0.0.0.0", "certificates": f"secrets/{PLACE}"}
        certificates = sorted((run_dir / "secrets" / PLACE).iterdir())
        assignment = Assignment(
            run_id=run_id,
            rank=-1,
            plan=b"{}",
            links=inputs.links,
            environment=thread_limits(1),
            module="training.exchange.hub_main",
            place=PLACE,
            words=("--config", "secrets/hub.json"),
            files={
                "secrets/hub.json": json.dumps(there).encode(),
                **{f"secrets/{PLACE}/{path.name}": path.read_bytes() for path in certificates},
            },
            brings_model=False,
        )
        self._note = note
        self._worker = RemoteWorker(link, assignment, log, run_dir, run_dir / "secrets", timeouts=timeouts, ready=ready)

    def lines(self) -> Iterator[bytes]:
        """Lines of its standard output: first ``{"port": N}``, then events."""
        begun = False
        for line in self._worker.lines():
            begun = begun or line.startswith(b'{"port"')
            if begun:
                yield line
            else:  # of the connection, before the hub has said anything
                self._note(from_line(line))

    def send(self, message: dict[str, Any]) -> None:
        """Write one message to its standard input."""
        self._worker.send(message)

    def stop(self, timeout: float = 5.0) -> None:
        """End it and wait until its machine has nothing of it left; its lease ends what cannot be told."""
        self._worker.signal(signal.SIGTERM)
        if not self._worker.wait(timeout):
            self._worker.signal(signal.SIGKILL)
            self._worker.wait(timeout)

    def exit_code(self) -> int:
        """Wait for the end and return the exit code."""
        return self._worker.exit_code()
