"""Assigns ready machines their members in a run: ranks, devices, batch sizes, and who carries the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

from distributed.hosts.schema import Machine
from distributed.machine.link import MachineLink, address_towards
from distributed.planning.layouts.divided import DIRECT_MBIT, sent_bytes
from distributed.planning.layouts.layout_documents import Layout, member_name
from distributed.preparation.preflight import Facts, Ready
from distributed.ssh.forward import LOOPBACK
from distributed.system import interface_of
from profiles.errors import BadInput
from profiles.quantities import bytes_text, rate_text
from profiles.schema import Profile
from training.layouts.inside.checks import INSIDE_LAYOUTS
from training.records.plan import DevicePlan, MemberPlan, RunPlan
from training.run.local_plan import check_devices, own_data, plan_local_run
from training.tasks.registry import size_for


def plan_run(
    profile: Profile,
    machines: Sequence[Ready],
    names: Collection[str] | None = None,
    link_mbit: Callable[[], float] = lambda: 0.0,
) -> RunPlan:
    """Assign ranks, devices and batch sizes to the machines, in their order.

    Args:
        names: members that take part; ``None``: all of :func:`member_names`.
        link_mbit: returns the rate of the slowest link between two of the machines, which shards need; 0: unknown.

    Raises:
        BadInput: the profile does not fit that many members.
    """
    taking_part = [
        (link.machine, facts, name)
        for link, facts in machines
        for name in devices_of(link.machine)
        if names is None or name in names
    ]
    machine_names = {machine.name for machine, *_ in taking_part}
    machines = [ready for ready in machines if ready[0].name in machine_names]
    _check_inside(profile, [link.name for link, _ in machines], link_mbit)
    local = plan_local_run(profile, len(taking_part), on_this_machine=False)
    members = [
        member_of(machine, name, rank, profile, local.process(rank).member.batch_size, facts)
        for rank, (machine, facts, name) in enumerate(taking_part)
    ]
    engine = "nccl" if not local.is_staged and _wants_nccl(profile, taking_part) else "mesh"
    if len(machines) > 1:
        members = [member.on_device(interface=_interface(member.machine, engine, machines)) for member in members]
    if local.is_staged:
        addresses = addresses_of(machines)
        groups = [[members[rank] for rank in local.processes_of(member.rank)] for member in local.members]
        members = [_as_one(rank, group, addresses, len(groups) == 1) for rank, group in enumerate(groups)]
    update = {"members": tuple(members), "engine": engine, "coordinator": _coordinator(machines)}
    if local.is_staged and len(members) > 1 and not can_have_members(machines):
        message = f"{update['coordinator']} cannot carry the coordinators of members of several devices"
        raise BadInput(message, "leave out coordinator in the hosts file: this computer carries them")
    return local.model_copy(update=update)


def check_machines(profile: Profile, machines: Sequence[Machine]) -> None:
    """Check the layout of a run on listed machines, before they are prepared.

    Raises:
        BadInput: it does not work with so many machines or devices; how many GPUs one has is not known yet.
    """
    _check_inside(profile, [machine.name for machine in machines], lambda: DIRECT_MBIT)  # not known yet
    may_have_gpus = profile.training.device in ("auto", "cuda") and not all(machine.devices for machine in machines)
    check_devices(profile, 0 if may_have_gpus else sum(len(devices_of(machine)) for machine in machines))


def _check_inside(profile: Profile, names: Sequence[str], link_mbit: Callable[[], float]) -> None:
    """Refuse slices of matrices on several machines, and shards unless their links are as fast as a direct cable."""
    layout = profile.run.layout
    if layout not in INSIDE_LAYOUTS or len(names) < 2:
        return
    mbit = link_mbit() if layout == "shard" else 0.0
    if mbit >= DIRECT_MBIT:
        return
    size = size_for(profile)
    sent = sent_bytes(cast(Layout, layout), profile, size, len(names), 4) if size else 0
    amount = f", {bytes_text(sent)} from each machine," if sent else ""
    contents = "weights and gradients" if layout == "shard" else "activations of each layer"
    message = f"layout = {layout} is for the devices of one machine, not for {', '.join(names)}: each step would send"
    message += f" all {contents}{amount} while all wait"
    if mbit:
        message += f", and their slowest link carries {rate_text(mbit)}"
    faster = ", or connect them by a cable of 10 Gbit/s" if layout == "shard" else ""
    raise BadInput(message, f"set layout = pipeline{faster}", option="layout")


def _as_one(rank: int, members: Sequence[MemberPlan], addresses: Mapping[str, str], is_only: bool) -> MemberPlan:
    """Return the member whose model lies on the devices of all these."""
    devices = tuple(member.lead.model_copy(update={"addresses": (addresses[member.machine],)}) for member in members)
    name = member_name([member.machine for member in members], [member.name for member in members], is_only)
    return members[0].model_copy(update={"rank": rank, "name": name, "devices": devices})


def as_cut(
    members: Sequence[MemberPlan], chosen: Sequence[MemberPlan], names: Sequence[str], machines: Sequence[Ready]
) -> tuple[MemberPlan, ...]:
    """Return members of several devices with these in the planned order, each with its blocks.

    Args:
        names: those of the devices in that order, member by member.
    """
    devices = (device for member in members for device in member.devices)
    by_name = dict(zip((name for name in member_names(machines) if name in names), devices, strict=True))
    ordered = iter([by_name[name] for name in names])

    def cut(planned: DevicePlan) -> DevicePlan:
        return next(ordered).model_copy(update={"blocks": planned.blocks, "ahead": planned.ahead})

    return tuple(
        member.model_copy(update={"name": planned.name, "devices": tuple(map(cut, planned.devices))})
        for member, planned in zip(members, chosen, strict=True)
    )


def addresses_of(machines: Sequence[Ready]) -> dict[str, str]:
    """Return the literal address at which each machine is dialled by the others, by name."""
    remote_hosts = [link.host for link, _ in machines if link.host and not link.machine.is_local]
    here = address_towards(remote_hosts[0]) if remote_hosts else LOOPBACK
    return {link.name: here if link.machine.is_local else facts.address for link, facts in machines}


def member_names(machines: Sequence[Ready]) -> list[str]:
    """Return the names of the members that these machines can have, in the order of their ranks."""
    return [name for link, _ in machines for name in devices_of(link.machine)]


def devices_of(machine: Machine) -> dict[str, str]:
    """Return the devices of a machine that train, by the names of their members; empty text: its best device.

    One that is listed more than once has a number from the second time on: ``box:cpu``, ``box:cpu-2``.
    """
    if len(machine.devices) < 2:
        return {machine.name: "".join(machine.devices)}
    repeated = [machine.devices[:number].count(device) for number, device in enumerate(machine.devices)]
    return {
        f"{machine.name}:{device}" + (f"-{repeated[number] + 1}" if repeated[number] else ""): device
        for number, device in enumerate(machine.devices)
    }


def _interface(name: str, engine: str, machines: Sequence[Ready]) -> str:
    """Return the interface of a machine that the hosts file names; with nccl, else the one that faces the others."""
    link, facts = next(ready for ready in machines if ready[0].name == name)
    if link.machine.interface or engine != "nccl":
        return link.machine.interface
    remote_hosts = [link.host for link, _ in machines if link.host and not link.machine.is_local]
    if link.machine.is_local and remote_hosts:  # reached over loopback here; the others use the route between us
        return interface_of(address_towards(remote_hosts[0]))
    return facts.interface


def _coordinator(machines: Sequence[Ready]) -> str:
    """Return the machine that the hosts file wants the coordinator on, else this one; empty: no member is on it."""
    requested = (link.name for link, _ in machines if link.machine.carries_coordinator)
    return next(requested, starter_of(link for link, _ in machines))


def can_have_members(machines: Sequence[Ready]) -> bool:
    """Whether a divided model can have several members: this computer carries a coordinator for each of its stages."""
    return _coordinator(machines) == starter_of(link for link, _ in machines)


def starter_of(links: Iterable[MachineLink]) -> str:
    """Return the name of this machine, which starts the run; empty: it is none of these."""
    return next((link.name for link in links if link.machine.is_local), "")


def member_of(
    machine: Machine, name: str, rank: int, profile: Profile, batch_size: int = 0, facts: Facts | None = None
) -> MemberPlan:
    """Return a member on a machine; by default with the profile's batch size.

    Args:
        name: one of :func:`devices_of`.
        facts: what the machine reported; ``None``: it was not asked.
    """
    kind, _, index = (devices_of(machine)[name] or profile.training.device).partition(":")
    device_plan = DevicePlan(
        machine=machine.name,
        kind=kind,
        index=int(index or 0),
        threads=profile.training.threads,
        coordinator_address=machine.coordinator_at,
        be_polite=machine.be_polite,
        through_ssh=facts is not None and not facts.dials_here,
    )
    return MemberPlan(
        rank=rank,
        name=name,
        batch_size=batch_size or profile.training.batch_size,
        data=own_data(profile, rank, machine.data),
        devices=(device_plan,),
    )


def _wants_nccl(profile: Profile, members: Sequence[tuple[Machine, Facts, str]]) -> bool:
    """Whether nccl is requested, or is faster and safe: on one machine with a CUDA device for each member.

    Its data plane is not encrypted, so over a network it must be chosen explicitly.
    """
    if profile.strategy.engine != "auto":
        return profile.strategy.engine == "nccl"
    one_machine = len({machine.name for machine, *_ in members}) < 2
    if len(members) < 2 or not one_machine or profile.training.device not in ("auto", "cuda"):
        return False
    devices = ((facts, devices_of(machine)[name]) for machine, facts, name in members)
    return all((facts.gpus and "+cpu" not in facts.torch and device in ("", "auto")) or device.startswith("cuda")
               for facts, device in devices)  # fmt: skip
