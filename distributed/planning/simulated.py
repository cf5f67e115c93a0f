"""Machines that nobody here owns: read from a file, and the time that a simulated run would take on them.

The file is one of groups (:class:`Groups`), which a person writes, or one of measured figures
(:class:`distributed.planning.document.Figures`). What a step costs says the planner's cost
model (:class:`Predictor`), which is compared with real runs at the end of each.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from distributed.planning import cost_model
from distributed.planning.cluster import (
    LARGEST_FILE,
    Cluster,
    ClusterMachine,
    Document,
    DocumentFile,
    Link,
    Measurement,
    Name,
)
from distributed.planning.cost_model import LINE_SHARE
from distributed.planning.document import Choice, Figures, Job, Workload, job_of
from distributed.planning.prediction import BatchSplit, Predictor
from profiles.errors import BadInput, counted
from profiles.schema import Profile
from training.bounded import first_problem
from training.plan import ClockPlan, RunPlan
from training.simulated.clock import Absence, Cost
from training.strategies.own_file import rhythm_of
from training.strategies.registry import cost_model as costs_of
from training.strategies.registry import strategy_class, stretch_of

_MOST = 1024
"""Members of a simulated run."""
_LONGEST_NAME = 100
_MADE_BY = "distributed.planning.simulated:ClusterClock"


class AccessLink(Document):
    """What connects a machine with all others."""

    mbit: Annotated[float, Field(gt=0, le=1e6)]
    """Rate of the line in each direction, with its protocols' share."""
    latency_ms: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    """Round trip between two such machines; between different ones the mean of both."""


class Group(Document):
    """Equal machines."""

    name: Name
    count: Annotated[int, Field(ge=1, le=_MOST)] = 1
    samples_per_s: Annotated[float, Field(ge=1e-6, le=1e9)]
    """Of the job, on one machine."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """That training may use, in 10^9 bytes; not given: enough."""
    link: AccessLink
    lost_per_hour: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """How often a machine is lost, on average."""
    back_after_minutes: Annotated[float, Field(ge=0, le=1e6)] = 10.0


class Groups(DocumentFile):
    """The short form for people."""

    when_missing: ClassVar[str] = "name a file of machines with --cluster FILE; docs/how-to/scale.md has an example"
    when_broken: ClassVar[str] = "docs/how-to/scale.md says what a file of machines may hold"

    groups: Annotated[tuple[Group, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _fits_together(self) -> Groups:
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError("two groups have the same name")
        if (size := sum(group.count for group in self.groups)) > _MOST:
            raise ValueError(f"{size} machines are more than {_MOST}")
        if len(set(self.names)) < size:
            raise ValueError("two machines have the same name: those of a group are numbered")
        if max(map(len, self.names)) > _LONGEST_NAME:
            raise ValueError(f"a name has more than {_LONGEST_NAME} characters with its number")
        return self

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all machines."""
        return tuple(
            f"{group.name}-{number}" if group.count > 1 else group.name
            for group in self.groups
            for number in range(1, group.count + 1)
        )

    @cached_property
    def each(self) -> tuple[Group, ...]:
        """The group of every machine."""
        return tuple(group for group in self.groups for _ in range(group.count))

    def cluster(self) -> OwnLines:
        """Return the machines as the planner's figures."""
        return OwnLines(
            machines=tuple(
                ClusterMachine(
                    name=name,
                    measurements=(Measurement(batch=1, seconds=1 / group.samples_per_s),),
                    memory_free=int(1e9 * (group.memory_gb or 0)),
                    interface_mbit=group.link.mbit * LINE_SHARE,
                )
                for group, name in zip(self.each, self.names, strict=True)
            ),
            round_trips=tuple(group.link.latency_ms for group in self.each),
        )


class OwnLines(Cluster):
    """Machines with a line each into a network that is never the bottleneck itself."""

    machines: Annotated[tuple[ClusterMachine, ...], Field(min_length=1, max_length=_MOST)]
    round_trips: tuple[float, ...]
    """Milliseconds, by machine."""

    @cached_property
    def _paths(self) -> dict[str, tuple[float, float]]:
        each = zip(self.machines, self.round_trips, strict=True)
        return {machine.name: (machine.interface_mbit, round_trip) for machine, round_trip in each}

    @cached_property
    def _links(self) -> dict[tuple[tuple[float, float], tuple[float, float]], Link]:
        return {}

    def link(self, source: str, target: str) -> Link | None:
        ends = self._paths[source], self._paths[target]
        if ends not in self._links:
            (rate, trip), (other, far) = ends
            slower = min(rate, other)
            self._links[ends] = Link(
                source=source, target=target, mbit=slower, mbit_back=slower, rtt_ms=(trip + far) / 2
            )
        return self._links[ends]

    def narrows(self, link: Link) -> bool:
        return False  # the lines at its ends carry what it does, and more

    def coordinator(self, able: object = None) -> str:
        return ""  # nothing is passed on


class Machines:
    """The machines of a file.

    Args:
        document: of the file.
    """

    def __init__(self, document: Groups | Figures) -> None:
        self.document = document
        self.cluster = document.cluster() if isinstance(document, Groups) else document.cluster
        self.names = [machine.name for machine in self.cluster.machines if machine.trains]

    @classmethod
    def read(cls, path: Path) -> Machines:
        """Read a file of machines.

        Raises:
            BadInput: missing, or not such a file; one line that says which field is wrong.
        """
        try:
            measured = path.stat().st_size <= LARGEST_FILE and "cluster" in json.loads(path.read_bytes())
        except (OSError, ValueError, TypeError, RecursionError):
            measured = False  # reading it as a document says why
        return cls((Figures if measured else Groups).read(path))

    def clocked(self, plan: RunPlan) -> RunPlan:
        """Return the plan of a simulated run with the machines' names and time; the batch is shared by their speed,
        unless its profile says how.

        Raises:
            BadInput: it has another number of members, nothing was measured, or the strategy's costs are not known.
        """
        if len(self.names) != plan.world_size:
            has = counted(len(self.names), "machine")
            hint = f"write --simulate {len(self.names)}, or change the number of machines in the file"
            raise BadInput(f"the file of machines has {has}, the run {counted(plan.world_size, 'member')}", hint)
        machines = [self.cluster.machine(name) for name in self.names]
        if slow := [machine.name for machine in machines if not machine.speed]:
            raise BadInput(f"the file of machines has no measured speed of {slow[0]}", "measure it, or leave it out")
        batches = [member.batch_size for member in plan.members]
        own_pace = stretch_of(plan.profile.strategy) > 0
        if not plan.profile.run.shares and not own_pace:
            speeds, overheads = [m.speed for m in machines], [m.overhead for m in machines]
            batches = cost_model.shares(sum(batches), overheads, speeds, [sum(batches)] * len(batches)) or batches
        members = tuple(
            member.model_copy(update={"name": name, "batch_size": batch})
            for member, name, batch in zip(plan.members, self.names, batches, strict=True)
        )
        clock = ClockPlan(made_by=_MADE_BY, machines=self.document.model_dump(mode="json", exclude_defaults=True))
        found = plan.model_copy(update={"members": members, "clock": clock})
        if ClusterClock(found).absences and own_pace:
            message = f"with {plan.profile.strategy.strategy} machines that are lost on the way cannot be simulated"
            raise BadInput(message, "leave lost_per_hour out, or take another strategy")
        seconds = [m.overhead + batch / m.speed for m, batch in zip(machines, batches, strict=True)]
        return _paced(found, [1 / one for one in seconds]) if own_pace else found


def _paced(plan: RunPlan, speeds: list[float]) -> RunPlan:
    """Return the plan with the speeds at which members train, unless its profile gives them."""
    settings = plan.profile.strategy
    if getattr(settings.owned.get(settings.strategy), "speeds", ""):
        return plan
    text = ",".join(f"{max(0.001, one / max(speeds)):.4g}" for one in speeds)
    strategy = settings.with_own(settings.strategy, speeds=text)
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"strategy": strategy})})


class ClusterClock:
    """What the steps of a plan cost on its machines.

    Args:
        plan: with a clock of this kind.

    Raises:
        BadInput: the plan's machines cannot be read, or the costs of its strategy are not known.
    """

    def __init__(self, plan: RunPlan) -> None:
        assert plan.clock is not None
        kind = Figures if "cluster" in plan.clock.machines else Groups
        try:
            document = kind.model_validate(plan.clock.machines)
        except ValidationError as error:
            raise BadInput(f"the machines of the plan: {first_problem(error)}", "start a new run") from error
        strategy = plan.profile.strategy.strategy
        if plan.world_size > 1 and costs_of(strategy, plan.profile.strategy) is None:
            message = f"what strategy '{strategy}' costs is not known, so its time cannot be simulated"
            raise BadInput(message, "give it a cost model, or leave --cluster out")
        self._machines, self._plan = Machines(document), plan
        self._predictor: Predictor | None = None
        self._known: dict[tuple[object, ...], Cost] = {}
        each = document.each if isinstance(document, Groups) else ()
        self.absences = {
            rank: Absence(group.lost_per_hour / 3600, group.back_after_minutes * 60)
            for rank, group in enumerate(each)
            if group.lost_per_hour
        }

    def cost(self, members: tuple[int, ...], trainable: int, steps: int) -> Cost:
        """Return what a step of some members costs; see :class:`training.simulated.clock.Clock`."""
        if self._predictor is None:
            job = job_after(self._plan.profile, trainable, steps, steps * self._plan.global_batch)
            self._predictor = Predictor(self._machines.cluster, job)
        alike: dict[object, list[int]] = {}
        for rank in members:
            alike.setdefault(self._kind(rank), []).append(rank)
        key = tuple((kind, len(ranks)) for kind, ranks in alike.items())
        if key not in self._known:
            self._known[key] = self._predicted(members)
        found = self._known[key]
        if found.busy.keys() != set(members):  # as many of each kind, whoever they are
            by_kind = {self._kind(rank): seconds for rank, seconds in found.busy.items()}
            busy = {rank: by_kind[self._kind(rank)] for rank in members}
            found = Cost(found.seconds, busy, found.exchange, found.interval)
        return found

    def _kind(self, rank: int) -> object:
        """Return what members share that cost the same."""
        document = self._machines.document
        batch = self._plan.members[rank].batch_size
        return (document.each[rank].name, batch) if isinstance(document, Groups) else rank

    def _predicted(self, members: tuple[int, ...]) -> Cost:
        assert self._predictor is not None
        cluster, passes = self._machines.cluster, self._plan.profile.training.gradient_accumulation
        ranks = {self._machines.names[rank]: rank for rank in members}
        names = tuple(sorted(ranks))
        batches = tuple(self._plan.members[ranks[name]].batch_size for name in names)
        machines = [cluster.machine(name) for name in names]
        seconds = (passes * (m.overhead + batch / m.speed) for m, batch in zip(machines, batches, strict=True))
        choice = choice_of(self._plan.profile, names)
        found = self._predictor.candidate(choice, BatchSplit(batches, passes, tuple(seconds), fits=True))
        for member in found.members:
            if member.memory_free and member.memory > member.memory_free:
                need, has = (f"{size / 1e9:.1f} GB" for size in (member.memory, member.memory_free))
                raise BadInput(f"the job needs {need} on {member.name}, which has {has}", "lower batch_size")
        busy = {ranks[member.name]: member.busy for member in found.members}
        return Cost(found.step, busy, found.exchange, choice.interval)


def choice_of(profile: Profile, members: tuple[str, ...]) -> Choice:
    """Return the way to train that a profile names, over the mesh of some machines."""
    settings, rhythm = profile.strategy, rhythm_of(profile.strategy)
    kind = strategy_class(settings.strategy)
    return Choice(
        strategy=settings.strategy,
        codec=kind.codec(kind.resumed(settings)),
        engine="mesh",
        members=members,
        interval=rhythm.interval,
        delay=rhythm.delay,
    )


def job_after(profile: Profile, trainable: int, steps: int, samples: int) -> Job:
    """Return the job of a run that tells so much of itself: trainable parameters, steps and samples."""
    training = profile.training.model_copy(update={"max_steps": steps})
    counts: dict[str, Any] = {"trainable": trainable, "total": trainable, "samples": max(1, samples)}
    workload = Workload(tuning=profile.model.tuning, **counts)
    return job_of(profile.model_copy(update={"training": training}), workload)
