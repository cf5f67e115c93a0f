"""Workers that are threads of this process: a run without the start of processes, certificates in use, and sockets.

Each trains as a worker's process does, on the run's plan, folder and orders. The devices of a member send through
queues, the members exchange in memory. A model must draw nothing at random while it is trained, as all threads share
torch's generator; none may fail, as nobody would tell the others.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from profiles.errors import ExitCode
from tests.layouts.pipeline_runs import queue_carriers
from tests.training.memory_exchange import Room, RoomExchange
from training.exchange.base import Exchange, SoloExchange
from training.layouts.base import Layout
from training.layouts.staged import StagedModel
from training.layouts.whole import WholeModel
from training.loop.train_member import run_to_exit_code, train
from training.records.events import Event, MemberEvent, StepEvent, to_line
from training.records.plan import RunPlan
from training.run.orders import Command, Control
from training.tasks.base import GroupPosition
from training.tasks.registry import task_from_profile

_LONGEST = 600.0
"""Seconds for a thread to wait for the others: longer than a test may take, as a busy machine lets some come late."""
_ONE_BY_ONE = threading.Lock()
"""Held while a model is made: it may seed torch's generator, and transformers reads models in one thread at a time."""


class ThreadWorker:
    """A worker as :class:`training.run.processes.Worker` has it.

    Args:
        make_layout: returns what it holds of the model.
        join: returns its exchange with other members.
        all_prepared: passed by all workers of the run before they train.
        holds: whether it waits after a step until it has got an order.
    """

    pid = os.getpid()
    end_reason = ""

    def __init__(
        self,
        plan: RunPlan,
        rank: int,
        run_dir: Path,
        make_layout: Callable[[], Layout],
        join: Callable[[], Exchange],
        all_prepared: threading.Barrier,
        holds: bool,
    ) -> None:
        self._plan, self._rank, self._run_dir = plan, rank, run_dir
        self._make_layout, self._join, self._all_prepared = make_layout, join, all_prepared
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._control, self._ordered = Control(answer=self._emit), threading.Event()
        if not holds:
            self._ordered.set()
        self._code = ExitCode.RUN_FAILED
        threading.Thread(target=self._work, name=f"worker {rank}", daemon=True).start()

    def _emit(self, event: Event) -> None:
        member = self._rank if event.member is None else event.member
        self._lines.put(to_line(event.model_copy(update={"member": member})).encode())
        if isinstance(event, StepEvent):
            assert self._ordered.wait(_LONGEST), "no order came"

    def _work(self) -> None:
        torch.get_num_threads()  # sets them for this thread
        name = self._plan.process(self._rank).name
        self._emit(MemberEvent(status="started", name=name))
        self._code = run_to_exit_code(self._trained, name, self._emit)
        self._lines.put(None)

    def _trained(self) -> ExitCode:
        member = self._plan.process(self._rank).member.rank
        task = task_from_profile(self._plan.profile_of(member))
        task.group_position = GroupPosition(member, len(self._plan.all_members))
        with _ONE_BY_ONE:
            task.prepare(lambda *_: None)
        self._all_prepared.wait()
        return train(
            self._plan, self._rank, task, self._join, self._run_dir, self._emit, self._control, self._make_layout
        )

    def send(self, message: dict[str, Any]) -> None:
        if "command" in message:  # addresses are not needed here
            self._control.post(Command.model_validate(message))
            self._ordered.set()

    def lines(self) -> Iterator[bytes]:
        return iter(self._lines.get, None)

    def note_event(self, event: Event) -> Event:
        return event

    def exit_code(self) -> int:
        return int(self._code)

    def signal(self, number: int) -> None:
        pass


class NoCoordinator:
    """In the place of the coordinator, which nobody asks."""

    def __init__(self, config: object, log: object) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lines.put(json.dumps({"port": 1}).encode())

    def lines(self) -> Iterator[bytes]:
        return iter(self._lines.get, None)

    def send(self, message: dict[str, Any]) -> None:
        pass

    def exit_code(self) -> int:
        return 0

    def stop(self) -> None:
        self._lines.put(None)


class ThreadWorkers:
    """All workers of a run.

    Args:
        folder_of: returns the run folder of a process.
        holds: whether each waits after its first step until it has got an order.
    """

    def __init__(self, plan: RunPlan, folder_of: Callable[[int], Path], holds: bool = False) -> None:
        self._plan, self._folder_of, self._holds = plan, folder_of, holds
        stages = len(plan.members[0].devices)
        self._carriers = [(queue_carriers(stages), queue_carriers(stages)) for _ in plan.members]
        self._columns = [Room(plan.world_size, lambda name: (), _LONGEST) for _ in range(stages)]
        self._all_prepared, self._all_seeded = (
            threading.Barrier(len(plan.processes), timeout=_LONGEST) for _ in range(2)
        )

    def start(self, rank: int, log: BinaryIO) -> ThreadWorker:
        """Start the worker of a process."""
        process, seeded = self._plan.process(rank), self._all_seeded
        member, stage = process.member, process.device_number

        def join() -> Exchange:
            alone = self._plan.world_size == 1
            return SoloExchange() if alone else RoomExchange(self._columns[stage], member.rank)

        def layout() -> Layout:
            if len(member.devices) == 1:
                return made_alone(WholeModel(), seeded)
            links, background = (carriers[stage] for carriers in self._carriers[member.rank])
            own = self._plan.own_folders
            model = StagedModel(links, member.devices, member.batch_size, own, background if own else None)
            return made_alone(model, seeded)

        return ThreadWorker(self._plan, rank, self._folder_of(rank), layout, join, self._all_prepared, self._holds)


def made_alone(layout: Layout, seeded: threading.Barrier) -> Layout:
    """Let a layout make its model while no other does, and when all have seeded the generators."""
    build = layout.build

    def alone(*arguments: Any) -> nn.Module:
        seeded.wait()
        with _ONE_BY_ONE:
            return build(*arguments)

    layout.build = alone
    return layout
