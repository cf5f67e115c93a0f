"""The messages to an agent and from it.

What it says is read line by line and with bounds, for a machine is checked for who it is and not believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.bounded import Count, Text
from training.plan import RunPlan
from training.processes import thread_limits


@dataclass(frozen=True)
class AgentTimeouts:
    """All timeouts, in seconds."""

    lease: float = 30.0
    """The machine stops its worker when it has heard nothing for so long."""
    grace: float = 5.0
    """Time of the worker to write its snapshot then."""
    beat: float = 1.0
    silence: float = 8.0
    """A connection that has carried nothing for so long is given up and made again."""
    margin: float = 5.0
    """What a worker that cannot be reached is given beyond that."""

    @property
    def give_up(self) -> float:
        """A worker that could not be reached for so long is lost: its machine has stopped it by now."""
        return self.lease + self.grace + self.margin


@dataclass(frozen=True)
class Assignment:
    """What a machine is to run."""

    run_id: str
    rank: int
    plan: bytes
    """The plan as it is there."""
    links: Mapping[str, str]
    """Folders of the machine, from Muster's folder there, by their place under the worker's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "training.worker"
    place: str = ""
    """Its folder beside those of the other members; empty: the rank."""
    words: tuple[str, ...] | None = None
    """Arguments of the module; ``None``: those of a worker."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """More files of its folder, readable by its user only."""
    brings: str = "model"
    """Its folder that is brought here when it has ended well; empty: none."""
    resumes: bool = True
    """Whether it may go on later with what its folder holds; else that is brought here and removed however it ends."""


def assigned(
    plan: RunPlan, links: Mapping[str, str], rank: int, threads: int, module: str = Assignment.module
) -> Assignment:
    """Return what a machine is to run as a member of a plan."""
    environment = {"TOKENIZERS_PARALLELISM": "false", **thread_limits(threads)}
    return Assignment(plan.run_id, rank, plan.model_dump_json().encode(), links, environment, module)


def assigned_coordinator(
    run_id: str, config: Mapping[str, Any], links: Mapping[str, str], certificates: Path
) -> Assignment:
    """Return what the machine of the coordinator is to run; paths in its configuration become those there."""
    remote_config = {**config, "address": "0.0.0.0", "certificates": "secrets/coordinator"}
    keys = {f"secrets/coordinator/{path.name}": path.read_bytes() for path in sorted(certificates.iterdir())}
    return Assignment(
        run_id=run_id,
        rank=-1,
        plan=b"{}",
        links=links,
        environment=thread_limits(1),
        module="training.exchange.coordinator_main",
        place="coordinator",
        words=("--config", "secrets/coordinator.json"),
        files={"secrets/coordinator.json": json.dumps(remote_config).encode(), **keys},
        brings="",
    )


class AgentHello(BaseModel):
    """The first line after it was attached to."""

    model_config = ConfigDict(frozen=True)

    commands: Count = 0
    """How many it has carried out."""
    gone: bool = False

    @classmethod
    def parse(cls, line: bytes) -> AgentHello:
        """Raises ``ValueError`` where something else than an agent answers."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            raise ValueError("its agent did not answer, something else did") from None


class Record(BaseModel):
    """Any other line: a beat, which has no number, or the next record of the agent's spool."""

    model_config = ConfigDict(frozen=True)

    seq: Count = 0
    event: str = ""
    """A line of the worker."""
    log: str = ""
    pid: int | None = Field(None, ge=1, lt=1 << 31)
    end: int | None = Field(None, ge=-255, le=255)
    """Exit code of the worker."""
    why: Text = ""
    """Why the agent has ended it."""
