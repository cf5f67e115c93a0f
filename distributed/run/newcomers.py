"""A machine that comes to a run which is on: whether it fits, which member it becomes, and that it is written down."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from distributed.hosts.file import RUN_HOSTS, Hosts, load_hosts, save_hosts
from distributed.hosts.schema import Machine
from distributed.machine.link import Link, address_towards
from distributed.preparation.preflight import NotReady, check
from profiles.errors import BadInput
from training.plan import MemberPlan, RunPlan

ADDED = "hosts-added.json"
"""Machines that came while the run was on, in its folder."""


def check_newcomer(entry: Machine, links: Sequence[Link], ssh_config: str, plan: RunPlan, room: int) -> Link:
    """Return the link to a machine that may take part beside those of ``links``.

    Args:
        entry: the machine.
        links: machines that take part, to compare it with: it must be none of them, and have the same torch.
        ssh_config: of the run's hosts file.
        plan: of the run.
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
    return one.link


def check_way_to_hub(link: Link, listen: str) -> None:
    """Say why a machine could not dial the hub of a run that listens on one address.

    Raises:
        BadInput: the way to it leads over another network than the hub listens on.
    """
    if not link.host or link.machine.here or listen == "0.0.0.0":
        return
    way = address_towards(link.host)
    if way != listen:
        why = f"{link.name} is reached over {way}, and this run's hub listens on {listen} only"
        raise BadInput(why, "stop the run and start it again with this machine")


def newcomer(entry: Machine, device: str, rank: int, plan: RunPlan) -> MemberPlan:
    """Return the member that a device of a new machine becomes: with an equal share of the work."""
    kind, _, index = (device or plan.profile.training.device).partition(":")
    return MemberPlan.model_validate(
        {
            "rank": rank,
            "name": f"{entry.name}:{device}" if len(entry.devices) > 1 else entry.name,
            "device": kind,
            "device_index": int(index or 0),
            "batch_size": plan.profile.training.batch_size,
            "threads": plan.profile.training.threads,
        }
    )


def note_added(run_dir: Path, entry: Machine, ssh_config: str) -> None:
    """Write a machine down, so that whoever looks for what is left of the run asks it too."""
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
