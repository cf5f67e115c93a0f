"""What a script's process has of the run that launched it: its plan, and the way for events and commands."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profiles.schema import Profile
from training.exchange.base import Exchange, SoloExchange
from training.records.event_log import EventSink
from training.records.events import Emit, Event
from training.records.plan import RunPlan, read_plan
from training.run.orders import Command, Control

START_MODULE = "muster_script_start"
"""Name under which ``script_start.py`` is known in the process of a script."""


def _drop(event: Event) -> None:
    """Nobody reads the events of a script that was not launched."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run as one rank of its script knows it."""

    rank: int = 0
    world_size: int = 1
    plan: RunPlan | None = None
    """``None``: the script was started by something else, and has no run folder."""
    run_dir: Path = Path()
    emit: Emit = _drop
    control: Control = field(default_factory=Control)

    @classmethod
    def of_environment(cls) -> LaunchedRun:
        """Return the run of this process; it takes the commands of the run from now on."""
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        start: Any = sys.modules.get(START_MODULE)
        if start is None or "MUSTER_PLAN" not in os.environ:
            return cls(rank, world_size)
        emit = EventSink(start.channel.writer, rank)
        control = Control(answer=emit)
        start.channel.on_command = lambda line: control.post(Command.model_validate_json(line))
        plan, run_dir = read_plan(Path(os.environ["MUSTER_PLAN"])), Path(os.environ["MUSTER_RUN_DIR"])
        return cls(rank, world_size, plan, run_dir, emit, control)

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def name(self) -> str:
        return self.plan.all_members[self.rank].name if self.plan else f"rank {self.rank}"

    def plan_of(self, profile: Profile) -> RunPlan | None:
        """Return the plan with the options that the script gives its session."""
        return self.plan and self.plan.in_session(profile)


def group_of_script(run: LaunchedRun) -> Exchange:
    """Return a new exchange with the other processes of a script, over the mesh of its default process group."""
    if run.world_size == 1:
        return SoloExchange()
    import torch.distributed as dist

    from training.exchange.mean.fixed_group import FixedGroup
    from training.exchange.torch_backend.process_group import MusterGroup

    if not dist.is_initialized():
        dist.init_process_group("muster")
    group: Any = dist.new_group(backend="muster")
    assert isinstance(group, MusterGroup)
    return FixedGroup(group.mesh)
