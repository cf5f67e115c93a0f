"""Several trainers over one real hub in this process, a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from training.control import Control
from training.events import _Event
from training.exchange.base import Exchange
from training.plan import RunPlan
from training.tasks.base import Task
from training.trainer import Ending, Trainer


@dataclass
class Member:
    """One trainer and what came of it."""

    trainer: Trainer
    events: list[_Event] = field(default_factory=list)
    ending: Ending | None = None
    error: BaseException | None = None


def run_group(
    plan: RunPlan,
    connect: Callable[[int], Exchange],
    make_task: Callable[[int], Task],
    run_dir: Path,
    control: Callable[[int], Control] = lambda rank: Control(),
    timeout: float = 60.0,
) -> dict[int, Member]:
    """Train all members of ``plan`` and return them by rank; a member's exception is in its ``error``."""
    members: dict[int, Member] = {}
    lock = threading.Lock()

    def body(rank: int) -> None:
        events: list[_Event] = []
        task = make_task(rank)
        task.prepare(lambda *_: None)
        exchange = connect(rank)
        trainer = Trainer(plan, rank, task, exchange, events.append, control(rank), run_dir)
        member = Member(trainer, events)
        with lock:
            members[rank] = member
        try:
            member.ending = trainer.run()
        except BaseException as error:
            member.error = error
        finally:
            exchange.close()

    threads = [threading.Thread(target=body, args=(m.rank,), daemon=True) for m in plan.members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a member hangs"
    return members
