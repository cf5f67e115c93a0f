"""Measure all machines of a hosts file and the links between them, for one profile."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from distributed.hosts.schema import Hosts
from distributed.machine.link import (
    HERE_NAME,
    Dial,
    HereConnection,
    MachineLink,
    Tell,
    address_towards,
    link_to,
    this_machine,
)
from distributed.measuring.link_figures import (
    AllInterfaces,
    PairFigures,
    Probe,
    is_starter,
    measure_interfaces,
    measure_links,
    probing,
)
from distributed.measuring.machine_figures import (
    Placement,
    SpeedFigures,
    StartBarrier,
    coordinator_candidate,
    ended_by,
    estimated,
    placements_of,
)
from distributed.measuring.short_runs import ShortRuns
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, MeasurementCache
from distributed.planning.documents.document import Figures, Workload
from distributed.planning.layouts.divided_plan import fit_or_divide
from distributed.preparation.code_sync import Inputs, collect
from distributed.preparation.members import plan_run
from distributed.preparation.model_blocks import BlockInputs, blocks_to_measure
from distributed.preparation.preflight import Ready, check, memory_budgets, ready, take_every_gpu
from distributed.ssh.connection import Trust
from profiles.errors import BadInput, MusterError, counted
from profiles.schema import Profile
from training.records.events import BUSY
from training.records.plan import RunPlan

_SPEED_OPTIONS = ("batch_size", "gradient_accumulation", "mixed_precision", "device", "threads")
_EVALUATION_OPTIONS = ("eval_batch_size", "eval_generate", "eval_max_new_tokens")
"""The options that the times of a step and of an evaluation depend on, apart from model and data."""


_LOCAL = f"{HereConnection.fingerprint} at "
"""Begin of the identity of this machine: it has a name of its own where it only starts a run."""


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure."""

    links: bool = True
    machines: bool = True
    max_age: float = 24 * 3600.0
    """Maximum age of cached figures in seconds; 0 measures everything again."""
    doubtful_age: float = 0.0
    """Maximum age of figures of a machine or link that was busy, or of a link that could not be measured."""
    tell: Tell = lambda line: None
    """Called with a line for each step."""
    cache: MeasurementCache = field(default_factory=MeasurementCache)
    skip: threading.Event = field(default_factory=threading.Event)
    """Set to end the short runs with the figures so far; machines without any get those of another one."""


@dataclass
class MeasurementResult:
    """All figures after measuring, fresh and cached."""

    names: list[str]
    pairs: list[PairFigures] = field(default_factory=list)
    speeds: list[SpeedFigures] = field(default_factory=list)
    problems: list[MusterError] = field(default_factory=list)
    """Errors of machines that could not run the task."""
    local_name: str = ""
    """Name of this machine."""
    model_path: str = ""
    interfaces: AllInterfaces = AllInterfaces()
    """Figures of machines whose interface may carry more than any of their links shows."""

    @property
    def figures(self) -> Figures:
        """The document that the planner reads.

        Raises:
            BadInput: no machine has run the task, so the workload is unknown.
        """
        if not self.speeds:
            raise BadInput("no machine has run the task, so there is nothing to plan with", "measure with --machines")
        workload: Workload = self.speeds[0].workload.model_copy(update={"model_path": self.model_path})
        first_members: dict[str, str] = {self.local_name: self.local_name} if self.local_name else {}
        """By machine: links belong to machines, and stand under the name of one member of each."""
        members = sorted((speed.machine for speed in self.speeds), key=lambda machine: machine.name, reverse=True)
        first_members |= {member.machine_name: member.name for member in members}
        links = tuple(link for pair in self.pairs for link in _between_members(pair, first_members))
        machines = tuple(self._as_connected(speed.machine, links) for speed in self.speeds)
        local_name = first_members.get(self.local_name, "")
        if local_name and all(machine.name != local_name for machine in machines):
            candidate = coordinator_candidate(local_name)
            machines = (*machines, candidate.model_copy(update={"interface_mbit": self._interface(candidate, links)}))
        cluster = Cluster(machines=machines, links=links, here=local_name)
        return Figures(cluster=cluster, workload=workload, measured_at=time.time())

    def _as_connected(self, machine: ClusterMachine, links: Sequence[Link]) -> ClusterMachine:
        """Return a machine with what its network interface carries, and whether that is wireless."""
        ends = ((pair.figures, pair) for pair in self.pairs if pair.figures is not None)
        wifi = any(
            (figures.wireless and machine.machine_name == pair.source)
            or (figures.wireless_back and machine.machine_name == pair.target)
            for figures, pair in ends
        )
        return machine.model_copy(update={"interface_mbit": self._interface(machine, links), "wifi": wifi})

    def _interface(self, machine: ClusterMachine, links: Sequence[Link]) -> float:
        """Return what an interface carries in each direction in Mbit/s: its fastest link, or several links together."""
        link_rates = (max(link.mbit, link.mbit_back) for link in links if machine.name in (link.source, link.target))
        combined_rates = (card.each_way for card in self.interfaces.figures if card.machine == machine.machine_name)
        return max([*link_rates, *combined_rates], default=0.0)


def _between_members(pair: PairFigures, first_members: Mapping[str, str]) -> list[Link]:
    """Return the pair's link under the names of the members of both machines."""
    source, target = first_members.get(pair.source), first_members.get(pair.target)
    return [pair.link.model_copy(update={"source": source, "target": target})] if source and target else []


def measure(hosts: Hosts, profile: Profile, options: MeasureOptions, trust: Trust | None = None) -> MeasurementResult:
    """Measure all machines and links whose cached figures are missing or too old.

    Raises:
        NotReady: a machine cannot take part.
        MusterError: the data or the machines cannot be used.
    """
    machines = ready(check(hosts, profile.model.task, trust))
    take_every_gpu(profile, machines)
    try:
        return measure_ready(machines, fit_or_divide(profile, memory_budgets(profile, machines), options.tell), options)
    finally:
        for link, _ in machines:
            link.close()


def measure_ready(
    machines: Sequence[Ready], profile: Profile, options: MeasureOptions, stages: Stages | None = None
) -> MeasurementResult:
    """Measure machines that are connected and ready, as :func:`measure` does; the links stay open.

    Where this machine does not train, the links to it are measured too: the coordinator of a run is here.

    Raises:
        MusterError: the data or the machines cannot be used.
    """
    stages = stages or Stages()
    plan = stages.plan(profile, machines)
    placements = placements_of(machines, plan.members)
    local_identity = identity_of_this_machine([link for link, _ in machines])
    ends = [
        (link, local_identity if link.machine.is_local else f"{facts.machine_key} at {facts.address}")
        for link, facts in machines
    ]
    local_name = next((link.name for link, _ in machines if link.machine.is_local), "")
    names = [link.name for link, _ in ends]
    with contextlib.ExitStack() as stack:
        if not local_name:
            starter = local_link(names)
            stack.callback(starter.close)
            ends.append((starter, local_identity))
            local_name = starter.name
        result = MeasurementResult(names, local_name=local_name, model_path=profile.model.model_path)
        barrier = StartBarrier()
        with ended_by(options.skip, barrier), ThreadPoolExecutor(1) as pool:
            speeds = pool.submit(stages.speeds, placements, plan, options, barrier)
            speeds.add_done_callback(lambda _: barrier.brought.set())
            try:
                barrier.brought.wait()
                result.pairs, result.interfaces = stages.links(ends, options)
                barrier.open()
                result.speeds, result.problems = speeds.result()
            except BaseException:
                barrier.give_up()
                raise
    return result


def identity_of_this_machine(links: Sequence[MachineLink], towards: Callable[[str], str] = address_towards) -> str:
    """Return the identity of this machine in the cache key of a link.

    As for the other machines it includes the address, because figures of a link hold the addresses that a run dials.
    """
    remote_host = next((link.host for link in links if link.host and not link.machine.is_local), "")
    return f"{_LOCAL}{towards(remote_host) if remote_host else ''}"


def local_link(taken: Sequence[str], dial: Dial = link_to) -> MachineLink:
    """Return a link to this machine under a name that is not taken."""
    name = HERE_NAME
    while name in taken:
        name += "'"
    hosts = this_machine(name)
    return dial(hosts.machines[0], hosts, None)


@dataclass(frozen=True)
class LinkStages:
    """The stages of measuring links: start probes, measure each pair, measure interfaces with several peers at once."""

    probing: Callable[[Sequence[MachineLink]], contextlib.AbstractContextManager[dict[str, Probe]]] = probing
    pairs: Callable[..., list[PairFigures]] = measure_links
    interfaces: Callable[..., AllInterfaces] = measure_interfaces


def current_links(
    ends: Sequence[tuple[MachineLink, str]], options: MeasureOptions, stages: LinkStages | None = None
) -> tuple[list[PairFigures], AllInterfaces]:
    """Return the figures of links and interfaces, measured again where cached ones are too old.

    ``ends`` are machine links with the identity and address of each machine.
    """
    identities = {link.name: identity for link, identity in ends}
    local_name = next((name for name, identity in identities.items() if identity.startswith(_LOCAL)), "")
    pairs = list(itertools.combinations(identities, 2))
    cache, tell = options.cache, options.tell
    age, doubtful_age = (options.max_age, options.doubtful_age) if options.links else (float("inf"), float("inf"))

    def key(source: str, target: str) -> dict[str, Any]:
        return {"pair": sorted((identities[source], identities[target]))}

    def earlier(source: str, target: str) -> PairFigures | None:
        """Return cached figures of a pair if the machines still have these names; this one may have another."""
        cached = cache.get(PairFigures, key(source, target), age)
        if cached is not None and (cached.figures is None or cached.busy):
            cached = cache.get(PairFigures, key(source, target), min(age, doubtful_age))
        if cached is not None and local_name in (source, target):
            cached = cached.with_name_beside(target if source == local_name else source, local_name)
        return cached if cached is not None and {cached.source, cached.target} == {source, target} else None

    cached_pairs = [pair for source, target in pairs if (pair := earlier(source, target)) is not None]
    group_names = {name: "" if name == local_name else f" as {name}" for name in identities}
    group = {"group": sorted(f"{identity}{group_names[name]}" for name, identity in identities.items())}
    # with two machines the single link already shows everything
    interfaces = AllInterfaces() if len(identities) < 3 else cache.get(AllInterfaces, group, age)
    if interfaces is not None and local_name:
        interfaces = interfaces.with_other_name(local_name, identities)
    if not options.links or (len(cached_pairs) == len(pairs) and interfaces is not None):
        return cached_pairs, interfaces or AllInterfaces()
    stages = stages or LinkStages()
    has_starter = any(map(is_starter, identities))
    here = ", and how fast this computer, which does not train, copies to them" if has_starter else ""
    tell(f"starting to measure on {counted(len(identities) - has_starter, 'machine')}{here}")
    with stages.probing([link for link, _ in ends]) as probes:
        skipped = [frozenset((pair.source, pair.target)) for pair in cached_pairs]
        missing = sum(frozenset(pair) not in skipped and not any(map(is_starter, pair)) for pair in pairs)
        if missing:
            tell(f"measuring {counted(missing, 'link')}")
        number = itertools.count(1)
        fresh = stages.pairs(
            probes,
            lambda pair: tell(_measured(pair, "" if pair.from_starter else f" ({next(number)} of {missing})")),
            skipped,
        )
        all_pairs = [*cached_pairs, *fresh]
        interfaces = stages.interfaces(probes, all_pairs, tell)
    for pair in fresh:
        cache.put(key(pair.source, pair.target), pair)
    cache.put(group, interfaces)
    return all_pairs, interfaces


def _measured(pair: PairFigures, progress: str) -> str:
    """Return that a pair was measured, in words."""
    return f"{' - '.join(pair.labels)}: measured{progress}"


def current_speeds(
    placements: Sequence[Placement], plan: RunPlan, options: MeasureOptions, barrier: StartBarrier
) -> tuple[list[SpeedFigures], list[MusterError]]:
    """Run the task on all members without fresh figures at the same time, as in a run.

    Returns:
        Figures of the members that could be measured, and the errors of the others.
    """
    inputs, tell = collect(plan), options.tell
    blocks = BlockInputs(plan.profile, options.cache.folder / f"blocks-{os.getpid()}", blocks_to_measure(plan.profile))
    speeds = usable_speeds(placements, inputs, options)
    if speeds:
        barrier.measured.set()
    missing = [placement for placement in placements if placement.member.name not in speeds] if options.machines else []
    if missing:
        names = ", ".join(placement.member.name for placement in missing)
        tell(f"measuring {names} with a few steps (the first time, their data are prepared)")
    runs = ShortRuns(missing, inputs, blocks, barrier, tell)
    runs.carry_out()
    fresh = runs.figures
    is_whole = not barrier.given_up.is_set()
    if not is_whole and (measured := [*speeds.values(), *fresh.values()]):
        guessed = [placement for placement in missing if placement.member.name not in fresh]
        speeds |= {placement.member.name: estimated(placement, measured) for placement in guessed}
    for placement in missing:
        if placement.member.name in fresh and is_whole:
            options.cache.put(_placement_key(placement, inputs), fresh[placement.member.name])
    speeds |= fresh
    return [speeds[placement.member.name] for placement in placements if placement.member.name in speeds], runs.problems


def plan_to_measure(profile: Profile, machines: Sequence[Ready]) -> RunPlan:
    """Return the plan of the short runs: each device is a member, also where all of them will hold one model."""
    alone = {"run": profile.run.model_copy(update={"layout": "replicate", "stages": 0})}
    plan = plan_run(profile.model_copy(update=alone), machines)
    run = plan.profile.run.model_copy(update={"layout": profile.run.layout, "stages": profile.run.stages})
    return plan.model_copy(update={"profile": plan.profile.model_copy(update={"run": run})})


@dataclass(frozen=True)
class Stages:
    """The stages of :func:`measure_ready`: machines receive the task while links are measured, then run it."""

    plan: Callable[[Profile, Sequence[Ready]], RunPlan] = plan_to_measure
    links: Callable[..., tuple[list[PairFigures], AllInterfaces]] = current_links
    speeds: Callable[..., tuple[list[SpeedFigures], list[MusterError]]] = current_speeds


def usable_speeds(placements: Sequence[Placement], inputs: Inputs, options: MeasureOptions) -> dict[str, SpeedFigures]:
    """Return the cached figures that are recent enough; all of them if machines are not to be measured."""
    age, doubtful_age = (options.max_age, options.doubtful_age) if options.machines else (float("inf"), float("inf"))
    speeds = cached_speeds(placements, inputs, options.cache, age)
    recent = cached_speeds(placements, inputs, options.cache, min(age, doubtful_age))
    return {name: speed for name, speed in speeds.items() if speed.machine.others < BUSY or name in recent}


def cached_speeds(
    placements: Sequence[Placement], inputs: Inputs, cache: MeasurementCache, max_age: float = float("inf")
) -> dict[str, SpeedFigures]:
    """Return the cached figures of those members that have some, by name."""
    cached = ((p.member, cache.get(SpeedFigures, _placement_key(p, inputs), max_age)) for p in placements)
    return {member.name: figures.of(member) for member, figures in cached if figures is not None}


def _placement_key(placement: Placement, inputs: Inputs) -> dict[str, Any]:
    """Cache key of a member's speed: the machine, its torch, the model, the data, and the options that matter."""
    sections = inputs.plan.profile.model_dump(mode="json", include={"model", "data", "training", "evaluation"})
    options = {"training": _SPEED_OPTIONS, "evaluation": _EVALUATION_OPTIONS}
    profile = {**sections, **{of: {name: sections[of][name] for name in names} for of, names in options.items()}}
    trees = {folder: tree.name for folder, tree in inputs.trees.items() if folder != "inputs/code"}
    member, device = placement.member, placement.member.lead
    work = (member.batch_size, member.data, device.kind, device.index, device.threads)
    text = repr([sorted(profile.items()), sorted(trees.items()), work])
    if inputs.plan.profile.run.layout == "pipeline":
        text += "by blocks"
    return {
        "identity": placement.facts.machine_key,
        "torch": placement.facts.torch,
        "task": hashlib.sha256(text.encode()).hexdigest(),
    }
