"""The machines of a run: which member is where, how it reaches the coordinator, who comes later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from distributed.checks.own_data import require_data
from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink, address_towards
from distributed.preparation.preflight import NotReady, check, member_of
from distributed.ssh.forward import LOOPBACK
from profiles.errors import BadInput
from training.events import Event, MemberEvent, ProgressEvent, RunEvent
from training.exchange.ways import interface_at
from training.plan import RunPlan

ANY = ("0.0.0.0", "::")
ADDED = "hosts-added.json"
"""Machines that came while the run was on, in its folder."""


def seats_of(links: Sequence[MachineLink], members: int) -> list[MachineLink]:
    """Return the link of every planned rank: one worker for each device of a machine."""
    return [link for link in links for _ in link.machine.devices or ("",)][:members]


def with_places(plan: RunPlan, seats: Sequence[MachineLink]) -> RunPlan:
    """Return the plan that says which members are on the machine of the coordinator."""
    coordinator = coordinator_machine(seats) if plan.has_coordinator else None
    local = [link.machine.here if coordinator is None else link is coordinator for link in seats]
    members = (m.model_copy(update={"local": near}) for m, near in zip(plan.members, local, strict=True))
    return plan.model_copy(update={"members": tuple(members)})


def listening_address(links: Sequence[MachineLink]) -> str:
    """Return the address on which this machine listens for members: all that it has and will have, if any is far."""
    far = [link for link in links if link.host and not link.machine.here]
    if not far:
        return LOOPBACK
    return "::" if any(":" in address_towards(link.host) for link in far) else "0.0.0.0"


def coordinator_machine(links: Sequence[MachineLink]) -> MachineLink | None:
    """Return the machine that carries the coordinator; ``None``: this one."""
    return next((link for link in links if link.machine.carries_coordinator and not link.machine.here), None)


class WayTo:
    """Turns the engine's address into the one that works on a machine at the moment.

    Coordinator and relay are dialled directly where that is possible; the stores of launched scripts listen on
    loopback only and are reached through an SSH forward.

    Args:
        coordinator: its machine, if it is not this one.
    """

    def __init__(self, link: MachineLink, plan: RunPlan, coordinator: MachineLink | None = None) -> None:
        self._link, self._has_coordinator = link, plan.has_coordinator
        self._coordinator = coordinator if plan.has_coordinator else None
        self._chosen = link.machine.coordinator_at
        self._chosen_is_ours = interface_at(self._chosen) != ""
        self._through_ssh = link.machine.through_ssh and self._coordinator is None

    def __call__(self, address: str) -> str:
        """
        Raises:
            SshError: it goes through SSH, and that does not work.
        """
        host, _, port = address.rpartition(":")
        host = self._seen_from_there(host.strip("[]"))
        if host:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        near = LOOPBACK if self._coordinator is None else self._coordinator.host
        return self._link.forward((near, int(port)))

    def avoid(self) -> bool:
        """Take another way than before, which leads nowhere; return whether there is one."""
        if self._through_ssh or self._link.machine.here or self._link is self._coordinator or not self._link.host:
            return False
        self._through_ssh = True
        return True

    def _seen_from_there(self, host: str) -> str:
        """Return the literal address to dial; empty where it goes through SSH."""
        link = self._link
        if link.machine.here or link is self._coordinator:
            near = "::1" if host == "::" else LOOPBACK  # who dials IPv6 listens on it
            return near if self._coordinator is not None or host in ANY else host
        if not link.host or self._through_ssh or (host == LOOPBACK and not self._has_coordinator):
            return ""  # of a launched script the relay is for all, and the store is not
        if self._chosen and not (self._chosen_is_ours and not interface_at(self._chosen)):
            return self._chosen
        if self._coordinator is not None:
            return self._coordinator.host
        return address_towards(link.host) if host in ANY else host


def check_newcomer(
    entry: Machine, links: Sequence[MachineLink], ssh_config: str, plan: RunPlan, room: int
) -> MachineLink:
    """Return the link to a machine that may take part beside those of ``links``.

    Args:
        links: machines that take part, to compare it with: it must be none of them, and have the same torch.
        ssh_config: of the run's hosts file.
        room: bytes that the run brings along.

    Raises:
        NotReady: it cannot; the message says why, the hint what to do.
    """
    machines = (*(link.machine for link in links), entry)
    found = check(Hosts(machines=machines, ssh_config=ssh_config), plan.profile.model.task, room=room)
    for other in found[:-1]:
        other.link.close()
    one = found[-1]
    if one.problem is not None:
        one.link.close()
        raise NotReady([one.problem])
    devices = enumerate(entry.devices or ("",), len(plan.seats))
    require_data(plan.profile, [one.link], [member_of(entry, device, rank, plan.profile) for rank, device in devices])
    return one.link


def note_added(run_dir: Path, entry: Machine, ssh_config: str) -> None:
    """Record a machine in the run folder, so that a later search for what is left of the run includes it."""
    others = added_machines(run_dir)
    if entry.name not in {machine.name for machine in others}:
        save_hosts(Hosts(machines=(*others, entry), ssh_config=ssh_config), run_dir / ADDED)


def added_machines(run_dir: Path) -> tuple[Machine, ...]:
    """Return the machines that came while a run was on."""
    with contextlib.suppress(BadInput):
        if (run_dir / ADDED).is_file():
            return load_hosts(run_dir / ADDED).machines
    return ()


def all_hosts(run_dir: Path) -> Hosts:
    """Return all machines that a run has ever had.

    Raises:
        BadInput: its hosts file cannot be read.
    """
    hosts = load_hosts(run_dir / RUN_HOSTS)
    known = {machine.name for machine in hosts.machines}
    later = (machine for machine in added_machines(run_dir) if machine.name not in known)
    return hosts.model_copy(update={"machines": (*hosts.machines, *later)})


class StartWatch:
    """Which members are missing while a run starts, and why. Takes the events of the start, from any thread.

    Args:
        names: of the members, by rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._status: dict[int, str] = {}
        self._work: dict[int, ProgressEvent] = {}
        self.begun = False
        """Whether the members have come together."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case RunEvent(status="running"):
                    self.begun = True
                case MemberEvent(status="started" | "joined" as status, member=int(rank)):
                    self._status[rank] = status
                case ProgressEvent(member=int(rank)):
                    self._work[rank] = event

    def missing(self) -> list[str]:
        """Return a line for every member that the others wait for."""
        with self._lock:
            return [self._line(rank) for rank in range(len(self._names)) if self._status.get(rank) != "joined"]

    def _line(self, rank: int) -> str:
        name, work = self._names[rank], self._work.get(rank)
        if rank not in self._status:
            return f"waiting for {name}: its worker has not started yet"
        if work is not None and (work.total is None or work.done < work.total):
            total = f" of {work.total}" if work.total else ""
            return f"waiting for {name}: it is preparing ({work.phase}: {work.done}{total})"
        return f"waiting for {name}: its worker runs and has not reached the coordinator; does a firewall block it?"
