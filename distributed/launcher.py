"""Launches a run from a profile and a hosts file: measures where figures are old, plans, and starts the supervisor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from distributed.checks.lending import require_permitted
from distributed.checks.machine_data import require_data
from distributed.hosts.file import RUN_HOSTS, Hosts, save_hosts
from distributed.machine.link import MachineLink, Tell, address_towards
from distributed.measuring.known_speeds import with_known_speeds
from distributed.measuring.link_figures import PairFigures
from distributed.measuring.measure import MeasurementResult, MeasureOptions, measure_ready
from distributed.planning import planner
from distributed.planning.cables import cable_reasons
from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import (
    Figures,
    Planning,
    Preference,
    Reason,
    Settings,
    job_of,
)
from distributed.planning.feedback import corrections, write_planning
from distributed.planning.layouts.divided_plan import fit_or_divide, is_divided, plan_layout
from distributed.planning.reasons import sentence, why_in_words
from distributed.preparation.members import as_cut, can_have_members, check_machines, member_names, plan_run, starter_of
from distributed.preparation.preflight import NotReady, Ready, memory_budgets, take_every_gpu
from distributed.preparation.prepare import PrepareOptions, prepare, updated_hosts
from profiles.errors import BadInput
from profiles.installation import program
from profiles.schema import Profile
from training.layouts.compatibility import DIVIDED
from training.records.events import TimingEvent
from training.records.plan import MemberPlan, RunPlan
from training.records.run_folder import RunFolder
from training.records.run_index import remember
from training.run.processes import BackgroundProcess, PhaseTimer

DOUBTFUL_AGE = 3600.0
"""Maximum age in seconds of figures of what was busy, or could not be measured."""
_MOST_ROUTES = 6


@dataclass(frozen=True)
class PlanOptions:
    """The user's preferences for the plan."""

    preference: Preference = "fastest"
    max_loss_increase: float = 0.02
    max_age: float = 7 * 24 * 3600.0
    """Maximum age of figures of machines and links in seconds."""
    planning: Planning | None = None
    """An existing plan: nothing is measured, and it is used unchanged."""
    only_member: bool = False
    """Whether a divided model cannot have several members: the run has begun with one."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that is ready to start."""

    plan: RunPlan
    planning: Planning | None = None
    """The planner's result; ``None`` where there was nothing to choose."""
    figures: Figures | None = None
    """The figures it is based on, where they were measured just now."""


def plan_machines(
    machines: Sequence[Ready], profile: Profile, options: PlanOptions, tell: Tell = lambda line: None
) -> PlannedRun:
    """Return the plan of a run: chosen by the planner where the strategy is ``auto`` and there is a choice.

    Raises:
        NotReady: a machine could not run the task.
        BadInput: nothing fits, or the given plan is for other machines or another profile.
    """
    if options.planning is not None:
        return apply_planning(options.planning, profile, machines)
    is_chosen = profile.strategy.strategy != "auto" or profile.run.layout in DIVIDED
    if is_divided(profile):
        plan_run(profile, machines)  # refuses what a pipeline cannot have, before anything is measured
    elif is_chosen or len(member_names(machines)) == 1 or _is_one_machine_of_alike_gpus(machines):
        known = MeasureOptions(max_age=options.max_age, doubtful_age=DOUBTFUL_AGE, tell=tell)
        plan = plan_run(profile, machines, link_mbit=partial(_slowest_mbit, machines, profile, known))
        return PlannedRun(with_known_speeds(plan, profile, machines, known))
    planning, figures = propose(machines, profile, options, tell)
    return replace(apply_planning(planning, profile, machines), figures=figures)


def _slowest_mbit(machines: Sequence[Ready], profile: Profile, options: MeasureOptions) -> float:
    """Return the measured rate of the slowest link between two machines; 0: two have none."""
    measured = measure_ready(machines, profile, replace(options, machines=False))
    names = {link.name for link, _ in machines}
    pairs = [pair for pair in measured.pairs if {pair.source, pair.target} <= names]
    return min((min(pair.link.mbit, pair.link.mbit_back) for pair in pairs), default=0.0)


def _is_one_machine_of_alike_gpus(machines: Sequence[Ready]) -> bool:
    """Whether all members are GPUs of one kind in one machine, among which there is nothing to choose."""
    ((link, facts), *others) = machines
    return not others and facts.gpus_alike and all(device.startswith("cuda") for device in link.machine.devices)


def propose(
    machines: Sequence[Ready], profile: Profile, options: PlanOptions, tell: Tell = lambda line: None
) -> tuple[Planning, Figures]:
    """Measure whatever has no recent figures, and run the planner.

    Raises:
        NotReady: a machine could not run the task.
    """
    measure_options = MeasureOptions(max_age=options.max_age, doubtful_age=DOUBTFUL_AGE, tell=tell)
    measured = measure_ready(machines, profile, measure_options)
    if measured.problems:
        raise NotReady(measured.problems)
    return choose(measured, machines, profile, options), measured.figures


def choose(measured: MeasurementResult, machines: Sequence[Ready], profile: Profile, options: PlanOptions) -> Planning:
    """Run the planner, and add the best paths to its settings.

    The coordinator goes where the hosts file puts it, else to this machine or to a member that can be dialled directly.
    """
    figures = measured.figures
    cluster = figures.cluster
    job = job_of(profile, figures.workload, options.preference, options.max_loss_increase)
    if is_divided(profile):
        only_member = options.only_member or not can_have_members(machines)
        return planner.with_hashes(plan_layout(cluster, job, profile, only_member=only_member), cluster, profile)
    learnt_corrections, candidates = corrections(cluster, job), coordinators(cluster, machines)
    planning = planner.plan(cluster, job, candidates, learnt_corrections)
    if (chosen := planning.settings) is not None:
        starter = cluster.machine(cluster.here).machine_name if cluster.here else ""
        # Machines that do not take part are disconnected, so they cannot carry the coordinator.
        if chosen.coordinator not in ("", starter, *(member.machine for member in chosen.members)):
            candidates = [cluster.here]
            planning = planner.plan(cluster, job, candidates, learnt_corrections)
    planning = planner.with_hashes(planning, cluster, profile)
    if planning.settings is None:
        return planning
    settings = with_best_paths(planning.settings, measured, machines)
    remarks = tuple(expected_routes(settings, measured.pairs))
    remarks += (Reason.of("data-stay"),) if profile.data.local_data else ()
    remarks += tuple(
        cable_reasons(cluster, planning, lambda wired: planner.plan(wired, job, candidates, learnt_corrections))
    )
    return planning.model_copy(update={"settings": settings, "reasons": (*planning.reasons, *remarks)})


def expected_routes(settings: Settings, pairs: Sequence[PairFigures]) -> Iterator[Reason]:
    """Yield the expected route of each pair of chosen machines, as measured; many direct routes are only counted."""
    chosen = {member.machine for member in settings.members} if settings.engine == "mesh" else set()
    figures_by_pair = [(pair, pair.figures) for pair in pairs if {pair.source, pair.target} <= chosen]
    routes = []
    for pair, figures in figures_by_pair:
        if figures is not None:
            ends = f"{figures.interface or '?'} to {figures.interface_back or '?'}"
            destination = f"{pair.target} ({figures.address}, {ends})"
            code = "one-way" if pair.only else "small" if figures.loses_large else "direct"
            routes.append(Reason.of(code, pair.source, destination))
    if len(routes) > _MOST_ROUTES:
        yield Reason.of("all-direct", pairs=len([route for route in routes if route.code == "direct"]))
        routes = [route for route in routes if route.code != "direct"]
    yield from routes


def coordinators(cluster: Cluster, machines: Sequence[Ready]) -> list[str]:
    """Return the machines that may carry the coordinator: those that the hosts file names for it, else this one and
    those that can be dialled directly."""
    links = {link.name: link for link, _ in machines}
    names = {machine.machine_name: machine.name for machine in cluster.machines}
    requested = [
        name for machine, name in names.items() if machine in links and links[machine].machine.carries_coordinator
    ]
    return requested or [name for machine, name in names.items() if machine not in links or links[machine].host]


def with_best_paths(settings: Settings, measured: MeasurementResult, machines: Sequence[Ready]) -> Settings:
    """Return the settings with each member's interface, addresses, and route to the coordinator, as measured; members
    have the ranks of a run on these machines."""
    links = {link.name: link for link, _ in machines}
    order = {name: number for number, name in enumerate(member_names(machines))}
    coordinator = links.get(settings.coordinator)
    coordinator = None if coordinator is None or coordinator.machine.is_local else coordinator

    def connected(member: MemberPlan) -> MemberPlan:
        if member.machine not in links:
            return member
        interface, address = best_paths(links[member.machine], measured.pairs, coordinator, measured.local_name)
        addresses = addresses_of(member.machine, measured.pairs)
        return member.on_device(interface=interface, coordinator_address=address, addresses=addresses)

    in_order = sorted(settings.members, key=lambda member: order.get(member.name, len(order)))
    members = tuple(connected(m.model_copy(update={"rank": rank})) for rank, m in enumerate(in_order))
    return settings.model_copy(update={"members": members})


def addresses_of(name: str, pairs: Sequence[PairFigures]) -> tuple[str, ...]:
    """Return the addresses at which others reached a machine when links were measured, the fastest path first."""
    figures = [pair.figures for pair in pairs if pair.target == name and pair.figures is not None]
    by_rate = [(mbit, address) for link in figures for address, _, _, mbit in link.paths]
    by_rate += [(link.mbit, link.address) for link in figures]
    return tuple(dict.fromkeys(address for _, address in sorted(by_rate, reverse=True) if address))


def best_paths(
    link: MachineLink,
    pairs: Sequence[PairFigures],
    coordinator: MachineLink | None,
    local_name: str,
    towards: Callable[[str], str] = address_towards,
) -> tuple[str, str]:
    """Return the interface that most of a machine's best paths use, and the coordinator's address on its best path.

    The address is empty where it is the default anyway.

    Args:
        coordinator: the machine of the coordinator; ``None``: this one, which the pairs call ``local_name``.
        towards: returns the address of this machine on the route to another.
    """
    used: Counter[str] = Counter()
    address = ""
    center = coordinator.name if coordinator is not None else local_name
    for pair in pairs:
        if pair.figures is None or link.name not in (pair.source, pair.target):
            continue
        dials = link.name == pair.source
        used[pair.figures.interface if dials else pair.figures.interface_back] += 1
        if link.name != center and center in (pair.source, pair.target):
            local_address = "" if coordinator is not None else towards(pair.figures.address)
            address = pair.figures.address if dials else local_address
    default_address = coordinator.host if coordinator is not None else towards(link.host) if link.host else ""
    interface = used.most_common(1)[0][0] if used else ""
    return interface, "" if address == default_address or not link.host else address


def apply_planning(planning: Planning, profile: Profile, machines: Sequence[Ready]) -> PlannedRun:
    """Return the run that a plan describes.

    Raises:
        BadInput: it found no settings, is for another profile, or names a machine that is not among these.
    """
    if planning.settings is None:
        reasons = "; ".join(sentence(reason) for reason in planning.reasons[1:4])
        raise BadInput(f"nothing fits these machines: {reasons or 'no machine can train this'}", "take a smaller model")
    chosen = {member.name: member for member in planning.settings.members}
    names = planning.best.choice.members if planning.best is not None else tuple(chosen)
    if unknown := sorted(set(names) - {*member_names(machines)}):
        hint = f"make it again with: {program('machines', 'plan', 'PROFILE --out FILE')}"
        raise BadInput(f"the plan needs a machine that is missing here: {', '.join(unknown)}", hint)
    plan = plan_run(planning.overlay(profile), machines, names)
    engine = planning.settings.engine if plan.world_size > 1 else plan.engine
    plan = plan.model_copy(update={"engine": engine})
    if plan.in_clear and "nccl" not in (profile.strategy.engine, planning.job.engine):
        hint = "add --set engine=nccl if you want that, or make the plan again"
        raise BadInput("the plan sends training traffic unencrypted (engine nccl), and you did not ask for that", hint)
    links = {link.name: link for link, _ in machines if link.name in plan.machines}
    for link, _ in machines:
        if link.name not in links:
            link.close()
    if plan.is_staged:
        members = as_cut(plan.members, planning.settings.members, names, machines)
    else:
        members = tuple(_as_chosen(m, chosen[m.name], links[m.machine]) for m in plan.members)
    requested = planning.settings.coordinator
    coordinator = requested if requested in links else starter_of(links.values())
    return PlannedRun(plan.model_copy(update={"members": members, "coordinator": coordinator}), planning)


def _as_chosen(member: MemberPlan, chosen: MemberPlan, link: MachineLink) -> MemberPlan:
    """Return a member with what the planner chose for it; what the hosts file says of its machine comes first."""
    return member.model_copy(update={"batch_size": chosen.batch_size, "shard": chosen.shard}).on_device(
        interface=link.machine.interface or chosen.lead.interface or member.lead.interface,
        addresses=chosen.lead.addresses,
        coordinator_address=member.lead.coordinator_address or chosen.lead.coordinator_address,
    )


class DistributedLauncher:
    """Prepares machines, plans a run on them, and starts its supervisor.

    Args:
        whole_process: count the start-up time from the start of this process, not from this object.
    """

    def __init__(
        self,
        hosts: Hosts,
        profile: Profile,
        prepare_options: PrepareOptions | None = None,
        plan_options: PlanOptions | None = None,
        whole_process: bool = False,
    ) -> None:
        self._hosts = hosts
        self.profile = profile
        self._prepare_options = prepare_options or PrepareOptions()
        self._plan_options = plan_options or PlanOptions()
        self._timings: list[TimingEvent] = []
        self._phases = PhaseTimer(self._timings.append, whole_process)
        self._standby: BackgroundProcess | None = None

    def plan(self) -> PlannedRun:
        """Prepare all machines and return the plan of a run on them; their connections are closed again.

        Raises:
            NotReady: a machine cannot take part.
            BadInput: the profile does not fit that many members.
        """
        self._phases.end("command: program")
        if not self._prepare_options.allow_missing and self._plan_options.planning is None:
            check_machines(self.profile, self._hosts.machines)
        self._standby = _supervisor_process()
        machines: Sequence[Ready] = ()
        try:
            machines = prepare(self._hosts, self.profile.model.task, self._prepare_options)
            take_every_gpu(self.profile, machines, self._planned_names())
            if self.profile.data.local_data:
                members, links = plan_run(self.profile, machines).members, [link for link, _ in machines]
                require_data(self.profile, links, members, self._prepare_options.tell)
            self._phases.end("machines: checked")
            profile = fit_or_divide(self.profile, memory_budgets(self.profile, machines), self._prepare_options.tell)
            require_permitted(machines, profile)
            planned = plan_machines(machines, profile, self._plan_options, self._prepare_options.tell)
            self._hosts = updated_hosts(self._hosts, [link for link, _ in machines]).only(planned.plan.machines)
            self._phases.end("machines: planned")
            return planned
        except BaseException:
            self.dismiss()
            raise
        finally:
            for link, _ in machines:
                link.close()

    def _planned_names(self) -> Collection[str]:
        """Return the members of the plan that was given; none without one."""
        planning = self._plan_options.planning
        return [member.name for member in planning.settings.members] if planning and planning.settings else []

    def dismiss(self) -> None:
        """Dismiss the standby supervisor without starting a run. Idempotent."""
        if self._standby is not None:
            self._standby.dismiss()
            self._standby = None

    def start(
        self,
        planned: PlannedRun,
        command: Sequence[str],
        fill: Callable[[Path], object] = lambda folder: None,
        output: Path | None = None,
    ) -> Path:
        """Create the run folder, let ``fill`` add to it, start the supervisor, and return the folder.

        Args:
            output: parent of the run folder; default: the profile's output folder.

        Raises:
            BadInput: the folder cannot be created.
            RunFailed: the supervisor did not start.
        """
        supervisor, self._standby = self._standby or _supervisor_process(), None
        try:
            path = self._folder(planned, command, output or Path(self.profile.run.output_dir))
            fill(path)
        except BaseException:
            supervisor.dismiss()
            raise
        supervisor.start(path)
        return path

    def _folder(self, planned: PlannedRun, command: Sequence[str], output: Path) -> Path:
        reason = why_in_words(planned.planning) if planned.planning else ""
        folder = RunFolder.create(output, planned.plan, list(command), run_type="distributed", strategy_reason=reason)
        remember(output)
        if planned.planning is not None:
            write_planning(folder.path, planned.planning, planned.figures)
        save_hosts(self._hosts, folder.path / RUN_HOSTS)
        self._phases.end("command: plan")
        for timing in self._timings:
            folder.append(timing)
        folder.close()
        return folder.path


def _supervisor_process() -> BackgroundProcess:
    return BackgroundProcess("distributed.supervisor")
