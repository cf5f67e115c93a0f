"""Simulated machines: reads them from a file, and predicts the time of a simulated run on them.

The file holds groups of equal machines (:class:`Groups`), written by the user, or measured figures
(:class:`distributed.planning.documents.document.Figures`). The time of a step comes from the planner's
:class:`Predictor`, which is compared with real runs at the end of each.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, model_validator

from distributed.planning import cost_model
from distributed.planning.cost_model import LINE_SHARE
from distributed.planning.documents.cluster import (
    LARGEST_FILE,
    Cluster,
    ClusterMachine,
    Document,
    DocumentFile,
    Link,
    Measurement,
    Name,
)
from distributed.planning.documents.document import Choice, Figures, Job, Workload, job_of
from distributed.planning.prediction import BatchSplit, Predictor
from profiles.errors import BadInput, counted
from profiles.quantities import memory_text, setting_text
from profiles.schema import Profile
from training.records.bounded_fields import first_problem
from training.records.plan import ClockPlan, RunPlan
from training.simulated.clock import Absence, Cost
from training.strategies.registry import cost_model as costs_of
from training.strategies.registry import segment_steps_of, strategy_class
from training.strategies.user_strategy import sync_schedule_of

_MOST_MEMBERS = 1024
"""Largest number of members of a simulated run."""
_LONGEST_NAME = 100
_MADE_BY = "distributed.planning.simulated:ClusterClock"


class AccessLink(Document):
    """The line that connects a machine with all others."""

    mbit: Annotated[float, Field(gt=0, le=1e6)]
    """Line rate in each direction, including protocol overhead."""
    latency_ms: Annotated[float, Field(ge=0, le=1e5)] = 0.0
    """Round trip between two such machines; the mean of both between different ones."""


class Group(Document):
    """A group of equal machines."""

    name: Name
    count: Annotated[int, Field(ge=1, le=_MOST_MEMBERS)] = 1
    samples_per_s: Annotated[float, Field(ge=1e-6, le=1e9)]
    """Speed of one machine with the job."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Memory that training may use, in 10^9 bytes; not given: enough."""
    link: AccessLink
    lost_per_hour: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Mean rate at which a machine is lost."""
    back_after_minutes: Annotated[float, Field(ge=0, le=1e6)] = 10.0


class Groups(DocumentFile):
    """A file of groups of machines."""

    when_missing: ClassVar[str] = "name a file of machines with --cluster FILE; docs/how-to/scale.md has an example"
    when_broken: ClassVar[str] = "docs/how-to/scale.md says what a file of machines may hold"

    groups: Annotated[tuple[Group, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_names(self) -> Groups:
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ValueError("two groups have the same name")
        if (size := sum(group.count for group in self.groups)) > _MOST_MEMBERS:
            raise ValueError(f"{size} machines are more than {_MOST_MEMBERS}")
        if len(self.group_of_machine) < size:
            raise ValueError("two machines have the same name: those of a group are numbered")
        if max(map(len, self.group_of_machine)) > _LONGEST_NAME:
            raise ValueError(f"a name has more than {_LONGEST_NAME} characters with its number")
        return self

    @cached_property
    def group_of_machine(self) -> dict[str, Group]:
        """The group of every machine, by the machine's name."""
        return {
            f"{group.name}-{number}" if group.count > 1 else group.name: group
            for group in self.groups
            for number in range(1, group.count + 1)
        }

    def cluster(self) -> AccessLineCluster:
        """Return the machines as the planner's figures."""
        return AccessLineCluster(
            machines=tuple(
                ClusterMachine(
                    name=name,
                    measurements=(Measurement(batch=1, seconds=1 / group.samples_per_s),),
                    memory_free=int(1e9 * (group.memory_gb or 0)),
                    interface_mbit=group.link.mbit * LINE_SHARE,
                )
                for name, group in self.group_of_machine.items()
            ),
            round_trips={name: group.link.latency_ms for name, group in self.group_of_machine.items()},
        )


class AccessLineCluster(Cluster):
    """Machines with an access line each, in a network that is otherwise never the bottleneck."""

    machines: Annotated[tuple[ClusterMachine, ...], Field(min_length=1, max_length=_MOST_MEMBERS)]
    round_trips: dict[str, float]
    """Milliseconds, by machine."""

    @cached_property
    def _paths(self) -> dict[str, tuple[float, float]]:
        return {machine.name: (machine.interface_mbit, self.round_trips[machine.name]) for machine in self.machines}

    @cached_property
    def _links(self) -> dict[tuple[tuple[float, float], tuple[float, float]], Link]:
        return {}

    def link(self, source: str, target: str) -> Link | None:
        ends = self._paths[source], self._paths[target]
        if ends not in self._links:
            (source_rate, source_trip), (target_rate, target_trip) = ends
            slower_rate = min(source_rate, target_rate)
            self._links[ends] = Link(
                source=source,
                target=target,
                mbit=slower_rate,
                mbit_back=slower_rate,
                rtt_ms=(source_trip + target_trip) / 2,
            )
        return self._links[ends]

    def can_be_bottleneck(self, link: Link) -> bool:
        return False  # the access lines at its ends are at most as fast

    def coordinator(self, candidates: object = None) -> str:
        return ""  # nothing is relayed


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
            BadInput: the file is missing or invalid; names the wrong field.
        """
        try:
            holds_figures = path.stat().st_size <= LARGEST_FILE and "cluster" in json.loads(path.read_bytes())
        except (OSError, ValueError, TypeError, RecursionError):
            holds_figures = False  # reading it as a document raises the error
        return cls((Figures if holds_figures else Groups).read(path))

    def with_clock(self, plan: RunPlan) -> RunPlan:
        """Return the plan of a simulated run with the machines' names and a clock; the batch is split by their speeds,
        unless the profile sets the shares.

        Raises:
            BadInput: the plan has another number of members, nothing was measured, or the strategy's costs are not
                known.
        """
        if len(self.names) != plan.world_size:
            count = counted(len(self.names), "machine")
            hint = f"write --simulate {len(self.names)}, or change the number of machines in the file"
            raise BadInput(f"the file of machines has {count}, the run {counted(plan.world_size, 'member')}", hint)
        machines = [self.cluster.machine(name) for name in self.names]
        if unmeasured := [machine.name for machine in machines if not machine.speed]:
            raise BadInput(
                f"the file of machines has no measured speed of {unmeasured[0]}", "measure it, or leave it out"
            )
        batches = [member.batch_size for member in plan.members]
        is_asynchronous = segment_steps_of(plan.profile.strategy) > 0
        if not plan.profile.run.shares and not is_asynchronous:
            speeds, overheads = [m.speed for m in machines], [m.overhead for m in machines]
            caps = [sum(batches)] * len(batches)
            batches = cost_model.split_samples(sum(batches), overheads, speeds, caps) or batches
        members = tuple(
            member.model_copy(update={"name": self.names[member.rank], "batch_size": batches[member.rank]})
            for member in plan.members
        )
        clock = ClockPlan(made_by=_MADE_BY, machines=self.document.model_dump(mode="json", exclude_defaults=True))
        timed_plan = plan.model_copy(update={"members": members, "clock": clock})
        if ClusterClock(timed_plan).absences and is_asynchronous:
            message = f"with {plan.profile.strategy.strategy} machines that are lost on the way cannot be simulated"
            raise BadInput(message, "leave lost_per_hour out, or take another strategy")
        seconds = [m.overhead + batches[rank] / m.speed for rank, m in enumerate(machines)]
        return _with_speeds(timed_plan, [1 / step for step in seconds]) if is_asynchronous else timed_plan


def _with_speeds(plan: RunPlan, speeds: list[float]) -> RunPlan:
    """Return the plan with the relative speeds of its members, unless the profile sets them."""
    settings = plan.profile.strategy
    if getattr(settings.owned.get(settings.strategy), "speeds", ""):
        return plan
    text = ",".join(setting_text(round(max(0.001, speed / max(speeds)), 4)) for speed in speeds)
    strategy = settings.with_options_of(settings.strategy, speeds=text)
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"strategy": strategy})})


class ClusterClock:
    """Clock of a simulated run: the times of a plan's steps on its machines.

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
        self._costs: dict[tuple[object, ...], Cost] = {}
        group_of_rank = document.group_of_machine.values() if isinstance(document, Groups) else ()
        self.absences = {
            rank: Absence(group.lost_per_hour / 3600, group.back_after_minutes * 60)
            for rank, group in enumerate(group_of_rank)
            if group.lost_per_hour
        }

    def cost(self, members: tuple[int, ...], trainable: int, steps: int) -> Cost:
        """Return the time of a step of some members; see :class:`training.simulated.clock.Clock`."""
        if self._predictor is None:
            job = job_after(self._plan.profile, trainable, steps, steps * self._plan.global_batch)
            self._predictor = Predictor(self._machines.cluster, job)
        ranks_by_kind: dict[object, list[int]] = {}
        for rank in members:
            ranks_by_kind.setdefault(self._kind(rank), []).append(rank)
        key = tuple((kind, len(ranks)) for kind, ranks in ranks_by_kind.items())
        if key not in self._costs:
            self._costs[key] = self._predict_cost(members)
        cost = self._costs[key]
        if cost.busy.keys() != set(members):  # other members, but as many of each kind
            by_kind = {self._kind(rank): seconds for rank, seconds in cost.busy.items()}
            busy = {rank: by_kind[self._kind(rank)] for rank in members}
            cost = Cost(cost.seconds, busy, cost.exchange, cost.interval)
        return cost

    def _kind(self, rank: int) -> object:
        """Return a key that is equal for members with equal costs."""
        document = self._machines.document
        batch = self._plan.members[rank].batch_size
        if not isinstance(document, Groups):
            return rank
        return document.group_of_machine[self._machines.names[rank]].name, batch

    def _predict_cost(self, members: tuple[int, ...]) -> Cost:
        assert self._predictor is not None
        cluster, passes = self._machines.cluster, self._plan.profile.training.gradient_accumulation
        ranks = {self._machines.names[rank]: rank for rank in members}
        names = tuple(sorted(ranks))
        batches = {name: self._plan.members[ranks[name]].batch_size for name in names}
        machines = map(cluster.machine, names)
        seconds = {m.name: passes * (m.overhead + batches[m.name] / m.speed) for m in machines}
        choice = choice_of(self._plan.profile, names)
        candidate = self._predictor.candidate(choice, BatchSplit(batches, passes, seconds, fits=True))
        for member in candidate.members:
            if member.memory_free and member.memory > member.memory_free:
                need, has = map(memory_text, (member.memory, member.memory_free))
                raise BadInput(f"the job needs {need} on {member.name}, which has {has}", "lower batch_size")
        busy = {ranks[member.name]: member.busy for member in candidate.members}
        return Cost(candidate.step, busy, candidate.exchange, choice.interval)


def choice_of(profile: Profile, members: tuple[str, ...]) -> Choice:
    """Return the choice of a profile's strategy, over the mesh of some machines."""
    settings, schedule = profile.strategy, sync_schedule_of(profile.strategy)
    kind = strategy_class(settings.strategy)
    return Choice(
        strategy=settings.strategy,
        codec=kind.codec(kind.settings_for_resume(settings)),
        engine="mesh",
        members=members,
        interval=schedule.interval,
        delay=schedule.delay,
    )


def job_after(profile: Profile, trainable: int, steps: int, samples: int) -> Job:
    """Return the job of a run of which only trainable parameters, steps and samples are known.

    Args:
        samples: of all steps, each as often as it was trained on.
    """
    passes = 1.0 if profile.training.max_steps else profile.training.epochs
    training = profile.training.model_copy(update={"max_steps": steps, "epochs": passes})
    counts: dict[str, Any] = {"trainable": trainable, "total": trainable, "samples": max(1, round(samples / passes))}
    workload = Workload(tuning=profile.model.tuning, **counts)
    return job_of(profile.model_copy(update={"training": training}), workload)
