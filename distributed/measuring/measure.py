"""Measure all machines of a hosts file and the links between them, for one profile."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
    measure_interfaces,
    measure_links,
    probing,
)
from distributed.measuring.machine_figures import (
    Placement,
    SpeedFigures,
    StartBarrier,
    bring,
    measure_member,
    placements_of,
)
from distributed.planning.cluster import Cluster, ClusterMachine, Link, MeasurementCache
from distributed.planning.document import Figures, Workload
from distributed.planning.fitting import fit
from distributed.preparation.code_sync import Inputs, collect
from distributed.preparation.preflight import Ready, check, plan_run, ready, rooms_of
from distributed.ssh.connection import Trust
from profiles.errors import BadInput, MusterError, counted
from profiles.schema import Profile
from training.plan import RunPlan
from training.resources import free_cores

_OF_THE_SPEED = ("batch_size", "gradient_accumulation", "mixed_precision", "device", "threads")
"""The training options that the time of a step alone depends on, beside model and data."""


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure."""

    links: bool = True
    machines: bool = True
    max_age: float = 24 * 3600.0
    """Seconds that earlier figures may be old; 0 measures everything anew."""
    doubtful_age: float = 0.0
    """The same of a link that was busy or could not be measured."""
    tell: Tell = lambda line: None
    """Hears a line for each step."""
    cache: MeasurementCache = field(default_factory=MeasurementCache)


@dataclass
class MeasurementResult:
    """What is known after measuring."""

    names: list[str]
    pairs: list[PairFigures] = field(default_factory=list)
    speeds: list[SpeedFigures] = field(default_factory=list)
    problems: list[MusterError] = field(default_factory=list)
    """Of machines that could not run the task."""
    here: str = ""
    model_path: str = ""
    interfaces: AllInterfaces = AllInterfaces()
    """Of machines that may have more to give than any of their links shows."""

    @property
    def figures(self) -> Figures:
        """The document that the planner reads.

        Raises:
            BadInput: nothing is known of what the task is.
        """
        if not self.speeds:
            raise BadInput("no machine has run the task, so there is nothing to plan with", "measure with --machines")
        workload: Workload = self.speeds[0].workload.model_copy(update={"model_path": self.model_path})
        members = {one.machine.name for one in self.speeds}
        every = {*members, *filter(None, [self.here])}
        links = tuple(link for pair in self.pairs for link in _between_members(pair, every))
        machines = tuple(self._as_connected(one.machine, links) for one in self.speeds)
        here = next((member for member in sorted(members) if _host(member, self.here)), self.here)
        if here and here not in members:
            machines = (*machines, _onlooker(here, self._interface(here, links)))
        cluster = Cluster(machines=machines, links=links, here=here)
        return Figures(cluster=cluster, workload=workload, measured_at=time.time())

    def _as_connected(self, machine: ClusterMachine, links: Sequence[Link]) -> ClusterMachine:
        """Return a machine with what its network interface carries, and whether that is wireless."""
        ends = ((pair.figures, pair) for pair in self.pairs if pair.figures is not None)
        wifi = any(
            (found.wireless and _host(machine.name, pair.source))
            or (found.wireless_back and _host(machine.name, pair.target))
            for found, pair in ends
        )
        return machine.model_copy(update={"interface_mbit": self._interface(machine.name, links), "wifi": wifi})

    def _interface(self, member: str, links: Sequence[Link]) -> float:
        """Return what an interface carries in each direction: its fastest link, and what several carry together."""
        own = (max(link.mbit, link.mbit_back) for link in links if member in (link.source, link.target))
        together = (one.each_way for one in self.interfaces.figures if _host(member, one.machine))
        return max([*own, *together], default=0.0)


def _onlooker(name: str, interface_mbit: float) -> ClusterMachine:
    """Return this machine where it does not train: it may carry the coordinator."""
    system = "darwin" if sys.platform == "darwin" else "linux"
    return ClusterMachine(
        name=name,
        identity=HereConnection.fingerprint,
        system=system,
        trains=False,
        cores=free_cores(),
        interface_mbit=interface_mbit,
    )


def _between_members(pair: PairFigures, members: Iterable[str]) -> list[Link]:
    """Return the pair's link under the names of the first members of both machines; links belong to machines."""
    ends = [next((s for s in sorted(members) if _host(s, name)), "") for name in (pair.source, pair.target)]
    return [pair.link.model_copy(update={"source": ends[0], "target": ends[1]})] if all(ends) else []


def _host(member: str, machine: str) -> bool:
    return member == machine or member.startswith(f"{machine}:")


def measure(hosts: Hosts, profile: Profile, options: MeasureOptions, trust: Trust | None = None) -> MeasurementResult:
    """Measure what is not known well enough.

    Raises:
        NotReady: a machine cannot take part.
        MusterError: the data or the machines cannot be used.
    """
    machines = ready(check(hosts, profile.model.task, trust))
    try:
        return measure_ready(machines, fit(profile, rooms_of(profile, machines), options.tell), options)
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
    place = own_place([link for link, _ in machines])
    ends = [
        (link, place if link.machine.here else f"{facts.machine_key} at {facts.address}") for link, facts in machines
    ]
    here = next((link.name for link, _ in machines if link.machine.here), "")
    names = [link.name for link, _ in ends]
    with contextlib.ExitStack() as stack:
        if not here:
            own = here_link(names)
            stack.callback(own.close)
            ends.append((own, place))
            here = own.name
        found = MeasurementResult(names, here=here, model_path=profile.model.model_path)
        gate = StartBarrier()
        with ThreadPoolExecutor(1) as pool:
            speeds = pool.submit(stages.speeds, placements, plan, options, gate)
            speeds.add_done_callback(lambda _: gate.brought.set())
            try:
                gate.brought.wait()
                found.pairs, found.interfaces = stages.links(ends, options)
                gate.open()
                found.speeds, found.problems = speeds.result()
            except BaseException:
                gate.give_up()
                raise
    return found


def own_place(links: Sequence[MachineLink], towards: Callable[[str], str] = address_towards) -> str:
    """Return what this machine is in a link's key: like the others' with the address it has, because figures of a link
    hold the addresses that a run dials."""
    far = next((link.host for link in links if link.host and not link.machine.here), "")
    return f"{HereConnection.fingerprint} at {towards(far) if far else ''}"


def here_link(taken: Sequence[str], dial: Dial = link_to) -> MachineLink:
    """Return a link to this machine under a name that no other has."""
    name = HERE_NAME
    while name in taken:
        name += "'"
    hosts = this_machine(name)
    return dial(hosts.machines[0], hosts, None)


@dataclass(frozen=True)
class LinkStages:
    """How links are measured: programs on all machines, then each pair, then interfaces with several peers at once."""

    probing: Callable[[Sequence[MachineLink]], contextlib.AbstractContextManager[dict[str, Probe]]] = probing
    pairs: Callable[..., list[PairFigures]] = measure_links
    interfaces: Callable[..., AllInterfaces] = measure_interfaces


def current_links(
    ends: Sequence[tuple[MachineLink, str]], options: MeasureOptions, stages: LinkStages | None = None
) -> tuple[list[PairFigures], AllInterfaces]:
    """Return the links and what interfaces carry with several at once, measured where earlier figures are too old.

    ``ends`` are machines with their identities and addresses.
    """
    identities = {link.name: identity for link, identity in ends}
    pairs = list(itertools.combinations(identities, 2))
    cache, tell = options.cache, options.tell
    age, doubtful = (options.max_age, options.doubtful_age) if options.links else (float("inf"), float("inf"))

    def key(one: str, other: str) -> dict[str, Any]:
        return {"pair": sorted((identities[one], identities[other]))}

    def earlier(one: str, other: str) -> PairFigures | None:
        """Return earlier figures of a pair if the machines still have these names."""
        found = cache.get(PairFigures, key(one, other), age)
        if found is not None and (found.figures is None or found.busy):
            found = cache.get(PairFigures, key(one, other), min(age, doubtful))
        return found if found is not None and {found.source, found.target} == {one, other} else None

    known = [pair for one, other in pairs if (pair := earlier(one, other)) is not None]
    group = {"group": sorted(f"{identity} as {name}" for name, identity in identities.items())}
    # of two machines the one link tells all
    interfaces = AllInterfaces() if len(identities) < 3 else cache.get(AllInterfaces, group, age)
    if not options.links or (len(known) == len(pairs) and interfaces is not None):
        return known, interfaces or AllInterfaces()
    stages = stages or LinkStages()
    with stages.probing([link for link, _ in ends]) as probes:
        if len(known) < len(pairs):
            tell(f"measuring {counted(len(pairs) - len(known), 'link')} between {len(identities)} machines")
        skipped = [frozenset((pair.source, pair.target)) for pair in known]
        fresh = stages.pairs(probes, lambda pair: tell(f"{pair.source} - {pair.target}: measured"), skipped)
        found = [*known, *fresh]
        interfaces = stages.interfaces(probes, found, tell)
    for pair in fresh:
        cache.put(key(pair.source, pair.target), pair)
    cache.put(group, interfaces)
    return found, interfaces


def current_speeds(
    placements: Sequence[Placement], plan: RunPlan, options: MeasureOptions, gate: StartBarrier
) -> tuple[list[SpeedFigures], list[MusterError]]:
    """Run the task on all members at the same time, as in a run; those with fresh figures rest.

    Returns:
        Figures of the members that have some, and why others could not be measured.
    """
    inputs, tell = collect(plan), options.tell
    known = known_speeds(placements, inputs, options.cache, options.max_age if options.machines else float("inf"))
    missing = [number for number, one in enumerate(known) if one is None] if options.machines else []
    problems: list[MusterError] = []

    def attempt(step: Callable[[], None]) -> bool:
        try:
            step()
        except MusterError as error:
            problems.append(error)
            return False
        return True

    def run(number: int) -> None:
        known[number] = measure_member(placements[number], inputs, gate, tell)
        tell(f"{placements[number].member.name}: measured")

    if missing:
        names = ", ".join(placements[number].member.name for number in missing)
        tell(f"running the task briefly; the first time its data are prepared: {names}")
    links = list(dict.fromkeys(placements[number].link for number in missing))
    with ThreadPoolExecutor(max(1, len(missing))) as pool:
        given_up = gate.given_up.is_set
        brought = pool.map(lambda link: attempt(lambda: bring(link, inputs, tell, given_up)), links)
        fit = dict(zip(links, brought, strict=True))
        gate.brought.set()
        able = [number for number in missing if fit[placements[number].link]]
        list(pool.map(lambda number: attempt(lambda: run(number)), able))
    for number in missing:
        if (fresh := known[number]) is not None:
            options.cache.put(_placement_key(placements[number], inputs), fresh)
    now = [one.of(placed.member.name) for one, placed in zip(known, placements, strict=True) if one is not None]
    return now, problems


@dataclass(frozen=True)
class Stages:
    """What :func:`measure_ready` does: machines receive their task beside the links, and run it after them."""

    plan: Callable[[Profile, Sequence[Ready]], RunPlan] = plan_run
    links: Callable[..., tuple[list[PairFigures], AllInterfaces]] = current_links
    speeds: Callable[..., tuple[list[SpeedFigures], list[MusterError]]] = current_speeds


def known_speeds(
    placements: Sequence[Placement], inputs: Inputs, cache: MeasurementCache, max_age: float = float("inf")
) -> list[SpeedFigures | None]:
    """Return what was measured before, member by member."""
    return [cache.get(SpeedFigures, _placement_key(placed, inputs), max_age) for placed in placements]


def _placement_key(placed: Placement, inputs: Inputs) -> dict[str, Any]:
    """What the speed of a member depends on: the machine, its torch, the model, the data, and how they are trained."""
    whole = inputs.plan.profile.model_dump(mode="json", include={"model", "data", "training"})
    profile = {**whole, "training": {name: whole["training"][name] for name in _OF_THE_SPEED}}
    trees = {place: tree.name for place, tree in inputs.trees.items() if place != "inputs/code"}
    member = placed.member.model_dump(mode="json", exclude={"rank", "name", "interface"})
    text = repr([sorted(profile.items()), sorted(trees.items()), sorted(member.items())])
    return {
        "identity": placed.facts.machine_key,
        "torch": placed.facts.torch,
        "task": hashlib.sha256(text.encode()).hexdigest(),
    }
