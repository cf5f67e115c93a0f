"""The supervision of one distributed run, from the first connection to the last.

It sends code and data to the machines, starts the engine here and the workers there, merges their events into the run
folder, carries out the requests left in ``requests/``, and outlives the terminal. Views of the run read the folder.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from distributed.hosts.schema import Hosts, Machine, requested_machine
from distributed.machine.link import Dial, MachineLink, link_to
from distributed.planning.feedback import prediction_metrics
from distributed.preparation.code_sync import Inputs, collect
from distributed.preparation.members import starter_of
from distributed.preparation.model_blocks import BlockInputs, blocks_of_stages
from distributed.preparation.prepare import PrepareOptions, prepare
from distributed.preparation.transfer import send_trees
from distributed.resuming import covered_step, held_parts, recut
from distributed.run.cut_off import CutOff
from distributed.run.lasting_run import LastingRun
from distributed.run.machine_stages import MachineStages
from distributed.run.returning_run import ReturningRun
from distributed.run.run_machines import (
    MachineRoute,
    StartWatch,
    can_reach,
    check_newcomer,
    ensure_reachable,
    links_of,
    listening_address,
    record_added_machine,
)
from distributed.workers.agent_records import AgentTimeouts, Assignment, assigned, assigned_coordinator
from distributed.workers.remote_coordinator import RemoteCoordinator
from distributed.workers.remote_worker import RemoteWorker
from profiles.errors import BadInput
from training.records.events import ENGINE, Event, ProgressEvent, SyncEvent, WarningEvent
from training.records.launched_script import LAUNCHED_FILES
from training.records.plan import DevicePlan, MemberPlan, RunPlan
from training.records.run_folder import RunFolder
from training.run.outcome import RunOutcome
from training.run.processes import PhaseTimer
from training.run.requests.request_book import Request
from training.run.requests.request_server import RequestServer
from training.run.run_controller import RunController

_START_WARNING = 30.0
"""Seconds between two warnings about missing members during the start."""
_END_TIMEOUT = 10.0
_POLL = 0.05


class Supervisor:
    """Drives one run from the first connection to the last.

    Args:
        folder: run folder, locked by this process.
        ssh_config: SSH configuration of the hosts file, for machines added later.
        dial: returns the link to such a machine.
        leave: ends this process, since its members may carry the run on and cannot be reached.
    """

    def __init__(
        self,
        folder: RunFolder,
        links: Sequence[MachineLink],
        ssh_config: str = "",
        dial: Dial = link_to,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._note = folder.append
        plan = folder.plan().model_copy(update={"added": folder.added_members()})
        self._links = links_of(plan, links)
        """By the machines' names, those that were added later included."""
        self._plan = plan = plan.without_absent_coordinator(starter_of(self._links.values()))
        present = [name for member in plan.members if member.rank not in plan.absent for name in member.machines]
        self._present = list(dict.fromkeys(present))
        """Names of the machines that take part from the start."""
        coordinator = self._links.get(plan.coordinator) if plan.has_coordinator else None
        self._coordinator_link = coordinator if coordinator and not coordinator.machine.is_local else None
        """The machine of the coordinator, if it is not this one."""
        self._ssh_config, self._dial = ssh_config, dial
        self._run: RunController | None = None
        self._timeouts = AgentTimeouts(lease=self._plan.profile.run.lease)
        self._requests: RequestServer | None = None
        self._workers: list[RemoteWorker] = []
        self._coordinator: RemoteCoordinator | None = None
        self._cut_off = CutOff(lambda message: self._note(WarningEvent(message=message)), leave)
        self._warned = set[str]()
        """What was said of attempts to go on without a machine."""
        self._keep_files: Future[bool] = Future()
        """Whether the files on the machines are needed after the end, to resume the run."""
        self._ended = threading.Event()
        self._inputs: Future[Inputs] = Future()
        self._block_inputs = BlockInputs(plan.profile, folder.path / "blocks", blocks_of_stages(plan))
        self._trees: dict[str, dict[str, str]] = defaultdict(dict)
        """Folders of the trees on each machine, by their path under a worker's folder; known when it is prepared."""
        self._prepared: dict[str, Future[None]] = {}
        self._prepared_count = 0
        self._lock = threading.Lock()
        self._start_watch = StartWatch([member.name for member in self._plan.members], self._plan.absent)

    def supervise(self, takes_over: bool = False) -> RunOutcome:
        """Drive the run to its end and return the outcome.

        Args:
            takes_over: go on with a run that trains, in the place of a supervisor that was killed.

        Raises:
            MusterError: it could not begin, or its folder cannot be written.
        """
        phases = PhaseTimer(self._note)
        phases.end("supervisor: program")
        pool = ThreadPoolExecutor(len(self._present) + 1)
        try:
            self._inputs = pool.submit(collect, self._plan)
            if takes_over:
                self._start_watch.begun = True
                self._prepared = {name: _done() for name in self._links}
            else:
                threading.Thread(target=self._report_missing_members, daemon=True).start()
                self._prepared = {name: pool.submit(self._prepare, self._links[name]) for name in self._present}
                self._inputs.result()
                phases.end("supervisor: hashes")
            self._run = run = self._kind_of_run()(
                self._plan,
                self._folder,
                self._watch,
                self._worker,
                listen="0.0.0.0" if self._coordinator_link else listening_address(list(self._links.values())),
                more_metrics=lambda: prediction_metrics(self._folder),
                start_coordinator=self._start_coordinator if self._coordinator_link else None,
            )
            self._requests = RequestServer(run, self._folder.path, self._note, self)
            if takes_over:
                run.take_over(self._adopt)
                self._requests.take_over(self._folder.events())
            else:
                run.start()
            phases.end(ENGINE)
            self._requests.open()  # earlier requests have waited for a run to act on
            outcome = run.wait()
            self._keep_files.set_result(outcome.status != "completed" and self._plan.launch is None)
            return outcome
        finally:
            pool.shutdown(wait=False)
            self._ended.set()
            if not self._keep_files.done():
                self._keep_files.set_result(True)
            if self._requests is not None:
                self._requests.close()
            self._end_workers()
            self._block_inputs.close()
            for link in self._links.values():
                link.close()

    def _kind_of_run(self) -> Callable[..., RunController]:
        if self._plan.is_staged and self._plan.world_size == 1:
            return partial(LastingRun, go_on=self._go_on_without, is_back=self._is_back)
        returning = partial(ReturningRun, take_back=self._take_back, is_back=self._is_back)
        return returning if self._plan.launch is None else RunController

    def _prepare(self, link: MachineLink) -> None:
        """Send agent, code and data to one machine; its workers then start independently of the other machines."""
        phases = PhaseTimer(self._note, whole_process=False)
        self._send_files(link, lambda: phases.end("machine: connected"))
        phases.end("machine: code and data")
        with self._lock:
            self._prepared_count += 1
            self._note(ProgressEvent(phase="machines", done=self._prepared_count, total=len(self._present)))
            if self._prepared_count == len(self._present):
                self._block_inputs.close()

    def _watch(self, event: Event) -> None:
        self._start_watch(event)
        for worker in self._workers if isinstance(event, SyncEvent) else ():
            if worker.assignment.rank == event.member and worker.is_connected and not worker.ended:
                self._cut_off.note_sync(worker.attached)
        if self._requests is not None:
            self._requests(event)

    # ------------------------------------------------------------------------------------- joining and leaving machines

    @property
    def _current_plan(self) -> RunPlan:
        """The plan with the members that were added later."""
        return self._plan if self._run is None else self._run.members.plan

    def ranks(self, machine: str) -> tuple[int, ...]:
        if not (ranks := self._current_plan.ranks_of(machine)):
            raise BadInput(f"{machine} is not a machine of this run", f"it has: {', '.join(self._links)}")
        return ranks

    def prepare(self, request: Request) -> tuple[int, ...]:
        entry = requested_machine(request.entry) if request.entry else None
        if entry is not None and entry.name not in self._links:
            return self._add_machine(entry)
        ranks = self.ranks(request.machine if entry is None else entry.name)
        for name in dict.fromkeys(name for rank in ranks for name in self._current_plan.all_members[rank].machines):
            link = self._links[name]
            if address := ensure_reachable(link, self._ssh_config, self._folder.path, dial=self._dial):
                self._note(WarningEvent(message=f"{link.name}: found at {address} by its host key"))
            self._send_files(link)
            self._prepared.setdefault(link.name, _done())
        return ranks

    def _send_files(self, link: MachineLink, see_connected: Callable[[], None] = lambda: None) -> None:
        """Send agent and missing inputs; the worker starts next."""
        ranks = self.ranks(link.name) if link.name in self._links else ()
        stages = MachineStages(link, ranks, (self._start_watch, self._note))
        stages.connecting()
        link.put_agent()
        see_connected()
        stages.reading_files()
        inputs = self._block_inputs.of(link, self._inputs.result())
        self._trees[link.name] |= inputs.links
        send_trees(link, inputs.trees.values(), stages.sent)
        stages.loading_program()

    def _add_machine(self, entry: Machine) -> tuple[int, ...]:
        """Add a machine that is not in the plan; return the ranks of its members."""
        assert self._run is not None
        self._run.members.check_extendable()
        plan, required_bytes = self._run.members.plan, self._inputs.result().bytes
        participants = dict.fromkeys(plan.all_members[rank].machine for rank in self._run.members.active_ranks)
        compared = [self._links[name] for name in participants]
        link, members = check_newcomer(entry, compared, self._ssh_config, plan, required_bytes, self._dial)
        try:
            record_added_machine(self._folder.path, entry)  # first: a clean-up finds what was sent
            self._send_files(link)
            self._prepared[link.name] = _done()
            for member in members:
                self._run.expect(member)
                self._links[link.name] = link
        finally:
            if link.name not in self._links:
                link.close()
        return tuple(member.rank for member in members)

    def _worker(self, rank: int, log: BinaryIO) -> RemoteWorker:
        assert self._run is not None
        inputs = self._inputs.result()
        plan = inputs.plan.model_copy(update={"added": self._run.members.plan.added})
        process = plan.process(rank)
        links = self._trees[process.device.machine] if plan.is_staged else inputs.links
        assignment = assigned(plan, links, rank, process.device.threads)
        if plan.launch is not None:
            brings = LAUNCHED_FILES if rank == 0 else ""
            assignment = replace(assignment, module="training.workers.script_worker", brings=brings, resumes=False)
        elif not process.is_lead:
            assignment = replace(assignment, brings="")
        return self._attached(process.device, assignment, log)

    def _adopt(self, rank: int, log: BinaryIO, *, line: int) -> RemoteWorker:
        """Return the worker that a killed supervisor had started, to go on after its ``line``."""
        return self._attached(self._plan.process(rank).device, Assignment(self._plan.run_id, rank, b"", {}), log, line)

    def _attached(
        self, device: DevicePlan, assignment: Assignment, log: BinaryIO, adopted: int | None = None
    ) -> RemoteWorker:
        link = self._links[device.machine]
        worker = RemoteWorker(
            link,
            assignment,
            log,
            self._folder.path,
            self._folder.secrets,
            self._route(link, device),
            self._timeouts,
            ready=self._prepared[link.name],
            await_model_choice=lambda: self._await_model_choice(assignment.rank),
            keep=self._keep_files,
            adopted=adopted,
            is_cut_off=self._is_cut_off if self._plan.elects else lambda: False,
        )
        self._workers.append(worker)
        return worker

    def _route(self, link: MachineLink, device: DevicePlan) -> MachineRoute:
        """Return the route of a machine to the coordinator, also to one that the members have elected."""
        if self._run is None or (elected := self._run.meeting_point.elected) is None:
            return MachineRoute(link, device, self._coordinator_link)
        there = self._links[self._current_plan.all_members[elected.rank].machine]
        measured = device.model_copy(update={"coordinator_address": ""})  # it is of the planned one
        return MachineRoute(link, measured, None if there.machine.is_local else there)

    def _is_cut_off(self) -> bool:
        """Whether the members that cannot be reached may go on as the run."""
        meeting_point, coordinator = self._run.meeting_point if self._run is not None else None, self._coordinator
        elected, decide = (meeting_point.elected, meeting_point.committed) if meeting_point else (None, None)
        active = [worker for worker in self._workers if not worker.ended] if self._start_watch.begun else []
        connected = {worker.assignment.rank: worker.is_connected for worker in active}
        counting = [rank for rank in connected if decide is None or rank in decide]
        away = sum(not connected[rank] for rank in counting)
        is_coordinator_away = (
            not connected.get(elected.rank, True) if elected else coordinator and not coordinator.is_connected
        )
        return self._cut_off.judge(away, len(counting), bool(is_coordinator_away))

    def _await_model_choice(self, rank: int) -> bool:
        """Wait for the attached members of lower rank; return whether none of them has delivered a model.

        The lowest rank saves the model. Another member that claims to have one saw the lower ranks lost, or is wrong.
        """
        assert self._run is not None
        members = self._run.members
        while any(
            watched.exit_code is None and other < rank and other not in members.detached - members.done
            for other, watched in members.workers.items()
        ):
            time.sleep(_POLL)
        return not self._folder.model.exists()

    def _go_on_without(self, lost: Sequence[str]) -> str:
        """Plan the next attempt of a run of one member without some of its machines, and without others that are not
        there; return a line about it.

        Raises:
            MusterError: the others cannot go on: the model does not fit them, or they lack a part of every snapshot.
        """
        folder, left = self._folder, [name for name in self._plan.machines if name not in lost]
        if not left:
            raise BadInput("no machine is left", "resume the run when they are back")
        hosts = Hosts(machines=tuple(self._links[name].machine for name in left), ssh_config=self._ssh_config)

        def tell(line: str) -> None:  # once, however often it is tried while a machine is away
            if line not in self._warned:
                self._warned.add(line)
                self._note(WarningEvent(message=line))

        options = PrepareOptions(tell=tell, allow_missing=True, repair=False, dial=self._dial)
        machines = prepare(hosts, self._plan.profile.model.task, options)
        links = [link for link, _ in machines]
        try:
            plan = folder.plan().model_copy(update={"resume": True, "attempt": folder.metadata.attempt + 1})
            held = held_parts(links, plan.run_id)
            folder.go_on(recut(plan, machines, held, folder.path, tell))
        finally:
            for link in links:
                link.close()
        loss, step = f"{', '.join(lost)} is lost; " if lost else "", covered_step(held)
        return f"{loss}the run goes on with {', '.join(held)} from the snapshot of step {step}"

    def _is_back(self, names: Sequence[str]) -> bool:
        """Whether one of these machines can be reached."""
        return any(can_reach(self._links[name].machine, self._ssh_config, self._dial) for name in names)

    def _take_back(self, member: MemberPlan) -> None:
        assert self._requests is not None
        self._requests.take_back(member)

    def _start_coordinator(self, config: dict[str, Any], log: BinaryIO) -> RemoteCoordinator:
        link = self._coordinator_link
        assert link is not None
        links, secrets = self._inputs.result().links, self._folder.secrets
        assignment = assigned_coordinator(self._plan.run_id, config, links, secrets / "coordinator")
        self._coordinator = RemoteCoordinator(
            link,
            assignment,
            log,
            self._folder.path,
            secrets,
            timeouts=self._timeouts,
            ready=self._prepared[link.name],
            note=self._note,
        )
        return self._coordinator

    def _end_workers(self) -> None:
        """End all workers, and wait until their agents know; an agent that cannot be reached ends with its lease."""
        for worker in self._workers:
            if not worker.ended:
                worker.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.wait(_END_TIMEOUT)

    def _report_missing_members(self) -> None:
        """Log a warning for each missing member when the start takes long."""
        while not self._ended.wait(_START_WARNING) and not self._start_watch.begun:
            for warning in self._start_watch.missing():
                self._note(warning)


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
