"""The meeting point of a run's workers: coordinators, and the rendezvous store of a script or of a member's devices."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import psutil

from profiles.errors import BadInput, MusterError, RunFailed
from training.exchange.group.quorum import VotingRecord, carrier_of
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.torch_backend.store_server import StoreServer
from training.records.events import ElectionEvent, Event, WarningEvent
from training.records.plan import RunPlan
from training.records.run_files import write_atomically
from training.records.run_folder import RunFolder
from training.run.processes import Channel, CoordinatorProcess, processes_of

SPARE = 8
"""Machines that may join during a run. Their keys are made with the others' and stay here until they join."""

_MOST_ENDS, _SETTLED = 5, 2.0
"""Number of ends of the coordinator, each so many seconds after its start at most, that mean that it cannot go on."""
_PORT_SECONDS = 20.0
"""Seconds to wait until the port of a restarted coordinator is free."""
_LOOK = 0.5
_VOTES = "committed.json"


def columns_of(plan: RunPlan) -> list[tuple[int, ...]]:
    """Return the ranks of the processes that hold the same part of each member's model, by member: what one of them
    exchanges, it exchanges with these. Members of one device each are the only column."""
    return [*zip(*(plan.processes_of(member.rank) for member in plan.all_members), strict=True)]


def coordinator_config(plan: RunPlan, column: Collection[int]) -> dict[str, Any]:
    """Return what the configuration of a coordinator says of a plan.

    Args:
        column: ranks of the processes that meet there; to the others it listens as to absent ones.
    """
    present = {process.rank for process in plan.processes if process.member.rank not in plan.absent}
    processes = [process for process in plan.processes if process.member.rank < plan.world_size]
    return {
        "run_id": plan.run_id,
        "names": [process.name for process in processes],
        "spare": SPARE,
        "absent": [process.rank for process in processes if process.rank not in present & {*column}],
        "round_deadline": plan.profile.strategy.round_deadline,
        "quorum": plan.profile.strategy.quorum,
        "elects": plan.elects,
        "is_column": plan.is_staged,
    }


class CoordinatorHandle(Channel, Protocol):
    """A started coordinator, here or elsewhere; its first line is ``{"port": N}``, then come events. If its
    configuration cannot be used, that line has ``error`` and ``hint`` too."""

    def stop(self) -> None: ...

    def signal(self, number: int) -> None: ...


StartCoordinator = Callable[[dict[str, Any], BinaryIO], CoordinatorHandle]
"""Starts a coordinator with this configuration, its log going there."""


class Elected(NamedTuple):
    """A coordinator that the members have elected, on the machine of one of them."""

    rank: int
    term: int
    port: int

    @staticmethod
    def newest(event: Event, before: Elected | None) -> Elected | None:
        """Return the coordinator that an event tells of, if its term is later than that of the one ``before``: any
        member that has voted for it tells of it, as the one that carries it may be out of reach."""
        if not isinstance(event, ElectionEvent):
            return before
        is_later = before is None or event.term > before.term
        return Elected(carrier_of(event.term), event.term, event.port) if is_later else before


class MeetingPoint:
    """Started before the workers can meet, stopped after them.

    Members of several devices exchange column by column: each column has a coordinator.

    Args:
        folder: its ``secrets`` hold the run's certificates.
        watch: takes the event lines of a coordinator.
        listen: literal address of the coordinators; the rendezvous store is always on loopback.
        start_coordinator: where a coordinator is to run; default: a process of this machine.
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
        self._start_process = start_coordinator
        self._coordinators: list[_RunningCoordinator] = []
        self._store: StoreServer | None = None
        self._meetings = Counter[int]()
        """How often each worker has been let in again."""
        self._stopped = False
        self.elected: Elected | None = None
        """The coordinator that the members have elected instead."""

    def start(self, again: bool = False) -> None:
        """Start it; a single worker needs none.

        Args:
            again: take the place of coordinators whose supervisor was killed: same ports, same keys.

        Raises:
            BadInput: the port that was asked for is taken.
            RunFailed: a coordinator did not start.
        """
        plan, secrets, processes = self._plan, self._folder.secrets, len(self._plan.processes)
        if (plan.launch is None and (processes == 1 or plan.engine == "simulated")) or self.elected is not None:
            return
        has_relay = plan.has_coordinator or len(plan.machines) > 1
        if not again:
            issue_run_certificates(secrets, plan.run_id, range(processes + SPARE * has_relay), [self._listen])
        if has_relay:
            for column in columns_of(plan) if plan.has_coordinator else [range(processes)]:
                self._start_coordinator(column, again)
        if plan.launch is not None or plan.is_staged:
            self._store = StoreServer(0 if has_relay else plan.profile.strategy.coordinator_port)
            for rank in range(processes):
                self._store.admit(secrets / f"member-{rank}")

    def addresses(self, rank: int) -> dict[str, Any]:
        """Return the addresses of what a worker needs: its coordinator, the relay, the store; of a coordinator that
        the members have elected also its term and the rank on whose machine it is; where members have several devices,
        the number of their meeting."""
        plan, elected = self._plan, self.elected
        if elected is not None:
            return {"address": f"0.0.0.0:{elected.port}", "term": elected.term, "carrier": elected.rank}
        number = plan.process(rank).device_number if plan.has_coordinator and plan.is_staged else 0
        coordinator = self._coordinators[number] if self._coordinators else None
        meeting = {"meeting": self._meetings[rank]} if plan.is_staged else {}
        return meeting | {
            "address": coordinator.address if coordinator and plan.has_coordinator else "",
            "relay": self._coordinators[0].relay if self._coordinators else "",
            "store": f"127.0.0.1:{self._store.port}" if self._store else "",
        }

    @property
    def committed(self) -> tuple[int, ...] | None:
        """The members of the newest mesh that counts, as this machine's coordinator has written it down for when it is
        started again; ``None``: another machine's coordinator knows."""
        if not self._plan.elects or self.elected is not None:
            return None
        with contextlib.suppress(OSError, ValueError):
            record = VotingRecord.model_validate_json((self._folder.path / "secrets" / _VOTES).read_bytes())
            return record.committed.members if record.committed is not None else None
        return None

    def _start_coordinator(self, column: Collection[int], again: bool) -> None:
        number = f"-{len(self._coordinators) + 1}" if self._coordinators else ""
        config, log, secrets = self._config(column), self._open_log(f"coordinator{number}"), self._folder.secrets
        path = secrets / f"coordinator{number}.json"

        def start_here(config: dict[str, Any], log: BinaryIO) -> CoordinatorHandle:
            write_atomically(path, json.dumps(config).encode())
            return CoordinatorProcess(path, log)

        if again:
            self._kill_orphan(path)  # before it tells the members that it was stopped
        start = self._start_process or start_here
        coordinator = _RunningCoordinator(config, log, start, secrets / f"ports{number}.json")
        self._coordinators.append(coordinator)
        if self._stopped:
            coordinator.stop()
        self._watch(coordinator.start(again))

    def _kill_orphan(self, configuration: Path) -> None:
        """Kill the coordinator that a killed supervisor has left on this machine."""
        for process in processes_of(self._plan.run_id):
            with contextlib.suppress(psutil.Error):
                if str(configuration) in process.cmdline():
                    process.kill()
                    process.wait()

    def _config(self, column: Collection[int]) -> dict[str, Any]:
        """Return the configuration of the coordinator of some processes."""
        plan, secrets = self._plan, self._folder.secrets
        port = plan.profile.strategy.coordinator_port
        return coordinator_config(plan, column) | {
            "local": [p.rank for p in plan.processes if p.member.rank < plan.world_size and plan.is_local(p)],
            "address": self._listen,
            "port": port and port + len(self._coordinators),
            "certificates": str(secrets / "coordinator"),
            "state": str(secrets / _VOTES),
        }

    def note_event(self, event: Event) -> None:
        """End the coordinators when the members have elected another one; they must hear nothing of that."""
        if not self._plan.elects or (elected := Elected.newest(event, self.elected)) == self.elected:
            return
        self.elected, retired, self._coordinators = elected, self._coordinators, []
        for coordinator in retired:
            threading.Thread(target=coordinator.kill, name="retire", daemon=True).start()

    def note_end(self, rank: int, reason: str) -> None:
        """Note that the process of a worker has ended, so that it follows no other coordinator.

        Args:
            reason: not empty: it is only lost, and may run on.
        """
        for coordinator in self._coordinators if self._plan.elects and not reason else ():
            coordinator.note_end(rank)

    def ban(self, rank: int) -> None:
        """Exclude a worker from all exchanges, whether its machine obeys or not."""
        for coordinator in self._coordinators:
            coordinator.ban(rank)

    def admit(self, ranks: Collection[int]) -> None:
        """Let all workers of a member in again; its devices meet anew."""
        self._meetings.update([*ranks])
        for coordinator, rank in itertools.product(self._coordinators, ranks):
            coordinator.admit(rank)

    def stop(self) -> None:
        """End what was started. Idempotent."""
        self._stopped = True
        for coordinator in self._coordinators:
            coordinator.stop()
        if self._store is not None:
            self._store.close()
            self._store = None


class _RunningCoordinator:
    """A coordinator that is started again if it ends by itself.

    Args:
        start: starts its process.
        ports: document with its ports, for a supervisor that takes over.
    """

    def __init__(self, config: dict[str, Any], log: BinaryIO, start: StartCoordinator, ports: Path) -> None:
        self._config, self._log, self._start_process, self._ports = config, log, start, ports
        listen = config["address"]
        self._host = f"[{listen}]" if ":" in listen else listen
        self._process: CoordinatorHandle | None = None
        self._port = self._relay_port = 0
        self._banned: set[int] = set()
        self._ended: set[int] = set()
        self._stopped = False
        self._gate = threading.RLock()
        """Held while it is started or stopped, also by a signal handler: it never starts after the end."""

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def relay(self) -> str:
        """Address of its relay; empty: it has none."""
        return f"{self._host}:{self._relay_port}" if self._relay_port else ""

    def start(self, again: bool) -> Iterator[bytes]:
        """Start it, ``again`` on its recorded ports, and return the events of all its processes.

        Raises:
            BadInput: its configuration cannot be used.
            RunFailed: it did not start.
        """
        if again:
            return self._lines(self._started_again(self._config | json.loads(self._ports.read_bytes())))
        return self._lines(self._started(self._config))

    def _started(self, config: dict[str, Any]) -> Iterator[bytes]:
        """Start the coordinator, and return its events.

        Raises:
            BadInput: its configuration cannot be used.
            RunFailed: it did not start.
        """
        with self._gate:
            if self._stopped:
                raise RunFailed("the run has ended")
            self._process = coordinator = self._start_process(config, self._log)
        lines = coordinator.lines()
        greeting = json.loads(next(lines, b"{}"))
        if "error" in greeting:
            raise BadInput(greeting["error"], greeting["hint"], option=greeting.get("option", ""))
        if "port" not in greeting:
            raise RunFailed("the coordinator did not start", f"see {self._log.name}")
        self._port, self._relay_port = int(greeting["port"]), int(greeting.get("relay", 0))
        write_atomically(self._ports, json.dumps({"port": self._port, "relay_port": self._relay_port}).encode())
        return lines

    def _lines(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """Yield all events; a coordinator that ends by itself is started again, and its members reconnect."""
        ends = 0
        while True:
            begun = time.monotonic()
            yield from lines
            if self._stopped:
                return
            ends = ends + 1 if time.monotonic() - begun < _SETTLED else 0
            if ends == _MOST_ENDS:
                times = f"{_MOST_ENDS} times as soon as it had started"
                yield _warning(f"ended {times}, and is not started again: see {self._log.name}")
                return
            yield _warning("ended unexpectedly and is started again; the machines continue where they were")
            if (ended := self._process) is not None:
                ended.stop()
            try:
                lines = self._started_again({**self._config, "port": self._port, "relay_port": self._relay_port})
            except RunFailed:  # killed while it started, as another end
                lines = iter(())
            except MusterError as error:
                if not self._stopped:
                    yield _warning(f"cannot be started again: {error.message}; {error.hint}")
                return
            for rank in tuple(self._banned):
                self.ban(rank)
            for rank in tuple(self._ended):
                self.note_end(rank)

    def _started_again(self, config: dict[str, Any]) -> Iterator[bytes]:
        """Start it on its old port, which another program may occupy for a while."""
        end = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                return self._started(config)
            except BadInput as error:
                if error.option != "coordinator_port" or time.monotonic() > end:
                    raise
            if (refused := self._process) is not None:
                refused.stop()
            time.sleep(_LOOK)

    def ban(self, rank: int) -> None:
        self._banned.add(rank)
        if self._process is not None:
            self._process.send({"ban": rank})

    def admit(self, rank: int) -> None:
        self._banned.discard(rank)
        self._ended.discard(rank)
        if self._process is not None:
            self._process.send({"admit": rank})

    def note_end(self, rank: int) -> None:
        self._ended.add(rank)
        if self._process is not None:
            self._process.send({"ended": rank})

    def kill(self) -> None:
        """End it so that it cannot tell its members, and start no other one."""
        self._stopped = True
        if (process := self._process) is not None:
            process.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        with self._gate:
            self._stopped = True
            process, self._process = self._process, None
        if process is not None:
            process.stop()


def _warning(text: str) -> bytes:
    """Return a warning about the coordinator as an event line."""
    return WarningEvent(message=f"the coordinator {text}").model_dump_json().encode()
