"""The messages to an agent and from it.

An agent's messages are validated line by line and bounded: a machine is authenticated, but its data is not trusted.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import join
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distributed.agent.requests import Start
from distributed.preparation.code_sync import CODE_FOLDERS
from profiles.installation import TYPED_PROGRAM, program_words
from training.records.bounded_fields import Count, Text
from training.records.plan import RunPlan
from training.run.processes import PROCESS_DEFAULTS, thread_limits

_PYTHONPATH = ":".join(f"{{folder}}/{folder}" for folder in CODE_FOLDERS)


@dataclass(frozen=True)
class AgentTimeouts:
    """All timeouts, in seconds."""

    lease: float = 30.0
    """Silence after which the machine stops its worker."""
    grace: float = 5.0
    """Time that the worker then has to write its snapshot."""
    beat: float = 1.0
    silence: float = 8.0
    """Silence after which a connection is closed and made again."""
    margin: float = 5.0
    """Extra time for a worker that cannot be reached."""

    @property
    def give_up(self) -> float:
        """Time after which an unreachable worker counts as lost: its machine has stopped it by then."""
        return self.lease + self.grace + self.margin


@dataclass(frozen=True)
class Assignment:
    """The program that a machine is to run: a worker or the coordinator."""

    run_id: str
    rank: int
    plan: bytes
    """The plan with the paths of that machine."""
    links: Mapping[str, str]
    """Folders of the machine, relative to Muster's folder, by their path under the worker's folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "training.workers.worker"
    folder: str = ""
    """Name of its folder among those of the members; empty: the rank."""
    arguments: tuple[str, ...] | None = None
    """Arguments of the module; ``None``: those of a worker."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Additional files of its folder, readable by its user only."""
    brings: str = "model"
    """Subfolder that is fetched after success; empty: none."""
    unattended: str = "stop"
    """What becomes of it when its machine hears nothing of who started it, see
    :class:`distributed.agent.requests.Start`."""
    resumes: bool = True
    """Whether it may be resumed from its folder; else that is fetched and removed however it ends."""

    @property
    def folder_name(self) -> str:
        """Name of its folder among those of the members."""
        return self.folder or str(self.rank)


def assigned(
    plan: RunPlan, links: Mapping[str, str], rank: int, threads: int, module: str = Assignment.module
) -> Assignment:
    """Return the assignment of a member of a plan."""
    typed = {TYPED_PROGRAM: shlex.join(program_words())}  # for the hints of its errors
    environment = {"TOKENIZERS_PARALLELISM": "false", **typed, **thread_limits(threads)}
    document, unattended = plan.model_dump_json().encode(), "train" if plan.elects else "stop"
    return Assignment(plan.run_id, rank, document, links, environment, module, unattended=unattended)


def assigned_coordinator(
    run_id: str, config: Mapping[str, Any], links: Mapping[str, str], certificates: Path
) -> Assignment:
    """Return the assignment of the coordinator; paths in its configuration are rewritten for its machine."""
    paths = {"certificates": "secrets/coordinator", "state": "committed.json"}
    remote_config = {**config, "address": "0.0.0.0", **paths}
    keys = {f"secrets/coordinator/{path.name}": path.read_bytes() for path in sorted(certificates.iterdir())}
    return Assignment(
        run_id=run_id,
        rank=-1,
        plan=b"{}",
        links=links,
        environment=thread_limits(1),
        module="training.exchange.group.coordinator_main",
        folder="coordinator",
        arguments=("--config", "secrets/coordinator.json"),
        files={"secrets/coordinator.json": json.dumps(remote_config).encode(), **keys},
        brings="",
        unattended="serve" if config["elects"] else "stop",
    )


def start_request(assignment: Assignment, timeouts: AgentTimeouts, root: str) -> Start:
    """Return the request that starts the program of an assignment on a machine with Muster's folder ``root``."""
    name = assignment.folder_name
    options = {"--plan": "plan.json", "--rank": name, "--run-dir": "{folder}", "--secrets": "secrets"}
    defaults = [word for pair in options.items() for word in pair]
    arguments = defaults if assignment.arguments is None else assignment.arguments
    files = {"plan.json": assignment.plan, **assignment.files}
    return Start(
        assignment.run_id,
        name,
        argv=["{python}", "-m", assignment.module, *arguments],
        env={"PYTHONPATH": _PYTHONPATH, **assignment.environment},
        defaults=PROCESS_DEFAULTS,
        files={path: encoded(content) for path, content in files.items()},
        links={path: join(root, folder) for path, folder in assignment.links.items()},
        lease=timeouts.lease,
        grace=timeouts.grace,
        unattended=assignment.unattended,
    )


def encoded(content: bytes) -> str:
    """Return the content of a file as it stands in a message."""
    return base64.b64encode(content).decode()


class AgentHello(BaseModel):
    """The first line of an agent after attaching to it."""

    model_config = ConfigDict(frozen=True)

    commands: Count = 0
    """Number of commands that it has carried out."""
    gone: bool = False
    unattended: bool = False
    """Whether it has not heard of who started it for so long that its worker goes on without."""

    @classmethod
    def parse(cls, line: bytes) -> AgentHello:
        """Parse the line; raises ``ValueError`` where something else than an agent answers."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            raise ValueError("its agent did not answer, something else did") from None


class Record(BaseModel):
    """Any other line of an agent: a beat, which has no number, or the next record of its spool."""

    model_config = ConfigDict(frozen=True)

    seq: Count = 0
    event: str = ""
    """An event line of the worker."""
    log: str = ""
    pid: int | None = Field(None, ge=1, lt=1 << 31)
    end: int | None = Field(None, ge=-255, le=255)
    """Exit code of the worker."""
    why: Text = ""
    """Why the agent has ended it."""
