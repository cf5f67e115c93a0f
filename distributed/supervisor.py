"""The background process of one distributed run: ``python -m distributed.supervisor``, its folder on standard input.

It brings code and data to the machines, starts the engine here and the workers there, merges their events into the run
folder, carries out what is left in ``requests/``, and outlives the terminal. Whoever shows the run reads the folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from distributed.hosts.file import RUN_HOSTS, load_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink, link_to
from distributed.planning.feedback import prediction_metrics
from distributed.preparation.code_sync import Inputs, collect
from distributed.preparation.preflight import member_of
from distributed.preparation.transfer import send_trees
from distributed.run.request_desk import RequestDesk
from distributed.run.requests import Request, leave_request
from distributed.run.run_machines import (
    StartWatch,
    WayTo,
    check_newcomer,
    coordinator_machine,
    listening_address,
    note_added,
    present,
    reach,
    seats_of,
    with_places,
)
from distributed.system import keep_awake
from distributed.workers.agent_records import AgentTimeouts, assigned, assigned_coordinator
from distributed.workers.remote_worker import RemoteCoordinator, RemoteWorker
from profiles.errors import BadInput, ExitCode, MusterError
from training.events import ENGINE, ErrorEvent, Event, ProgressEvent, WarningEvent
from training.local_run import LocalRun
from training.outcome import RunOutcome, write_end
from training.plan import LAUNCHED_FILES
from training.processes import PhaseTimer, told_run
from training.run_folder import RunFolder

_START_WARNING = 30.0
"""Seconds of a start between two lines about who is missing."""
_END_PATIENCE = 10.0
_LOOK = 0.05


class Supervisor:
    """One run from the first connection to the last.

    Args:
        folder: held by this process.
        ssh_config: of the hosts file, for machines that come later.
    """

    def __init__(self, folder: RunFolder, links: Sequence[MachineLink], ssh_config: str = "") -> None:
        self._folder = folder
        self._note = folder.append
        original_plan = folder.plan()
        launch = original_plan.launch
        self._seats = (
            seats_of(links, original_plan.world_size) if launch is None else [links[one] for one in launch.machines]
        )
        present_links = present(original_plan, self._seats)
        self._plan = with_places(original_plan, present_links)
        self._links = list(dict.fromkeys(link for link in present_links if link is not None))
        self._ssh_config = ssh_config
        self._run: LocalRun | None = None
        self._timeouts = AgentTimeouts(lease=self._plan.profile.run.lease)
        self._desk: RequestDesk | None = None
        self._workers: list[RemoteWorker] = []
        self._needed: Future[bool] = Future()
        """Whether what is on the machines is needed after the end, to go on with."""
        self._ended = threading.Event()
        self._inputs: Future[Inputs] = Future()
        self._brought: dict[MachineLink, Future[None]] = {}
        self._arrived = 0
        self._lock = threading.Lock()
        self._start_watch = StartWatch([member.name for member in self._plan.members], self._plan.absent)

    def supervise(self) -> RunOutcome:
        """Carry the run out.

        Raises:
            MusterError: it could not begin, or cannot be written down.
        """
        threading.Thread(target=self._tell_who_is_missing, daemon=True).start()
        phases = PhaseTimer(self._note)
        phases.end("supervisor: program")
        pool = ThreadPoolExecutor(len(self._links) + 1)
        try:
            self._inputs = pool.submit(collect, self._plan)
            self._brought = {link: pool.submit(self._bring, link) for link in self._links}
            self._inputs.result()
            phases.end("supervisor: hashes")
            remote_coordinator = coordinator_machine(self._links) if self._plan.launch is None else None
            self._run = run = LocalRun(
                self._plan,
                self._folder,
                self._watch,
                lambda rank, log: self._worker(self._seats[rank], rank, log),
                listen="0.0.0.0" if remote_coordinator else listening_address(list(dict.fromkeys(self._seats))),
                more_metrics=lambda: prediction_metrics(self._folder),
                start_coordinator=self._start_coordinator if remote_coordinator else None,
            )
            run.start()
            phases.end(ENGINE)
            self._desk = RequestDesk(run, self._folder.path, self._note, self)
            self._desk.open()  # what was asked for before waited until there was something to stop
            outcome = run.wait()
            self._needed.set_result(outcome.status != "completed" and self._plan.launch is None)
            return outcome
        finally:
            pool.shutdown(wait=False)
            self._ended.set()
            if not self._needed.done():
                self._needed.set_result(True)
            if self._desk is not None:
                self._desk.close()
            self._end_workers()
            for link in dict.fromkeys(self._seats):
                link.close()

    def _bring(self, link: MachineLink) -> None:
        """Bring agent, code and data to one machine; its workers start then, whatever the others do."""
        phases = PhaseTimer(self._note, whole_process=False)
        link.put_agent()
        phases.end("machine: connected")
        self._send(link)
        phases.end("machine: code and data")
        with self._lock:
            self._arrived += 1
            self._note(ProgressEvent(phase="machines", done=self._arrived, total=len(self._links)))

    def _watch(self, event: Event) -> None:
        self._start_watch(event)
        if self._desk is not None:
            self._desk(event)

    # ------------------------------------------------------------------------------------------- who comes and goes

    def ranks(self, machine: str) -> tuple[int, ...]:
        ranks = tuple(rank for rank, link in enumerate(self._seats) if link.name == machine)
        if not ranks:
            names = ", ".join(dict.fromkeys(link.name for link in self._seats))
            raise BadInput(f"{machine} is not a machine of this run", f"it has: {names}")
        return ranks

    def letting_go(self, machine: str) -> tuple[int, ...]:
        coordinator = coordinator_machine(self._links)
        if coordinator is not None and coordinator.name == machine and self._plan.engine == "mesh":
            raise BadInput(f"{machine} carries the coordinator: the run depends on it", "drop another machine")
        return self.ranks(machine)

    def bring(self, request: Request) -> tuple[int, ...]:
        if request.entry is not None and all(link.name != request.entry.name for link in self._seats):
            return self._bring_new(request.entry)
        ranks = self.ranks(request.machine)
        link = self._seats[ranks[0]]
        if address := reach(link, self._ssh_config, self._folder.path):
            self._note(WarningEvent(message=f"{link.name}: found at {address} by its host key"))
        self._equip(link)
        self._brought.setdefault(link, _done())
        return ranks

    def _equip(self, link: MachineLink) -> None:
        link.put_agent()
        self._send(link)

    def _send(self, link: MachineLink) -> None:
        """Bring what is missing; say how far it is."""
        rank, phase = self._seats.index(link) if link in self._seats else None, f"bytes to {link.name}"

        def tell(done: int, total: int) -> None:
            self._note(ProgressEvent(member=rank, phase=phase, done=done, total=total))

        send_trees(link, self._inputs.result().trees.values(), tell)

    def _bring_new(self, entry: Machine) -> tuple[int, ...]:
        """Take in a machine that nobody has planned with."""
        assert self._run is not None
        participants = [self._seats[rank] for rank in self._run.members.taking_part]
        link = check_newcomer(
            entry, list(dict.fromkeys(participants)), self._ssh_config, self._plan, self._inputs.result().bytes
        )
        try:
            self._equip(link)
            ranks = self._seat(link)
        finally:
            if link not in self._seats:
                link.close()
        note_added(self._folder.path, entry, self._ssh_config)
        return ranks

    def _seat(self, link: MachineLink) -> tuple[int, ...]:
        """Make a machine that has its files known to the run; return its members."""
        assert self._run is not None
        self._brought[link] = _done()
        first_rank = len(self._seats)
        for device in link.machine.devices or ("",):
            self._run.expect(member_of(link.machine, device, len(self._seats), self._plan.profile))
            self._seats.append(link)
        return tuple(range(first_rank, len(self._seats)))

    def _worker(self, link: MachineLink, rank: int, log: BinaryIO) -> RemoteWorker:
        assert self._run is not None
        inputs = self._inputs.result()
        plan = inputs.plan.model_copy(update={"added": self._run.members.plan.added})
        assignment = assigned(plan, inputs.links, rank, plan.seats[rank].threads)
        if plan.launch is not None:
            brings = LAUNCHED_FILES if rank == 0 else ""
            assignment = replace(assignment, module="training.launched", brings=brings, resumes=False)
        worker = RemoteWorker(
            link,
            assignment,
            log,
            self._folder.path,
            self._folder.secrets,
            WayTo(link, self._plan, coordinator_machine(self._links)),
            self._timeouts,
            ready=self._brought[link],
            delivers=lambda: self._delivers(rank),
            keep=self._needed,
        )
        self._workers.append(worker)
        return worker

    def _delivers(self, rank: int) -> bool:
        """Wait for those of lower ranks who count; return whether none of them has brought a model.

        The lowest rank saves it. Another one that says it has one saw the lower ones lost, or claims it.
        """
        assert self._run is not None
        members = self._run.members
        while any(
            watched.exit_code is None and other < rank and other not in members.apart - members.done
            for other, watched in members.workers.items()
        ):
            time.sleep(_LOOK)
        return not self._folder.model.exists()

    def _start_coordinator(self, config: dict[str, Any], log: BinaryIO) -> RemoteCoordinator:
        link = coordinator_machine(self._links)
        assert link is not None
        links, secrets = self._inputs.result().links, self._folder.secrets
        assignment = assigned_coordinator(self._plan.run_id, config, links, secrets / "coordinator")
        return RemoteCoordinator(
            link,
            assignment,
            log,
            self._folder.path,
            secrets,
            timeouts=self._timeouts,
            ready=self._brought[link],
            note=self._note,
        )

    def _end_workers(self) -> None:
        """Give every agent the time to hear the good-bye; where that fails, its lease ends it."""
        for worker in self._workers:
            if not worker.ended:
                worker.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.wait(_END_PATIENCE)

    def _tell_who_is_missing(self) -> None:
        """Say it in the run's own log when the start takes long."""
        while not self._ended.wait(_START_WARNING) and not self._start_watch.begun:
            for message in self._start_watch.missing():
                self._note(WarningEvent(message=message))


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def supervise_folder(path: Path) -> ExitCode:
    """Supervise the run in ``path`` and leave in it how it ended."""
    folder = RunFolder.take_over(path)
    with folder:
        try:
            hosts = load_hosts(path / RUN_HOSTS)
            links = [link_to(machine, hosts) for machine in hosts.machines]
            return ExitCode(Supervisor(folder, links, hosts.ssh_config).supervise().exit_code)
        except MusterError as error:
            _leave_failure(folder, error)
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - the process boundary: whoever reads the folder must hear of it
            traceback.print_exc()
            message = f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            _leave_failure(folder, MusterError(message, f"see {path / 'logs' / 'supervisor.log'}"))
            return ExitCode.RUN_FAILED


def _leave_failure(folder: RunFolder, error: MusterError) -> None:
    with contextlib.suppress(MusterError):
        folder.append(ErrorEvent.of(error))
        write_end(folder, folder.append, "failed", error.exit_code, error.message)


def main() -> int:
    path = told_run()
    if path is None:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: leave_request(path, "stop"))
    awake = keep_awake()
    try:
        return int(supervise_folder(path))
    finally:
        if awake is not None:
            awake.kill()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of lost connections must not delay the end
