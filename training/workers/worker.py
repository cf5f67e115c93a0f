"""Process entry of one worker: ``python -m training.workers.worker --plan PLAN --rank 0 --run-dir DIR --secrets DIR``.

Standard input: one JSON object a line. The first is a :class:`Rendezvous`, all further ones are
:class:`training.run.orders.Command`; its end means that the worker is no longer supervised.
Standard output: events. Standard error: the log. Exit codes: :class:`profiles.errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, NoReturn, TextIO

import psutil

from profiles.errors import ExitCode, MusterError, OthersLost, RunFailed
from profiles.quantities import machine_text
from training.layouts.inside.checks import INSIDE_LAYOUTS
from training.loop.train_member import RESUME, prepared, run_to_exit_code, train
from training.records.bounded_fields import LONGEST_LINE
from training.records.event_log import EventSink
from training.records.events import (
    WAITS_FOR_ENGINE,
    ElectionEvent,
    Emit,
    ErrorEvent,
    Event,
    MemberEvent,
    RequestEvent,
    StepEvent,
    WarningEvent,
)
from training.records.plan import DevicePlan, MemberPlan, RunPlan, read_plan
from training.run.orders import Command, Control
from training.run.processes import PhaseTimer

if TYPE_CHECKING:
    import torch

    from training.exchange.base import Exchange
    from training.exchange.group.election import Successor
    from training.exchange.group.join_config import Allegiance
    from training.layouts.base import Layout
    from training.tasks.base import Task

START_DEADLINE = 3600.0
"""Seconds to wait for the other members; the supervisor watches their processes meanwhile."""


class Rendezvous(NamedTuple):
    """Where a worker meets others; ``host:port``, empty where there is none."""

    address: str
    """Of the coordinator through which it exchanges with other members."""
    relay: str = ""
    store: str = ""
    """Of the store where the ranks of a launched script, or the devices of a member, meet."""
    term: int = 0
    carrier: int = 0
    """Of a coordinator that the members have elected: its term, and the rank on whose machine it is; 0: of the run."""
    meeting: int = 0
    """How often the devices of its member have met before."""


def read_rendezvous(lines: BinaryIO, on_command: Callable[[Command], None]) -> Rendezvous:
    """Wait for the addresses; commands may come first, as a lease can end while a worker starts.

    Raises:
        RunFailed: the input is closed.
    """
    while line := lines.readline(LONGEST_LINE):
        message = json.loads(line)
        if "command" not in message:
            return Rendezvous(**message)
        on_command(Command.model_validate(message))
    raise RunFailed("the process that started this worker is gone")


def connect(
    plan: RunPlan, rank: int, rendezvous: Callable[[], Rendezvous], secrets: Path, device: torch.device, emit: Emit,
    allegiance: Allegiance | None = None,
) -> Exchange:  # fmt: skip
    """Join the group of the run through the engine of its plan.

    Args:
        rendezvous: returns the present addresses.
        allegiance: the coordinator that the members have elected, if this one joins again.
    """
    if plan.world_size == 1:
        from training.exchange.base import SoloExchange

        return SoloExchange()
    process, keys = plan.process(rank), secrets / f"member-{rank}"
    from training.exchange.group.join_config import Allegiance, JoinConfig
    from training.workers.stand_in import StandInProcess

    member, workers = process.member, plan.processes
    addresses = rendezvous()
    near, everywhere = "127.0.0.1", "::" if addresses.address.startswith("[") else "0.0.0.0"
    joining = JoinConfig(
        addresses.address,
        keys,
        plan.run_id,
        rank,
        sum(worker.member.rank < plan.world_size for worker in workers),
        process.name,
        listen=near if all(plan.is_local(worker) for worker in workers) else everywhere,
        hosts=process.device.addresses,
        shards={worker.rank: worker.member.shard for worker in workers if worker.member.rank < plan.world_size},
        local=plan.is_local(process),
        interface=process.device.interface,
        rendezvous=lambda: rendezvous()[:2],
        on_unreachable=lambda address, why, carrier: emit(_unreached(plan, rank, address, why, carrier)),
        transport=plan.profile.strategy.transport,
        on_return=lambda: emit(MemberEvent(status="joined", name=member.name, message="is back")),
        stand_in=StandInProcess(plan, rank, secrets, everywhere, emit) if plan.elects else None,
        allegiance=allegiance or Allegiance(),
        on_election=lambda successor: emit(_election(plan, rank, successor)),
    )
    if plan.engine == "nccl":
        from training.exchange.stock_torch.torch_mean import TorchMember

        mesh: MeshMember = TorchMember(joining, device, lambda line: emit(WarningEvent(message=line)))
    else:
        from training.exchange.mean.mesh_member import MeshMember

        mesh = MeshMember(joining)
    mesh.join(START_DEADLINE)
    if not plan.is_staged:
        return mesh
    from training.layouts.columns import ColumnExchange
    from training.run.meeting_point import columns_of

    return ColumnExchange(mesh, columns_of(plan)[process.device_number])


def _unreached(plan: RunPlan, rank: int, address: str, why: str, carrier: int | None) -> WarningEvent:
    """Return the event of a member that cannot reach the coordinator; ``carrier``: the rank that carries it now."""
    names = [process.name for process in plan.processes]
    there = plan.coordinator if carrier is None or carrier >= len(names) else names[carrier]
    holder = f"{machine_text(there) if there else 'the computer that started the run'}, which holds the run together"
    firewall = f"the firewall of {machine_text(there)}" if there else "that computer's firewall"
    hint = f"if that lasts, let {firewall} accept connections to Python"
    message = f"{machine_text(names[rank])} cannot reach {holder} ({why}); {hint}"
    return WarningEvent(message=message, unreached=address)


def _election(plan: RunPlan, rank: int, successor: Successor) -> ElectionEvent:
    """Return the event of a member that follows another coordinator."""
    names, carrier = [process.name for process in plan.processes], successor.carrier
    there = names[carrier] if carrier < len(names) else f"rank {carrier}"
    there = "" if rank == carrier else there
    return ElectionEvent(name=names[rank], carrier=there, term=successor.term, port=successor.port)


def _allegiance_to(rendezvous: Rendezvous) -> Allegiance:
    """Return whom a member follows that joins when the others have elected a coordinator."""
    from training.exchange.group.election import Successor
    from training.exchange.group.join_config import Allegiance, parse_endpoint

    if not rendezvous.term:
        return Allegiance()
    host, port = parse_endpoint(rendezvous.address)
    successor = Successor(rendezvous.term, rendezvous.carrier, port)
    return Allegiance(successor, [host], successor)


def listen_address(device: DevicePlan) -> str:
    """Return the literal address on which the process of a device listens, and is dialled by those of other machines:
    that of its interface, if it names one.

    Raises:
        RunFailed: the configured interface does not exist, or has no address.
    """
    interface = device.interface
    if not interface:
        return device.addresses[0] if device.addresses else "127.0.0.1"
    interfaces, families = psutil.net_if_addrs(), (socket.AF_INET, socket.AF_INET6)
    addresses = sorted(
        (entry.family, entry.address) for entry in interfaces.get(interface, ()) if entry.family in families
    )
    for _, address in addresses:
        if not address.startswith("fe80"):
            return str(address)
    available_names = ", ".join(sorted(interfaces))
    raise RunFailed(f"no address on interface '{interface}' of the hosts file; this machine has: {available_names}")


def join_devices(plan: RunPlan, rank: int, rendezvous: Rendezvous, secrets: Path, torch_device: torch.device) -> Layout:
    """Connect with the other devices of this process's member; return what this one holds of the model.

    Args:
        rendezvous: the run's store, and the relay for machines that cannot dial one another.
        torch_device: that of this process.

    Raises:
        MusterError: another device is missing, or this one cannot listen.
    """
    from training.exchange.base import STANDSTILL
    from training.exchange.links.listener import ConnectTimeouts, Identity, Listener
    from training.exchange.torch_backend.process_group import MusterGroup
    from training.exchange.torch_backend.store_client import StoreClient
    from training.exchange.torch_backend.store_server import read_token
    from training.layouts.carrier import GroupCarrier
    from training.layouts.staged import StagedModel

    keys, process = secrets / f"member-{rank}", plan.process(rank)
    member, ranks = process.member, plan.processes_of(process.member.rank)
    names = ",".join(worker.name for worker in plan.processes)
    os.environ |= {"MUSTER_NAMES": names, "MUSTER_RELAY": rendezvous.relay}  # the group's, and its messages'
    meeting = f"member-{member.rank}/{rendezvous.meeting}/"
    client = StoreClient(rendezvous.store, read_token(keys), START_DEADLINE, meeting)
    if plan.profile.run.layout in INSIDE_LAYOUTS:
        from training.layouts.inside.sharded import ShardedModel
        from training.layouts.inside.tensor_parallel import TensorParallelModel
        from training.layouts.inside.world import join_world

        processes = [worker.name for worker in plan.processes]
        layout = TensorParallelModel if plan.profile.run.layout == "tensor" else ShardedModel
        listen = listen_address(process.device) if len(member.machines) > 1 else ""
        return layout(join_world(client, rank, processes, torch_device, plan.run_id, keys, listen), member.batch_size)
    watched = ConnectTimeouts(is_watched=True)  # no device goes on without the others
    listener = Listener(listen_address(process.device), Identity(plan.run_id, rank, keys), timeouts=watched)
    stages = [plan.process(other).name for other in ranks]

    def carrier() -> GroupCarrier:
        seconds = timedelta(seconds=STANDSTILL)
        group = MusterGroup(client, process.device_number, len(ranks), seconds, ranks, listener)
        return GroupCarrier(group, range(len(ranks)), stages, client.close)

    links = carrier(), carrier() if len(member.machines) > 1 else None
    return StagedModel(links[0], member.devices, member.batch_size, plan.own_folders, links[1])


def run_worker(
    plan: RunPlan,
    rank: int,
    task: Task,
    address: Callable[[], Rendezvous],
    run_dir: Path,
    secrets: Path,
    emit: Emit,
    control: Control,
) -> ExitCode:
    """Prepare, join, train, leave; every failure becomes one ``error`` event.

    ``address`` blocks until the meeting point is known; it is called when the data are ready.
    """
    name = plan.process(rank).name

    def trained() -> ExitCode:
        with prepared(plan, rank, task, secrets, emit) as (device, giving_way):
            initial = address()

            def rendezvous() -> Rendezvous:
                return initial if control.rendezvous is None else Rendezvous(*control.rendezvous)

            allegiance = _allegiance_to(initial)
            allegiance.readmitted, allegiance.banned = control.readmitted, control.banned

            def join() -> Exchange:
                with _naming_lost(name):
                    return connect(plan, rank, rendezvous, secrets, device, emit, allegiance)

            def layout() -> Layout | None:
                with _naming_lost(name):
                    return join_devices(plan, rank, initial, secrets, device) if plan.is_staged else None

            return train(plan, rank, task, join, run_dir, emit, control, layout, giving_way)

    emit(MemberEvent(status="started", name=name, message=f"pid {os.getpid()}"))
    return run_to_exit_code(trained, name, emit)


@contextlib.contextmanager
def _naming_lost(name: str) -> Iterator[None]:
    """Name the worker that does not find the others, which may join them again."""
    from training.exchange.base import ExchangeError

    try:
        yield
    except ExchangeError as error:
        raise OthersLost(str(error), RESUME, machine=name) from error


def take_over_stdout() -> TextIO:
    """Keep the real standard output for events; output of libraries goes to the log."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def worker_arguments(module: str) -> argparse.Namespace:
    """Return the arguments of a worker."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="One worker of a run.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--secrets", type=Path, required=True)
    return parser.parse_args()


def main(make_task: Callable[[RunPlan, Path], Task] | None = None, module: str = "training.workers.worker") -> int:
    """Run one worker.

    Args:
        make_task: makes the task of a plan, given the run's private folder; default: the task that the plan names.
        module: name of the module that this process runs.
    """
    arguments = worker_arguments(module)
    # Ctrl-C in a terminal reaches the whole process group; only the process that started the run acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    emit = EventSink(take_over_stdout(), arguments.rank)

    def expected(member: MemberPlan) -> None:  # this member knows of another one from now on
        emit(RequestEvent(request="expect", action="expect", machine=member.name, outcome="done"))

    phases, control = PhaseTimer(emit), Control(expected, emit)
    gc.disable()  # a fifth of the seconds that torch and transformers take to import goes into looking for garbage
    signal.signal(signal.SIGTERM, lambda *_: control.post(Command(command="stop", reason="terminated")))
    try:
        plan = read_plan(arguments.plan)
        from training.tasks.base import GroupPosition  # imports torch
        from training.tasks.registry import task_from_profile

        def task_of(rank: int) -> Task:
            member = plan.process(rank).member.rank
            profile = plan.profile_of(member)
            member_task = make_task(plan, arguments.secrets) if make_task else task_from_profile(profile)
            member_task.group_position = GroupPosition(member, len(plan.all_members))
            return member_task

        task = task_of(arguments.rank)
        from training.loop import trainer  # noqa: F401 - here, so that the time of its imports is counted as such
    except MusterError as error:
        emit(ErrorEvent.of(error))
        return int(error.exit_code)

    gc.freeze()  # imported objects stay: later garbage collections skip them
    gc.enable()
    phases.end("worker: imports")

    def address() -> Rendezvous:
        phases.end("worker: data")
        rendezvous = read_rendezvous(sys.stdin.buffer, control.post)
        phases.end(WAITS_FOR_ENGINE)
        control.read_from(sys.stdin.buffer, lambda message: print(message, file=sys.stderr))
        return rendezvous

    if plan.engine == "simulated":
        from training.simulated.members import run_members

        def of(rank: int) -> Task:
            return task_of(rank) if rank else task

        return int(run_members(plan, of, arguments.run_dir, arguments.secrets, emit, sys.stdin.buffer))
    timed = _timed(emit, phases)
    return int(run_worker(plan, arguments.rank, task, address, arguments.run_dir, arguments.secrets, timed, control))


def _timed(emit: Emit, phases: PhaseTimer) -> Emit:
    """Add the phases of the start that the events mark."""
    begun = False

    def timed(event: Event) -> None:
        nonlocal begun
        emit(event)
        if isinstance(event, MemberEvent) and event.status == "ready":
            phases.end("worker: joins, builds the model")
        elif isinstance(event, StepEvent) and not begun:
            begun = True
            phases.end("worker: first step")

    return timed


def leave(code: int) -> NoReturn:
    """End this process: threads that wait must not delay it once everything is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
