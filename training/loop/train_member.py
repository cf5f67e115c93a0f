"""Training as one member of a run, in a process of its own or beside others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from profiles.errors import BadInput, ExitCode, MusterError, OthersLost
from training.records.events import Emit, ErrorEvent, MemberEvent, ProgressEvent, WarningEvent
from training.records.plan import RunPlan
from training.run.orders import Control
from training.tasks.published_models import watch_download

if TYPE_CHECKING:
    import torch

    from training.exchange.base import Exchange
    from training.hardware.giving_way import GivingWay
    from training.layouts.base import Layout
    from training.tasks.base import Task

RESUME = "resume the run from its newest snapshot"


@contextmanager
def prepared(
    plan: RunPlan, rank: int, task: Task, secrets: Path, emit: Emit
) -> Iterator[tuple[torch.device, GivingWay]]:
    """Prepare this process and the data for a member's training; report the load of the machine meanwhile, and yield
    what it computes on and how it gives way by that load."""
    import torch

    from training.hardware.device import select_device
    from training.hardware.giving_way import GivingWay, lower_priority
    from training.hardware.machine_load import machine_events
    from training.hardware.resources import threads

    device_plan, giving_way = plan.process(rank).device, GivingWay(plan.process(rank).name, emit)
    is_polite = plan.profile.run.be_polite or device_plan.be_polite
    if is_polite:
        lower_priority()
    torch.set_num_threads(threads(device_plan.threads, torch.get_num_threads()))
    device = task.device = select_device(device_plan.kind, device_plan.index)
    report = (lambda event: emit(giving_way.note(event))) if is_polite else emit
    with machine_events(report, device, secrets, run_id=plan.run_id):
        prepare_data(plan, rank, task, emit)
        yield device, giving_way


def prepare_data(plan: RunPlan, rank: int, task: Task, emit: Emit) -> None:
    """Prepare a member's data, and report progress and remarks.

    Raises:
        BadInput: they cannot be used; the message names the member if each has its own.
    """
    from training.tasks.base import throttled

    name = plan.profile.model.model_path
    watch_download(name, lambda done: emit(ProgressEvent(phase=f"bytes downloading {name}", done=done)))
    try:
        task.prepare(throttled(lambda phase, done, total: emit(ProgressEvent(phase=phase, done=done, total=total))))
    except BadInput as error:
        if not plan.profile.data.local_data:
            raise
        raise BadInput(f"{plan.process(rank).name}: {error.message}", error.hint) from error
    if rank == 0 or plan.profile.data.local_data:  # else all members have the same remarks
        for remark in task.remarks:
            emit(WarningEvent(message=remark))


def train(
    plan: RunPlan,
    rank: int,
    task: Task,
    join: Callable[[], Exchange],
    run_dir: Path,
    emit: Emit,
    control: Control,
    layout: Callable[[], Layout | None] = lambda: None,
    giving_way: GivingWay | None = None,
) -> ExitCode:
    """Train as one member, which joins again if the others went on without it. A device of several does not: the others
    of its member wait for it in the middle of a step, and see at once that it ends.

    Args:
        rank: of this process.
        layout: returns what this process holds of the model, see :class:`training.loop.trainer.Trainer`.
        giving_way: how it gives way to the owner of its machine; default: never.

    Raises:
        MusterError: the training failed.
    """
    from training.exchange.base import ExchangeDropped, ExchangeError
    from training.loop.uneven_trainer import trainer_class

    name, trainer = plan.process(rank).name, trainer_class(plan)
    while True:
        exchange = join()
        member = trainer(plan, rank, task, exchange, emit, control, run_dir, layout())
        member.giving_way = giving_way or member.giving_way
        control.serve(exchange)
        try:
            ending = member.run()
            member.layout.close()
            return ending
        except ExchangeDropped as error:
            if plan.is_staged:
                raise OthersLost(str(error), RESUME, machine=name) from error
            emit(WarningEvent(message=f"{name}: {error}; it joins the others again"))
        except ExchangeError as error:
            alone = not exchange.shares_process  # else it is the failure of another member, whose turn it may be
            keeps = alone and (control.stop_reason or not plan.is_staged)  # a lost stage takes its part of it along
            if keeps and member.keep_last_step() and (reason := control.stop_reason):
                emit(MemberEvent(status="left", name=name, message=reason))
                return ExitCode.STOPPED
            raise OthersLost(str(error), RESUME, machine=name) from error
        finally:
            exchange.close()


def run_to_exit_code(trained: Callable[[], ExitCode], name: str, emit: Emit) -> ExitCode:
    """Run a member's training and return its exit code; every failure becomes one ``error`` event."""
    try:
        ending = trained()
    except MusterError as error:
        emit(ErrorEvent.of(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever it is, the run must hear of it
        traceback.print_exc()
        line = " ".join(str(error).split()) or "no message"
        message = f"{name}: {error.__class__.__name__}: {line:.500}"
        emit(ErrorEvent(message=message, hint=f"the traceback is in the log of {name}", machine=name))
        return ExitCode.RUN_FAILED
    if ending is ExitCode.DONE:
        emit(MemberEvent(status="done", name=name))
    return ending
