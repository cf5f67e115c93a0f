"""The plan of one run: everything a worker must know, as one JSON document (``plan.json``); and the metadata of the run
with versions and outcome (``metadata.json``)."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import BadInput
from profiles.schema import Profile
from training.records.bounded_fields import first_problem

PLAN_VERSION: Final = 1
_UNCOUNTED: dict[str, Any] = {
    **dict.fromkeys(("run_id", "engine", "added", "resume", "attempt", "absent", "own_folders", "launch"), True),
    "profile": {"name": True, "run": True, "strategy": {"engine", "transport"}},
    "members": {"__all__": {"interface", "local", "share", "addresses", "machine", "data"}},
}
"""Fields that do not affect the result: names, folders, addresses, and the engine of the exchanges."""


class MemberPlan(BaseModel):
    """One worker of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0)
    name: str
    """Name of the machine, for messages."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    device_index: int = 0
    batch_size: int = Field(ge=1)
    """Samples in one forward pass: this member's share of every step."""
    threads: int = 0
    interface: str = ""
    """Network interface for the exchanges; empty: any, with nccl the one that its links use."""
    local: bool = False
    """On the machine of the coordinator. Its process and its connections show whether it is alive: on a busy machine
    heartbeats may be late."""
    share: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The share of every vector that it owns (averages and sends back), relative to the others."""
    addresses: tuple[str, ...] = ()
    """Hosts at which the others can dial it, the fastest route first; empty: the addresses of its machine."""
    machine: str = ""
    """Its machine, if data stay on machines: members of one machine share the data of one path."""
    data: str = ""
    """Path of the data that it trains on, on its machine; empty: that of the profile."""


JOB_FACTORY = "training.tasks.object_files:build"
"""``model_path`` of a job that was written to files; ``dataset_path`` is their folder then."""
LAUNCHED_FILES = "files"
"""Folder with the files that a launched script of rank 0 has written, if it ran in a copy."""


class LaunchedScript(BaseModel):
    """A script that every member runs unchanged, instead of one of Muster's tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: str
    """File, or with ``module`` the name after ``python -m``."""
    module: bool = False
    arguments: tuple[str, ...] = ()
    backend: Literal["auto", "muster", "script"] = "auto"
    """Which process groups Muster carries: those for which the script says gloo, NCCL or nothing; all; none."""
    folder: str = ""
    """Folder that is copied to each machine, where the script then runs; empty: it runs where it is."""
    machines: tuple[int, ...]
    """Number of each member's machine, by rank."""
    addresses: tuple[str, ...]
    """Literal address of each machine, where its members listen."""
    interfaces: tuple[str, ...] = ()
    """Interface of each machine that the user wants them to listen on; empty: that of the address."""

    @property
    def title(self) -> str:
        return " ".join([f"-m {self.script}" if self.module else Path(self.script).name, *self.arguments])

    def relocated(self, folder: str) -> LaunchedScript:
        """Return the script with its folder moved to ``folder``."""
        script = self.script if self.module else Path(self.script).relative_to(self.folder).as_posix()
        return self.model_copy(update={"script": script, "folder": folder})

    def local_ranks(self, rank: int) -> list[int]:
        """Return the ranks on the machine of ``rank``."""
        return [member for member, machine in enumerate(self.machines) if machine == self.machines[rank]]


class ClockPlan(BaseModel):
    """The machines whose time a simulated run computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    made_by: str
    """``module:name`` of the factory of a :class:`training.simulated.clock.Clock`."""
    machines: dict[str, Any]
    """The file that describes them."""


class RunPlan(BaseModel):
    """What all members agree on before the first step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = PLAN_VERSION
    run_id: str
    profile: Profile
    members: tuple[MemberPlan, ...]
    engine: Literal["mesh", "nccl", "simulated"]
    """Engine of the exchanges; simulated: all members are one process of this machine."""
    added: tuple[MemberPlan, ...] = ()
    """Members that joined during the run; they change neither its steps nor its learning rate."""
    resume: bool = False
    """Continue from the newest snapshot all members have."""
    attempt: int = 1
    """1, and one more with every resume: snapshots record the attempts that led to them."""
    absent: tuple[int, ...] = ()
    """Ranks of members that are absent in this attempt: the others go on without them, and may take them back."""
    own_folders: bool = False
    """Whether every member has its own run folder on its machine: then all save the model, and any can deliver it."""
    launch: LaunchedScript | None = None
    clock: ClockPlan | None = None

    @property
    def has_coordinator(self) -> bool:
        """Whether members meet at a coordinator; those of a launched script meet at a store on loopback, and those of
        one process need neither."""
        return self.launch is None and self.engine != "simulated"

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def seats(self) -> tuple[MemberPlan, ...]:
        """All members by rank: the planned ones, and those that joined later."""
        return (*self.members, *self.added)

    def profile_of(self, rank: int) -> Profile:
        """Return the profile with the path of a member's data on its machine, which must be this one."""
        if not (data_path := self.seats[rank].data):
            return self.profile
        path = str(Path.home() / Path(data_path).expanduser())
        data = self.profile.data.model_copy(update={"dataset_path": path})
        return self.profile.model_copy(update={"data": data})

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all members."""
        return sum(m.batch_size for m in self.members) * self.profile.training.gradient_accumulation

    def hash(self) -> str:
        """Hash of the fields that affect the result. Defaults do not count, so that new options change no hash."""
        document = self.model_dump(mode="json", exclude=_UNCOUNTED, exclude_defaults=True)
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def read_plan(path: Path) -> RunPlan:
    """Read ``plan.json``.

    Raises:
        BadInput: missing, unreadable, not JSON, or of another version.
    """
    try:
        return RunPlan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "name the path of a run's plan.json") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {first_problem(error)}", "make the plan again with this version") from error


Status = Literal["starting", "running", "paused", "completed", "failed", "cancelled"]
FinalStatus = Literal["completed", "failed", "cancelled"]
FINAL: tuple[FinalStatus, ...] = ("completed", "failed", "cancelled")
RunType = Literal["local", "distributed"]
_PACKAGES = ("muster-train", "torch", "transformers", "peft", "cryptography", "pydantic")


class Earlier(BaseModel):
    """The metadata of a run before the attempt that is about to begin."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    status: Status
    end_time: str | None
    error_message: str
    command: list[str]
    attempt: int


class RunMetadata(BaseModel):
    """``metadata.json``. Times are ISO 8601 in UTC."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    run_id: str
    run_type: RunType = "local"
    status: Status = "starting"
    start_time: str
    end_time: str | None = None
    profile: str
    model: str = ""
    dataset: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    hosts: list[dict[str, Any]] = Field(default_factory=list)
    strategy: str = ""
    strategy_reason: str = ""
    """Why this strategy was taken."""
    engine: str = ""
    metrics: dict[str, Any] = Field(default_factory=dict)
    error_message: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    attempt: int = 1
    """1, and one more with every resume."""
    earlier: Earlier | None = None
    """Of a run that is being resumed, until it trains again: what is restored if it never does."""


SCRIPT = "script"
"""Name of the strategy of a launched script, which has its own."""


def metadata_of(plan: RunPlan, command: list[str], run_type: RunType = "local", reason: str = "") -> RunMetadata:
    """Return the metadata of a run that starts with ``plan``."""
    profile = plan.profile
    return RunMetadata(
        run_id=plan.run_id,
        run_type=run_type,
        start_time=utc_now(),
        profile=profile.name,
        model=profile.model_name or profile.model.model_path,
        dataset=profile.dataset_name or profile.data.dataset_path,
        config=profile.model_dump(mode="json"),
        hosts=[member.model_dump(mode="json") for member in plan.members],
        strategy=SCRIPT if plan.launch else profile.strategy.strategy,
        strategy_reason=reason,
        engine=plan.engine,
        versions={"python": platform.python_version(), "platform": platform.platform(), **versions_of(_PACKAGES)},
        command=command,
    )


def read_metadata(path: Path) -> RunMetadata:
    """Read the metadata of the run folder ``path``.

    Raises:
        BadInput: there is none, or it is damaged.
    """
    try:
        return RunMetadata.model_validate_json((path / "metadata.json").read_bytes())
    except OSError as error:
        raise BadInput(f"not a run folder ({error.strerror}: metadata.json)", "see: runs list", file=path) from error
    except ValidationError as error:
        raise BadInput(f"metadata.json is damaged: {first_problem(error)}", "see: runs list", file=path) from error


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    return {package: version for package in packages if (version := _version(package)) is not None}


@functools.cache
def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def utc_now() -> str:
    """Return the time as ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def document(content: Any) -> bytes:
    """Return ``content`` as an indented JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:
    """Replace what JSON cannot hold (NaN, infinities) by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
