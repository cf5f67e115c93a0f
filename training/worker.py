"""Process entry of one worker: ``python -m training.worker --plan plan.json --rank 0 --run-dir DIR --secrets DIR``.

Standard input: one JSON object a line. The first is a :class:`Meeting`, all further ones are
:class:`training.orders.Command`; its end means that nobody watches the worker any more.
Standard output: events. Standard error: the log. Exit codes: :class:`profiles.errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from profiles.errors import ExitCode, MusterError, RunFailed
from training.events import (
    ErrorEvent,
    Event,
    EventSink,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    StepEvent,
    WarningEvent,
)
from training.orders import Command, Control
from training.plan import MemberPlan, RunPlan, read_plan
from training.processes import Laps

if TYPE_CHECKING:
    import torch

    from training.exchange.base import Exchange
    from training.tasks.base import Task

START_DEADLINE = 3600.0
"""Seconds to wait for the other members; whoever started the run watches their processes meanwhile."""

Emit = Callable[[Event], None]


class Meeting(NamedTuple):
    """Where members meet: ``host:port`` of the coordinator, or of the store of nccl, and of the relay."""

    address: str
    relay: str = ""


def connect(plan: RunPlan, rank: int, where: Meeting, secrets: Path, device: torch.device, emit: Emit) -> Exchange:
    """Join the group of the run through the engine of its plan."""
    if plan.world_size == 1:
        from training.exchange.base import SoloExchange

        return SoloExchange()
    seat, keys = plan.seats[rank], secrets / f"member-{rank}"
    if plan.engine == "nccl":
        from training.exchange.store_server import read_token
        from training.exchange.torch_group import TorchGroup

        token = read_token(keys)
        beside = [one.rank for one in plan.members if one.local] if seat.local else []
        return TorchGroup(
            where.address, token, rank, plan.world_size, device, seat.interface, START_DEADLINE, plan.run_id, beside
        )
    from training.exchange.mesh_member import MeshMember

    near, everywhere = "127.0.0.1", "::" if where.address.startswith("[") else "0.0.0.0"
    return MeshMember.connect(
        where.address,
        keys,
        plan.run_id,
        rank,
        plan.world_size,
        seat.name,
        listen=near if all(one.local for one in plan.seats) else everywhere,
        hosts=seat.addresses,
        shares={one.rank: one.share for one in plan.members},
        local=seat.local,
        interface=seat.interface,
        relay=where.relay,
        came_back=lambda: emit(MemberEvent(status="joined", name=seat.name, message="is back")),
        timeout=START_DEADLINE,
    )


def run_worker(
    plan: RunPlan,
    rank: int,
    task: Task,
    address: Callable[[], Meeting],
    run_dir: Path,
    secrets: Path,
    emit: Emit,
    control: Control,
) -> ExitCode:
    """Prepare, join, train, leave; every failure becomes one ``error`` event.

    ``address`` blocks until it is known where to meet; it is called when the data are ready.
    """
    import torch

    from training.device import select_device
    from training.exchange.base import ExchangeDropped, ExchangeError
    from training.machine_load import machine_events
    from training.resources import threads
    from training.trainer import Ending, Trainer

    member = plan.seats[rank]
    emit(MemberEvent(status="started", name=member.name, message=f"pid {os.getpid()}"))
    try:
        torch.set_num_threads(threads(member.threads, torch.get_num_threads()))
        device = task.device = select_device(member.device, member.device_index)
        with machine_events(emit, device, secrets, run_id=plan.run_id):
            task.prepare(lambda phase, done, total: emit(ProgressEvent(phase=phase, done=done, total=total)))
            where = address()
            ending: Ending | None = None
            while ending is None:
                exchange = connect(plan, rank, where, secrets, device, emit)
                try:
                    ending = Trainer(plan, rank, task, exchange, emit, control, run_dir).run()
                except ExchangeDropped as error:
                    emit(WarningEvent(message=f"{member.name}: {error}; it joins the others again"))
                except ExchangeError as error:
                    raise RunFailed(f"{member.name}: {error}", "resume the run from its newest snapshot") from error
                finally:
                    exchange.close()
    except MusterError as error:
        emit(ErrorEvent(message=error.message, hint=error.hint, exit_code=int(error.exit_code)))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever it is, the run must hear of it
        traceback.print_exc()
        line = " ".join(str(error).split()) or "no message"
        message = f"{member.name}: {error.__class__.__name__}: {line:.500}"
        emit(ErrorEvent(message=message, hint=f"the traceback is in the log of {member.name}"))
        return ExitCode.RUN_FAILED
    if ending is Ending.FINISHED:
        emit(MemberEvent(status="done", name=member.name))
    return ExitCode.DONE if ending is Ending.FINISHED else ExitCode.STOPPED


def commands_to(emit: Emit) -> Control:
    """Return what takes the commands to a worker, and gives its answers to ``emit``."""

    def expected(member: MemberPlan) -> None:  # this member counts on another one from now on
        emit(RequestEvent(request="expect", action="expect", machine=member.name, outcome="done"))

    return Control(expected, emit)


def take_over_stdout() -> TextIO:
    """Keep the real standard output for events; whatever libraries print goes to the log."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def worker_arguments(module: str) -> argparse.Namespace:
    """Return what a worker is started with."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="One worker of a run.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--secrets", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    """Run one worker."""
    arguments = worker_arguments("training.worker")
    # Ctrl-C in a terminal reaches the whole process group; only the process that started the run acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    emit = EventSink(take_over_stdout(), arguments.rank)
    laps, control = Laps(emit), commands_to(emit)
    gc.disable()  # a fifth of the seconds that torch and transformers take to import goes into looking for garbage
    signal.signal(signal.SIGTERM, lambda *_: control.post(Command(command="stop", reason="terminated")))
    try:
        plan = read_plan(arguments.plan)
        from training.tasks.registry import task_from_profile  # imports torch

        task = task_from_profile(plan.profile)
        from training import trainer  # noqa: F401 - here, so that the time of its imports is counted as such
    except MusterError as error:
        emit(ErrorEvent(message=error.message, hint=error.hint, exit_code=int(error.exit_code)))
        return int(error.exit_code)

    gc.freeze()  # what was imported stays: later searches for garbage pass over it
    gc.enable()
    laps.end("worker: imports")

    def address() -> Meeting:
        laps.end("worker: data")
        found = Meeting(**json.loads(sys.stdin.buffer.readline()))
        laps.end("worker: waits for the engine")
        control.read_from(sys.stdin.buffer, lambda message: print(message, file=sys.stderr))
        return found

    timed = _timed(emit, laps)
    return int(run_worker(plan, arguments.rank, task, address, arguments.run_dir, arguments.secrets, timed, control))


def _timed(emit: Emit, laps: Laps) -> Emit:
    """Add the parts of the start that can be told from the events."""
    begun = False

    def timed(event: Event) -> None:
        nonlocal begun
        emit(event)
        if isinstance(event, MemberEvent) and event.status == "ready":
            laps.end("worker: joins, builds the model")
        elif isinstance(event, StepEvent) and not begun:
            begun = True
            laps.end("worker: first step")

    return timed


if __name__ == "__main__":
    # Threads of gRPC and of the interpreter must not delay the exit once everything is written.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
