"""Several trainers over one real coordinator in this process, a thread each."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from profiles.errors import ExitCode
from training.exchange.base import Exchange
from training.exchange.mean.mesh_member import MeshMember
from training.loop.trainer import Trainer
from training.loop.uneven_trainer import trainer_class
from training.records.events import Event
from training.records.plan import RunPlan
from training.run.orders import Control
from training.tasks.base import Progress, Task

Connect = Callable[[int], MeshMember]
"""Connects a rank."""
Serve = Callable[[RunPlan], Connect]
"""Starts a coordinator for a plan."""


@dataclass
class Member:
    """One trainer and what came of it."""

    trainer: Trainer
    events: list[Event] = field(default_factory=list)
    ending: ExitCode | None = None
    error: BaseException | None = None


def run_member(
    plan: RunPlan, rank: int, exchange: Exchange, task: Task, run_dir: Path, control: Control, events: list[Event]
) -> Member:
    """Train one member to its end; its exception is in ``error``."""
    task.prepare(lambda *_: None)
    member = Member(trainer_class(plan)(plan, rank, task, exchange, events.append, control, run_dir), events)
    try:
        member.ending = member.trainer.run()
    except BaseException as error:  # noqa: BLE001 - handed to the test
        member.error = error
        traceback.print_exc()
    finally:
        exchange.close()
    return member


def run_group(
    plan: RunPlan,
    connect: Callable[[int], Exchange],
    make_task: Callable[[int], Task],
    run_dir: Path,
    control: Callable[[int], Control] = lambda rank: Control(),
    timeout: float = 60.0,
) -> dict[int, Member]:
    """Train all members of ``plan``, a thread each, and return them by rank."""
    members: dict[int, Member] = {}

    def body(rank: int) -> None:
        members[rank] = run_member(plan, rank, connect(rank), make_task(rank), run_dir, control(rank), [])

    threads = [
        threading.Thread(target=body, args=(m.rank,), daemon=True) for m in plan.members if m.rank not in plan.absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a member hangs"
    return members


class OneByOne(Task):
    """Before a task of several members of one process: transformers reads models in one thread at a time."""

    lock = threading.Lock()

    def prepare(self, progress: Progress) -> None:
        with self.lock:
            super().prepare(progress)  # type: ignore[safe-super]  # of the task that stands behind

    def build_model(self) -> nn.Module:
        with self.lock:
            return super().build_model()  # type: ignore[safe-super]
