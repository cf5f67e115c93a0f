"""The plan of one run, all that a worker must know (``plan.json``); and its metadata, with the outcome."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from profiles.errors import BadInput
from profiles.installation import program
from profiles.schema import Profile
from training.records.bounded_fields import first_problem
from training.records.launched_script import LaunchedScript
from training.records.run_files import utc_now, versions_of

PLAN_VERSION: Final = 1
_UNCOUNTED: dict[str, Any] = {
    **dict.fromkeys("run_id engine coordinator added resume attempt absent launch planned".split(), True),
    "profile": {"name": True, "run": True, "strategy": {"engine", "transport"}},
    "members": {"__all__": {"shard": True, "data": True, "devices": True}},
}
"""Fields that do not affect the result: names, folders, addresses, the engine of exchanges, where a model is cut."""


class DevicePlan(BaseModel):
    """One device of a member, and how the process on it meets the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str = ""
    """Name of its machine in the hosts file; empty: in a run without one, the machine that the run was started on."""
    kind: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    index: int = Field(default=0, ge=0)
    threads: int = 0
    """Threads for compute; 0: as many as PyTorch takes."""
    interface: str = ""
    """Network interface for the exchanges; empty: any, with nccl the one that its links use."""
    addresses: tuple[str, ...] = ()
    """Hosts at which the others can dial it, the fastest route first; empty: the addresses of its machine."""
    coordinator_address: str = ""
    """Host at which it dials the coordinator; empty: that on the route between the two machines."""
    be_polite: bool = False
    """Whether the process gives way to the owner of its machine, whatever the profile says."""
    through_ssh: bool = False
    """Whether it reaches a coordinator on the starting machine through SSH, because it cannot dial that machine."""
    blocks: tuple[int, int] | None = None
    """First block of its stage, and the first of the next one, where its member has several devices; ``None``: about
    as many as each of the others."""
    ahead: int = Field(default=0, ge=0)
    """``extra`` of its stage, see :func:`training.layouts.orders.micro_batches_under_way`."""


class MemberPlan(BaseModel):
    """One member of the run: a worker for each of its devices, which hold its model together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0)
    name: str
    """Its name in messages: that of its machine, with the device where several devices of a machine train."""
    batch_size: int = Field(ge=1)
    """Samples in one forward pass: this member's share of every step."""
    shard: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Size of the shard of every vector that it owns (averages and sends back), relative to the others."""
    data: str = ""
    """Path of the data that it trains on, on its machine; empty: that of the profile."""
    devices: tuple[DevicePlan, ...] = Field(default=(DevicePlan(),), min_length=1)
    """What it computes on. Several hold the model together, as the layout says: in a pipeline each the next blocks."""

    @property
    def lead(self) -> DevicePlan:
        """The device that speaks for the member."""
        return self.devices[0]

    @property
    def machine(self) -> str:
        """Name of the machine of its lead device."""
        return self.lead.machine

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines of its devices."""
        return tuple(dict.fromkeys(device.machine for device in self.devices))

    def on_device(self, **changes: Any) -> MemberPlan:
        """Return the member with changed fields of its lead device."""
        return self.model_copy(update={"devices": (DevicePlan(**{**dict(self.lead), **changes}), *self.devices[1:])})


class ProcessPlan(NamedTuple):
    """A worker of the run: the process of one device of a member."""

    rank: int
    """Among all processes of the run. Where each member has one device, that of the member."""
    member: MemberPlan
    device_number: int
    """Of its device, among those of its member."""
    is_of_one: bool = True  # whether its member is the only one of the run
    layout: str = ""

    @property
    def device(self) -> DevicePlan:
        return self.member.devices[self.device_number]

    @property
    def is_lead(self) -> bool:
        """Whether it speaks for its member."""
        return self.device_number == 0

    @property
    def name(self) -> str:
        """Its name in messages: that of its member, or of the machine that holds this part."""
        machine, name, part = self.device.machine, self.member.name, _PARTS.get(self.layout, "stage")
        member = "" if self.is_of_one or not machine else f"-member-{self.member.rank}"  # it may hold a stage of each
        return f"{machine or name}{member}-{part}-{self.device_number + 1}" if len(self.member.devices) > 1 else name

    @property
    def folder(self) -> str:
        """Name of the folder of its snapshots."""
        return f"member-{self.member.rank}" + (f"-stage-{self.device_number + 1}" if self.device_number else "")


_PARTS = {"shard": "shard", "tensor": "slice"}  # by layout
JOB_FACTORY = "training.tasks.object_files:build"
"""``model_path`` of a job that was written to files; ``dataset_path`` is their folder then."""


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
    coordinator: str = ""
    """Name of the coordinator's machine; empty: the machine that starts the run, if no member is on it."""
    added: tuple[MemberPlan, ...] = ()
    """Members that joined during the run; they change neither its steps nor its learning rate."""
    resume: bool = False
    """Continue from the newest snapshot all members have."""
    attempt: int = 1
    """1, and one more with every resume: snapshots record the attempts that led to them."""
    began_as: str = ""
    """Hash of the plan that the run began with, if it trains longer than that: its snapshots bear it."""
    absent: tuple[int, ...] = ()
    """Ranks of members that are absent in this attempt: the others go on without them, and may take them back."""
    planned: int = Field(default=0, ge=0)
    """With how many members it began, if a resume has brought others: those change neither steps nor learning rate."""
    launch: LaunchedScript | None = None
    clock: ClockPlan | None = None

    @model_validator(mode="after")
    def _check_ranks(self) -> RunPlan:
        if [member.rank for member in self.all_members] != list(range(len(self.all_members))):
            raise ValueError("members: ranks must be 0, 1, 2 ... in this order")
        return self

    @property
    def is_script(self) -> bool:
        """Whether its members run a script of which nothing is known: it reports no steps, and can only be stopped."""
        return self.launch is not None and not self.launch.session

    def in_session(self, profile: Profile) -> RunPlan:
        """Return the plan of a launched script that trains in a session with the options of ``profile``."""
        assert self.launch is not None
        sections = {name: getattr(profile, name) for name in ("training", "strategy", "snapshot")}
        updates = {"profile": self.profile.model_copy(update=sections)}
        return self.model_copy(update=updates | {"launch": self.launch.model_copy(update={"session": True})})

    @property
    def has_coordinator(self) -> bool:
        """Whether members meet at a coordinator; those of a launched script, and the devices of a member, meet at a
        store on loopback, and those of one process need neither."""
        return self.launch is None and self.engine != "simulated" and (not self.is_staged or self.world_size > 1)

    @property
    def is_staged(self) -> bool:
        """Whether a member's model lies on several devices."""
        return any(len(member.devices) > 1 for member in self.members)

    @property
    def elects(self) -> bool:
        """Whether the members elect another coordinator when its machine is gone, and go on without their starter."""
        return self.has_coordinator and self.engine == "mesh" and not self.is_staged and len(self.machines) > 1

    @property
    def own_folders(self) -> bool:
        """Whether each process has a run folder of its own: then all members save the model, and any can deliver it."""
        return all(self.machines)

    @property
    def in_clear(self) -> bool:
        """Whether training traffic crosses a network unencrypted."""
        return self.engine == "nccl" and len(self.machines) > 1

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def all_members(self) -> tuple[MemberPlan, ...]:
        """All members by rank: the planned ones, and those that joined later."""
        return (*self.members, *self.added)

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """All processes of the run by rank: those of the members' devices, in their order."""
        places = [(member, number) for member in self.all_members for number in range(len(member.devices))]
        of_run = self.world_size == 1, self.profile.run.layout
        return tuple(ProcessPlan(rank, *place, *of_run) for rank, place in enumerate(places))

    def processes_of(self, member: int) -> tuple[int, ...]:
        """Return the ranks of the processes of a member, in the order of its devices."""
        return tuple(process.rank for process in self.processes if process.member.rank == member)

    def process(self, rank: int) -> ProcessPlan:
        """Return one of :attr:`processes`."""
        return self.processes[rank] if self.is_staged else ProcessPlan(rank, self.all_members[rank], 0)

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the machines of the planned members' devices, in the order of their first ranks."""
        return tuple(dict.fromkeys(device.machine for member in self.members for device in member.devices))

    def ranks_on(self, machine: str) -> tuple[int, ...]:
        """Return the ranks of all members with a device on a machine."""
        return tuple(member.rank for member in self.all_members if machine in member.machines)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the ranks on the machine of this name, or that of the member of this name; empty: there is none."""
        return self.ranks_on(name) or tuple(member.rank for member in self.all_members if member.name == name)

    def is_local(self, process: ProcessPlan) -> bool:
        """Whether a process is on the coordinator's machine: it and its links, not heartbeats, show if it is alive."""
        return process.device.machine == self.coordinator

    def without_absent_coordinator(self, starter: str) -> RunPlan:
        """Return the plan of this attempt: instead of an absent machine the starting one carries the coordinator, by
        name if a member is on it, and is dialled on the default route."""
        if not set(self.ranks_on(self.coordinator)) & set(self.absent):
            return self
        members = tuple(member.on_device(coordinator_address="") for member in self.members)
        return self.model_copy(update={"members": members, "coordinator": starter})

    def profile_of(self, rank: int) -> Profile:
        """Return the profile with the path of a member's data on its machine, which must be this one."""
        if not (data_path := self.all_members[rank].data):
            return self.profile
        path = str(Path.home() / Path(data_path).expanduser())
        data = self.profile.data.model_copy(update={"dataset_path": path})
        return self.profile.model_copy(update={"data": data})

    @property
    def first_members(self) -> tuple[MemberPlan, ...]:
        """The members that it began with."""
        return self.members[: self.planned or None]

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all members that it began with."""
        return sum(m.batch_size for m in self.first_members) * self.profile.training.gradient_accumulation

    def hash(self) -> str:
        """Hash of the fields that affect the result. Defaults do not count, so that new options change no hash."""
        profile = self.profile.model_copy(update={"snapshot": self.profile.snapshot.counted})
        plan = self.model_copy(update={"profile": profile, "members": self.first_members})
        document = plan.model_dump(mode="json", exclude=_UNCOUNTED, exclude_defaults=True)
        return self.began_as or hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


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


def status_word(status: str) -> str:
    """Return the word that people read for the status of a run."""
    return "stopped" if status == "cancelled" else status


RunType = Literal["local", "distributed"]
_PACKAGES = ("muster-train", "torch", "transformers", "peft", "cryptography", "pydantic")


class Earlier(BaseModel):
    """The metadata of a run before the attempt that is about to begin."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    status: Status
    end_time: str | None
    error_message: str
    command: list[str]
    folder: str = ""
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
    folder: str = ""
    """In which the command was typed; paths in it are relative to this folder. Empty: not recorded."""
    attempt: int = 1
    """1, and one more with every resume."""
    earlier: Earlier | None = None
    """Of a run that is being resumed, until it trains again: what is restored if it never does."""

    @property
    def task(self) -> str:
        """Name of the task that was trained; empty if it is not recorded, or a script was launched."""
        model = self.config.get("model")
        return str(model.get("task", "")) if isinstance(model, dict) and self.strategy != SCRIPT else ""


SCRIPT = "script"  # name of the strategy of a launched script, which has its own
FIT = "LocalTrainer.fit"
"""Stands for the command of a run that a script's call started, before the script."""


def metadata_of(plan: RunPlan, command: list[str], run_type: RunType = "local", reason: str = "") -> RunMetadata:
    """Return the metadata of a run that starts with ``plan``."""
    profile, summary = plan.profile, {"rank", "name", "batch_size"}  # what lists of runs show of a member
    return RunMetadata(
        run_id=plan.run_id, run_type=run_type, start_time=utc_now(), profile=profile.name, command=command,
        model=profile.model_name or profile.model.model_path, config=profile.model_dump(mode="json"),
        dataset=profile.dataset_name or profile.data.dataset_path, folder=os.getcwd(),
        hosts=[{**member.model_dump(include=summary), "device": member.lead.kind} for member in plan.members],
        strategy=SCRIPT if plan.is_script else profile.strategy.strategy, strategy_reason=reason, engine=plan.engine,
        versions={"python": platform.python_version(), "platform": platform.platform(), **versions_of(_PACKAGES)},
    )  # fmt: skip


def read_metadata(path: Path) -> RunMetadata:
    """Read the metadata of the run folder ``path``.

    Raises:
        BadInput: there is none, or it is damaged.
    """
    hint = f"see: {program('runs', 'list')}"
    try:
        return RunMetadata.model_validate_json((path / "metadata.json").read_bytes())
    except OSError as error:
        raise BadInput(f"not a run folder ({error.strerror}: metadata.json)", hint, file=path) from error
    except ValidationError as error:
        raise BadInput(f"metadata.json is damaged: {first_problem(error)}", hint, file=path) from error
