"""The machines of a run: which member runs where, how it reaches the coordinator, which machines are added later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from distributed.checks.machine_data import require_data
from distributed.discovery.relocation import ABSENT, IMPOSTOR, search_one
from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import Dial, MachineLink, address_towards, link_to
from distributed.preparation.members import devices_of, member_of
from distributed.preparation.preflight import NotReady, Ready, check
from distributed.ssh.forward import LOOPBACK
from profiles.errors import BadInput, MusterError
from training.exchange.links.dialling import interface_at
from training.records.events import (
    WAITS_FOR_ENGINE,
    Event,
    MemberEvent,
    ProgressEvent,
    RunEvent,
    TimingEvent,
    WarningEvent,
)
from training.records.plan import DevicePlan, MemberPlan, RunPlan
from training.run.members.other_members import with_newcomers
from training.run.outcome import newest_complete_step, newest_snapshots

ANY = ("0.0.0.0", "::")


def links_of(plan: RunPlan, links: Iterable[MachineLink]) -> dict[str, MachineLink]:
    """Return the links to the machines of a plan, and to those that were added to it, by name.

    Raises:
        BadInput: a machine has none.
    """
    link_by_name = {link.name: link for link in links}
    require_listed(plan, link_by_name)
    return {name: link_by_name[name] for name in _with_added(plan)}


def _with_added(plan: RunPlan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for member in plan.all_members for name in member.machines))


def require_listed(plan: RunPlan, names: Collection[str]) -> None:
    """Refuse a hosts file of a run, with machines of these names, that lacks one of the plan.

    Raises:
        BadInput: a machine is missing.
    """
    if missing := ", ".join(name for name in _with_added(plan) if name not in names):
        message = f"this run has {plan.world_size} members, and {RUN_HOSTS} of its folder does not name {missing}"
        raise BadInput(message, f"put {missing} back into that file")


def on_present(plan: RunPlan, machines: Iterable[Ready]) -> RunPlan:
    """Return the plan of an attempt on the machines that are there: the members of all others are absent."""
    dials_here = {link.name: facts.dials_here for link, facts in machines}

    def today(device: DevicePlan) -> DevicePlan:
        return device.model_copy(update={"through_ssh": not dials_here.get(device.machine, not device.through_ssh)})

    members = tuple(m.model_copy(update={"devices": tuple(map(today, m.devices))}) for m in plan.members)
    absent = tuple(member.rank for member in members if not dials_here.keys() >= set(member.machines))
    return plan.model_copy(update={"members": members, "absent": absent})


def on_others(plan: RunPlan, machines: Sequence[Ready]) -> RunPlan:
    """Return the plan of an attempt on these machines, of which some may be new.

    Raises:
        BadInput: the run takes no new ones.
    """
    fresh = [(link.machine, name, facts) for link, facts in machines if link.name not in plan.machines
             for name in devices_of(link.machine)]  # fmt: skip
    newcomers = [member_of(machine, name, rank, plan.profile, facts=facts).on_device(interface=machine.interface)
                 for rank, (machine, name, facts) in enumerate(fresh, plan.world_size)]  # fmt: skip
    return on_present(with_newcomers(plan, newcomers), machines)


def continuation(events: Iterable[Event], before: RunPlan, plan: RunPlan, held: Collection[int]) -> str:
    """Return a line on where a run goes on with other members than before.

    Args:
        before: its plan until now.
        held: steps of the snapshots on the machines that take part.
    """
    newest = newest_snapshots(events)
    there = {rank: (step, set(live) - set(plan.absent)) for rank, (step, live) in newest.items()
             if rank not in plan.absent}  # fmt: skip
    step = newest_complete_step(there)
    step = step if step in held else max(held)
    new = [member.name for member in plan.members[before.world_size :]]
    old = [m.name for m in before.members if m.rank not in plan.absent]
    gone = [m.name for m in before.members if m.rank in plan.absent]
    words = [f"goes on from the snapshot of step {step} on {', '.join([*old, *(f'{name} (new)' for name in new)])}"]
    return ", ".join([*words, *([f"without {', '.join(gone)}"] if gone else [])])


def rollback_warning(events: Iterable[Event], plan: RunPlan, absent: Collection[int]) -> str:
    """Return a warning where only absent members hold the newest snapshot of a run; empty otherwise."""
    newest = newest_snapshots(events)
    remaining = {rank: (step, set(live) - set(absent)) for rank, (step, live) in newest.items() if rank not in absent}
    step, resume_step = newest_complete_step(newest), newest_complete_step(remaining)
    if not absent or step is None or resume_step is None or resume_step >= step:
        return ""
    names = ", ".join(plan.all_members[rank].name for rank in absent)
    return f"only {names} held the snapshot of step {step}: without it the run goes on from step {resume_step}"


def listening_address(links: Sequence[MachineLink]) -> str:
    """Return the address on which this machine listens for members: any address, if a member is on another machine."""
    remote_links = [link for link in links if link.host and not link.machine.is_local]
    if not remote_links:
        return LOOPBACK
    return "::" if any(":" in address_towards(link.host) for link in remote_links) else "0.0.0.0"


class MachineRoute:
    """Route of one machine to the engine: turns an address of the engine into the one to dial on that machine now.

    Coordinator and relay are dialled directly where that is possible; the store of a launched script, or of the devices
    of a member, listens on loopback only and is reached through an SSH forward.

    Args:
        device: the member's device on that machine.
        coordinator: the coordinator's machine, if it is not this one.
    """

    def __init__(self, link: MachineLink, device: DevicePlan, coordinator: MachineLink | None = None) -> None:
        self._link, self._coordinator = link, coordinator
        self._chosen = device.coordinator_address
        self._chosen_is_ours = interface_at(self._chosen) != ""
        self._through_ssh = device.through_ssh and self._coordinator is None

    def __call__(self, address: str) -> str:
        """Return the address to dial on the machine.

        Raises:
            SshError: the route goes through SSH, and forwarding fails.
        """
        host, _, port = address.rpartition(":")
        host = self._direct_address(host.strip("[]"))
        if host:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        target = LOOPBACK if self._coordinator is None else self._coordinator.host
        return self._link.forward((target, int(port)))

    def switch_route(self) -> bool:
        """Switch from a route that does not work to another one; return whether there is one."""
        if self._through_ssh or self._link.machine.is_local or self._link is self._coordinator or not self._link.host:
            return False
        self._through_ssh = True
        return True

    def _direct_address(self, host: str) -> str:
        """Return the literal address to dial; empty where the route goes through SSH."""
        link = self._link
        loopback = "::1" if host == "::" else LOOPBACK  # a coordinator that listens on IPv6 is dialled on IPv6
        if link is self._coordinator:
            return loopback
        if link.machine.is_local and self._coordinator is None:
            return loopback if host in ANY else host
        if not link.host or self._through_ssh or host == LOOPBACK:
            return ""  # the relay is reachable for all, a store is not
        if self._chosen and not (self._chosen_is_ours and not interface_at(self._chosen)):
            return self._chosen
        if self._coordinator is not None:
            return self._coordinator.host
        return address_towards(link.host) if host in ANY else host


def check_newcomer(
    entry: Machine,
    links: Sequence[MachineLink],
    ssh_config: str,
    plan: RunPlan,
    required_bytes: int,
    dial: Dial = link_to,
) -> tuple[MachineLink, tuple[MemberPlan, ...]]:
    """Check a machine that is to join a run, and return the link to it and its members.

    Args:
        links: participating machines to compare it with: it must be none of them, and have the same torch.
        ssh_config: SSH configuration of the run's hosts file.
        required_bytes: bytes that the run sends to it.

    Raises:
        NotReady: it cannot join; the message says why, the hint what to do.
    """
    machines = (*(link.machine for link in links), entry)
    readiness = check(
        Hosts(machines=machines, ssh_config=ssh_config),
        plan.profile.model.task,
        required_bytes=required_bytes,
        dial=dial,
    )
    for compared in readiness[:-1]:
        compared.link.close()
    newcomer = readiness[-1]
    if newcomer.problem is not None:
        newcomer.link.close()
        raise NotReady([newcomer.problem])
    names = enumerate(devices_of(entry), len(plan.all_members))
    members = tuple(member_of(entry, name, rank, plan.profile, facts=newcomer.facts) for rank, name in names)
    require_data(plan.profile, [newcomer.link], members)
    return newcomer.link, members


def ensure_reachable(
    link: MachineLink,
    ssh_config: str,
    run_dir: Path,
    search: Callable[[Machine, Hosts], str] = search_one,
    dial: Dial = link_to,
) -> str:
    """Connect to a machine of a run; where it is not at its address, search for it by its host key.

    Returns:
        The new address, which is recorded in the run's hosts file; empty: the machine has not moved.

    Raises:
        SshError: it was not found.
    """
    try:
        link.connection()
    except (*ABSENT, *IMPOSTOR):
        hosts = Hosts(machines=(link.machine,), ssh_config=ssh_config)
        address = search(link.machine, hosts)
        if not address:
            raise
        link.follow(dial(link.machine.model_copy(update={"found_at": address}), hosts, None))
        link.connection()
        _record_address(run_dir, link.name, address)
        return address
    return ""


def can_reach(machine: Machine, ssh_config: str, dial: Dial = link_to) -> bool:
    """Return whether a machine can be reached where it was last."""
    hosts = Hosts(machines=(machine,), ssh_config=ssh_config)
    with contextlib.suppress(MusterError), contextlib.closing(dial(machine, hosts, None)) as link:
        link.connection()
        return True
    return False


def _record_address(run_dir: Path, name: str, address: str) -> None:
    """Record the new address of a machine in the run's hosts file, for later requests and resumes."""
    with contextlib.suppress(BadInput):
        hosts = load_hosts(run_dir / RUN_HOSTS)
        entries = (m.model_copy(update={"found_at": address}) if m.name == name else m for m in hosts.machines)
        save_hosts(hosts.model_copy(update={"machines": tuple(entries)}), run_dir / RUN_HOSTS)


def record_added_machine(run_dir: Path, entry: Machine) -> None:
    """Record an added machine in the run's hosts file, so that a later clean-up of the run includes it.

    Raises:
        BadInput: the file cannot be read or written.
    """
    hosts = load_hosts(run_dir / RUN_HOSTS)
    if all(entry.name.casefold() != m.name.casefold() and entry.endpoint != m.endpoint for m in hosts.machines):
        save_hosts(hosts.model_copy(update={"machines": (*hosts.machines, entry)}), run_dir / RUN_HOSTS)


class StartWatch:
    """Tracks which members are missing while a run starts, and why, from its events; thread-safe.

    Args:
        names: names of the members, by rank.
        absent: ranks that are not waited for.
    """

    def __init__(self, names: Sequence[str], absent: Collection[int] = ()) -> None:
        self._names, self._absent = names, absent
        self._lock = threading.Lock()
        self._status: dict[int, str] = {}
        self._work: dict[int, ProgressEvent] = {}
        self._warned: dict[int, str] = {}
        """By rank, the reason of the last warning."""
        self._dialling = set[int]()
        """Ranks of those that know where the coordinator is."""
        self.begun = False
        """Whether all members have joined and the run has begun."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case RunEvent(status="running"):
                    self.begun = True
                case MemberEvent(status="started" | "joined" as status, member=int(rank)):
                    self._status[rank] = status
                case ProgressEvent(member=int(rank)):
                    self._work[rank] = event
                case TimingEvent(member=int(rank), part=part) if part == WAITS_FOR_ENGINE:
                    self._dialling.add(rank)

    def missing(self) -> list[WarningEvent]:
        """Return a warning for every member that the others wait for, unless the last one for it had the same reason.
        While none has joined, nobody waits for those that prepare."""
        with self._lock:
            awaited = [rank for rank in range(len(self._names)) if rank not in self._absent]
            missing = [rank for rank in awaited if self._status.get(rank) != "joined"]
            if missing == awaited:
                missing = [rank for rank in missing if not self._is_preparing(rank)]
            return list(filter(None, map(self._new_warning, missing)))

    def _new_warning(self, rank: int) -> WarningEvent | None:
        name, obstacle = self._names[rank], self._obstacle(rank)
        if self._warned.get(rank) == obstacle:
            return None
        self._warned[rank] = obstacle
        return WarningEvent(message=f"waiting for {name}: {obstacle}", awaited=name)

    def _is_preparing(self, rank: int) -> bool:
        work = self._work.get(rank)
        return work is not None and (work.total is None or work.done < work.total)

    def _obstacle(self, rank: int) -> str:
        """Return what keeps a member from joining."""
        if self._is_preparing(rank):
            stage = self._work[rank].phase
            return "its files are being sent" if stage.startswith("bytes ") else f"it is preparing ({stage})"
        if rank not in self._status:
            return "its worker has not started yet"
        if rank not in self._dialling:
            return "its worker is still starting"
        return "its worker runs and has not reached the coordinator; does a firewall block it?"
