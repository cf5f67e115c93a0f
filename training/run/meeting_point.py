"""The meeting point of a run's workers: the coordinator, or the rendezvous store of a script or a pipeline."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import psutil

from profiles.errors import BadInput, MusterError, RunFailed
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.torch_backend.store_server import StoreServer
from training.records.events import WarningEvent
from training.records.plan import RunPlan
from training.records.run_files import write_atomically
from training.records.run_folder import RunFolder
from training.run.processes import Channel, CoordinatorProcess, processes_of

SPARE = 8
"""Machines that may join during a run. Their keys are made with the others' and stay here until they join."""

_MOST_ENDS, _MINUTE = 5, 60.0
"""Number of ends of the coordinator, and the seconds within which so many mean that it cannot go on."""
_PORT_SECONDS = 20.0
"""Seconds to wait until the port of a restarted coordinator is free."""
_LOOK = 0.5


class CoordinatorHandle(Channel, Protocol):
    """A started coordinator, here or elsewhere; its first line is ``{"port": N}``, then come events. If its
    configuration cannot be used, that line has ``error`` and ``hint`` too."""

    def stop(self) -> None: ...


StartCoordinator = Callable[[dict[str, Any], BinaryIO], CoordinatorHandle]
"""Starts a coordinator with this configuration, its log going there."""


class MeetingPoint:
    """Started before the workers can meet, stopped after them.

    Args:
        folder: its ``secrets`` hold the run's certificates.
        watch: takes the event lines of the coordinator.
        listen: literal address of the coordinator; the rendezvous store is always on loopback.
        start_coordinator: where the coordinator is to run; default: a process of this machine.
    """

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        open_log: Callable[[str], BinaryIO],
        watch: Callable[[Iterator[bytes]], None],
        listen: str = "127.0.0.1",
        start_coordinator: StartCoordinator | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._open_log = open_log
        self._watch = watch
        self._listen = listen
        self._host = f"[{listen}]" if ":" in listen else listen
        self._start_process = start_coordinator or self._start_here
        self._coordinator: CoordinatorHandle | None = None
        self._store: StoreServer | None = None
        self._port = self._relay_port = 0
        self._banned: set[int] = set()
        self._stopped = False
        self._gate = threading.RLock()
        """Held while a coordinator is started or stopped, also by a signal handler: none starts after the end."""

    def start(self, again: bool = False) -> str:
        """Start it and return its address; a single worker needs none.

        Args:
            again: take the place of a coordinator whose supervisor was killed: same ports, same keys.

        Raises:
            BadInput: the port that was asked for is taken.
            RunFailed: the coordinator did not start.
        """
        launch, secrets, processes = self._plan.launch, self._folder.secrets, len(self._plan.processes)
        if launch is None and (processes == 1 or self._plan.engine == "simulated"):
            return ""
        has_relay = self._plan.has_coordinator or len(self._plan.machines) > 1
        if has_relay:
            self._start_coordinator(again)
        else:
            issue_run_certificates(secrets, self._plan.run_id, range(processes), [self._listen])
        if not self._plan.has_coordinator:
            self._store = StoreServer(0 if has_relay else self._plan.profile.strategy.coordinator_port)
            for rank in range(processes):
                self._store.admit(secrets / f"member-{rank}")
            return f"127.0.0.1:{self._store.port}"
        return f"{self._host}:{self._port}"

    def _start_coordinator(self, again: bool) -> None:
        config, log = self._coordinator_config(), self._open_log("coordinator")
        if again:
            self._kill_orphan()  # before it tells the members that it was stopped
            lines = self._started_again({**config, **json.loads(self._ports.read_bytes())}, log)
        else:
            ranks = range(len(self._plan.processes) + SPARE)
            issue_run_certificates(self._folder.secrets, self._plan.run_id, ranks, [self._listen])
            lines = self._started(config, log)
        self._watch(self._lines(lines, config, log))

    def _kill_orphan(self) -> None:
        """Kill the coordinator that a killed supervisor has left on this machine."""
        for process in processes_of(self._plan.run_id):
            with contextlib.suppress(psutil.Error):
                if str(self._configuration) in process.cmdline():
                    process.kill()
                    process.wait()

    def _started(self, config: dict[str, Any], log: BinaryIO) -> Iterator[bytes]:
        """Start the coordinator, and return its events.

        Raises:
            BadInput: its configuration cannot be used.
            RunFailed: it did not start.
        """
        with self._gate:
            if self._stopped:
                raise RunFailed("the run has ended")
            self._coordinator = coordinator = self._start_process(config, log)
        lines = coordinator.lines()
        greeting = json.loads(next(lines, b"{}"))
        if "error" in greeting:
            raise BadInput(greeting["error"], greeting["hint"], option=greeting.get("option", ""))
        if "port" not in greeting:
            raise RunFailed("the coordinator did not start", f"see {log.name}")
        self._port, self._relay_port = int(greeting["port"]), int(greeting.get("relay", 0))
        write_atomically(self._ports, json.dumps({"port": self._port, "relay_port": self._relay_port}).encode())
        return lines

    def _lines(self, lines: Iterator[bytes], config: dict[str, Any], log: BinaryIO) -> Iterator[bytes]:
        """Yield all events; a coordinator that ends by itself is started again, and its members reconnect."""
        ends: deque[float] = deque(maxlen=_MOST_ENDS)
        while True:
            yield from lines
            if self._stopped:
                return
            ends.append(time.monotonic())
            if len(ends) == _MOST_ENDS and ends[-1] - ends[0] < _MINUTE:
                yield _warning(f"ended {_MOST_ENDS} times within a minute and is not started again: see {log.name}")
                return
            yield _warning("ended unexpectedly and is started again; the machines continue where they were")
            if (ended := self._coordinator) is not None:
                ended.stop()
            try:
                lines = self._started_again({**config, "port": self._port, "relay_port": self._relay_port}, log)
            except RunFailed:  # killed while it started, as another end
                lines = iter(())
            except MusterError as error:
                if not self._stopped:
                    yield _warning(f"cannot be started again: {error.message}; {error.hint}")
                return
            for rank in tuple(self._banned):
                self.ban(rank)

    def _started_again(self, config: dict[str, Any], log: BinaryIO) -> Iterator[bytes]:
        """Start it on its old port, which another program may occupy for a while."""
        end = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                return self._started(config, log)
            except BadInput as error:
                if error.option != "coordinator_port" or time.monotonic() > end:
                    raise
            if (refused := self._coordinator) is not None:
                refused.stop()
            time.sleep(_LOOK)

    def _start_here(self, config: dict[str, Any], log: BinaryIO) -> CoordinatorHandle:
        write_atomically(self._configuration, json.dumps(config).encode())
        return CoordinatorProcess(self._configuration, log)

    def _coordinator_config(self) -> dict[str, Any]:
        secrets, strategy = self._folder.secrets, self._plan.profile.strategy
        return {
            "run_id": self._plan.run_id,
            "names": [member.name for member in self._plan.members],
            "spare": SPARE,
            "absent": self._plan.absent,
            "local": [member.rank for member in self._plan.members if self._plan.is_local(member)],
            "address": self._listen,
            "port": strategy.coordinator_port,
            "certificates": str(secrets / "coordinator"),
            "round_deadline": strategy.round_deadline,
            "quorum": strategy.quorum,
        }

    @property
    def _configuration(self) -> Path:
        """Of a coordinator on this machine."""
        return self._folder.secrets / "coordinator.json"

    @property
    def _ports(self) -> Path:
        """Document with the coordinator's ports, for a supervisor that takes over."""
        return self._folder.secrets / "ports.json"

    @property
    def relay(self) -> str:
        """Address of the relay; empty: there is none."""
        return f"{self._host}:{self._relay_port}" if self._relay_port else ""

    def ban(self, rank: int) -> None:
        """Exclude a member from all exchanges, whether its machine obeys or not."""
        self._banned.add(rank)
        if self._coordinator is not None:
            self._coordinator.send({"ban": rank})

    def admit(self, rank: int) -> None:
        """Let a member in again."""
        self._banned.discard(rank)
        if self._coordinator is not None:
            self._coordinator.send({"admit": rank})

    def stop(self) -> None:
        """End what was started. Idempotent."""
        with self._gate:
            self._stopped = True
            coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.stop()
        if self._store is not None:
            self._store.close()
            self._store = None


def _warning(text: str) -> bytes:
    """Return a warning about the coordinator as an event line."""
    return WarningEvent(message=f"the coordinator {text}").model_dump_json().encode()
