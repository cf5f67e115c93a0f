"""All members of a run in this process: one thread each, of which one runs at a time."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from profiles.errors import ExitCode, RunFailed
from training.exchange.base import Exchange, SoloExchange
from training.loop.train_member import prepare_data, prepared, run_to_exit_code, train
from training.numerics.randomness import seed_everything
from training.records.events import Emit, Event, MemberEvent, StepEvent
from training.records.plan import RunPlan
from training.records.run_folder import RunFolder
from training.run.orders import Command, Control
from training.simulated.baton import Baton
from training.simulated.clock import ClockedControl, RunClock, clock_of
from training.simulated.exchange import OtherMemberFailed, SimulatedExchange, SimulatedGroup
from training.tasks.own_code.streams import Stream

if TYPE_CHECKING:
    from training.tasks.base import Task


def run_members(
    plan: RunPlan,
    task_of: Callable[[int], Task],
    run_dir: Path,
    secrets: Path,
    emit: Emit,
    commands: Iterable[bytes],
) -> ExitCode:
    """Train as every member of the plan; every failure becomes one ``error`` event of its member.

    Args:
        task_of: makes the task of a rank; all share that of the first, unless each has its own data.
        emit: called with the events of all members.
        commands: lines with a JSON object each: a command, and the ``rank`` that it is for.
    """
    ranks = range(plan.world_size)
    emits: list[Emit] = [partial(_emit_as_member, emit, rank) for rank in ranks]

    def all_trained() -> ExitCode:
        task = task_of(0)
        with prepared(plan, 0, task, secrets, emits[0]) as (device, _):
            seed_everything(plan.profile.training.seed)
            model = task.build_model()
            tasks = [task] * plan.world_size
            if plan.profile.data.local_data:
                tasks = [task, *(_prepared(plan, rank, task_of(rank), device, emits[rank]) for rank in ranks[1:])]
            baton = Baton(device)
            group, controls = _group_and_controls(plan, run_dir, baton, emits)
            threading.Thread(target=_post_commands, args=(commands, controls), name="control", daemon=True).start()
            start_member = partial(_member, plan, baton, group, run_dir)
            threads = []
            for rank in ranks:
                args = cast("Task", _SharedModelTask(tasks[rank], model)), rank, emits[rank], controls[rank]
                threads.append(threading.Thread(target=start_member, args=args, name=f"member-{rank}"))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return ExitCode.STOPPED  # each member has reported how it ended

    for rank in ranks:
        emits[rank](MemberEvent(status="started", name=plan.all_members[rank].name, message=f"pid {os.getpid()}"))
    code = run_to_exit_code(all_trained, plan.all_members[0].name, emits[0])
    return ExitCode.DONE if code is ExitCode.STOPPED else code


def _group_and_controls(
    plan: RunPlan, run_dir: Path, baton: Baton, emits: list[Emit]
) -> tuple[SimulatedGroup, list[Control]]:
    """Return the members' group and controls; with a clock, their events have its time from now on.

    Raises:
        BadInput: the plan's clock cannot be used.
    """
    clock = clock_of(plan)
    if clock is None:
        return SimulatedGroup(plan.world_size, baton), [Control(answer=emit, idle=baton.lent) for emit in emits]

    def lose(rank: int) -> None:
        emits[rank](MemberEvent(status="lost", name=plan.all_members[rank].name))
        group.lose(rank)

    run_clock = RunClock(clock, plan, lambda step: _seconds_until(run_dir, step), lose)
    group = SimulatedGroup(plan.world_size, baton, run_clock.meet)
    emits[:] = [partial(_emit_in_simulated_time, run_clock, rank, emit) for rank, emit in enumerate(emits)]
    controls = [ClockedControl(run_clock, rank, answer=emit, idle=baton.lent) for rank, emit in enumerate(emits)]
    return group, [*controls]


def _emit_in_simulated_time(clock: RunClock, rank: int, emit: Emit, event: Event) -> None:
    emit(clock.in_simulated_time(rank, event))


def _seconds_until(run_dir: Path, step: int) -> float:
    """Return the simulated time after a step of an earlier attempt."""
    events = RunFolder.open(run_dir).events()
    return max(event.clock or 0.0 for event in events if isinstance(event, StepEvent) and event.step <= step)


def _prepared(plan: RunPlan, rank: int, task: Task, device: torch.device, emit: Emit) -> Task:
    """Prepare the data of another member's task, and return the task."""
    task.device = device
    prepare_data(plan, rank, task, emit)
    return task


class _SharedModelTask:
    """A task whose model was built once: every member gets a copy of it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = model
        self.train = task.train.again() if isinstance(task.train, Stream) else task.train

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def build_model(self) -> nn.Module:
        return copy.deepcopy(self._model)


def _emit_as_member(emit: Emit, rank: int, event: Event) -> None:
    emit(event if event.member is not None else event.model_copy(update={"member": rank}))


def _member(
    plan: RunPlan,
    baton: Baton,
    group: SimulatedGroup,
    run_dir: Path,
    task: Task,
    rank: int,
    emit: Emit,
    control: Control,
) -> None:
    def exchange() -> Exchange:
        return SimulatedExchange(group, rank) if plan.world_size > 1 else SoloExchange()

    def trained() -> ExitCode:
        try:
            return train(plan, rank, task, exchange, run_dir, emit, control)
        except (RunFailed, OtherMemberFailed) as error:
            cause = error.__cause__ if isinstance(error, RunFailed) else error
            if not isinstance(cause, OtherMemberFailed):
                raise
            emit(MemberEvent(status="left", name=plan.all_members[rank].name, message=str(cause)))
            return ExitCode.STOPPED

    torch.get_num_threads()  # fixes the number for this thread; otherwise its first convolution would use another
    baton.acquire()
    code = ExitCode.RUN_FAILED
    try:
        code = run_to_exit_code(trained, plan.all_members[rank].name, emit)
    finally:
        group.leave(rank, failed=code not in (ExitCode.DONE, ExitCode.STOPPED))
        baton.release()


def _post_commands(lines: Iterable[bytes], controls: list[Control]) -> None:
    """Post every member's commands; if the input ends, the supervisor is gone, and all stop with a snapshot."""
    try:
        for line in lines:
            fields = json.loads(line)
            controls[fields.pop("rank")].post(Command.model_validate(fields))
    finally:
        for control in controls:
            control.post(Command(command="stop", reason="the process that started this worker is gone"))
