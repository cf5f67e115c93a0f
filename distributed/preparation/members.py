"""Who takes part in a run: ranks, devices and batch sizes for machines that are ready, and the memory they have."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Sequence

from distributed.hosts.schema import Machine
from distributed.machine.link import address_towards
from distributed.planning.fitting import Room
from distributed.preparation.preflight import Facts, Ready
from distributed.system import interface_of
from profiles.schema import Profile
from training.local_plan import plan_local_run
from training.plan import MemberPlan, RunPlan
from training.resources import count_gpus, gpu_memory, total_memory

_HERE = "this computer"


def plan_run(profile: Profile, machines: Sequence[Ready]) -> RunPlan:
    """Give ranks, devices and batch sizes to the machines, in their order.

    Raises:
        BadInput: the profile does not fit that many members.
    """
    seats = [(link.machine, facts, device) for link, facts in machines for device in link.machine.devices or ("",)]
    local = plan_local_run(profile, len(seats), here=False)
    engine = "torch" if _wants_torch(profile, seats) else "hub"
    network = engine == "torch" and len({machine.name for machine, *_ in seats}) > 1
    far = [link.host for link, _ in machines if link.host and not link.machine.here]
    members = []
    for (machine, facts, device), planned in zip(seats, local.members, strict=True):
        seen = facts.interface
        if machine.here and far:  # it was reached over loopback; the others reach it over the way to them
            seen = interface_of(address_towards(far[0]))
        interface = (machine.interface or seen) if network else ""
        members.append(member_of(machine, device, planned.rank, profile, planned.batch_size, interface))
    return local.model_copy(update={"members": tuple(members), "engine": engine})


def member_of(
    machine: Machine, device: str, rank: int, profile: Profile, batch_size: int = 0, interface: str = ""
) -> MemberPlan:
    """Return the member that a device of a machine becomes; by default with the profile's batch size."""
    kind, _, index = (device or profile.training.device).partition(":")
    return MemberPlan(
        rank=rank,
        name=_seat_name(machine, device),
        device=kind,
        device_index=int(index or 0),
        batch_size=batch_size or profile.training.batch_size,
        threads=profile.training.threads,
        interface=interface,
    )


def seat_names(machines: Sequence[Ready]) -> list[str]:
    """Return the names of the members that :func:`plan_run` gives these machines, in the order of their ranks."""
    return [_seat_name(link.machine, device) for link, _ in machines for device in link.machine.devices or ("",)]


def _seat_name(machine: Machine, device: str) -> str:
    return f"{machine.name}:{device}" if len(machine.devices) > 1 else machine.name


def _wants_torch(profile: Profile, seats: Sequence[tuple[Machine, Facts, str]]) -> bool:
    """Whether the torch engine is asked for, or is faster and safe: on one machine that has a CUDA device for each.

    Its data plane is not encrypted, so over a network only a person chooses it.
    """
    if profile.strategy.engine != "auto":
        return profile.strategy.engine == "torch"
    one_machine = len({machine.name for machine, *_ in seats}) < 2
    if len(seats) < 2 or not one_machine or profile.training.device not in ("auto", "cuda"):
        return False
    return all((facts.gpus and "+cpu" not in facts.torch and device in ("", "auto")) or device.startswith("cuda")
               for _, facts, device in seats)  # fmt: skip


def room_here(profile: Profile, workers: int) -> list[Room]:
    """Return the memory that this computer has for workers."""
    device = profile.training.device
    gpus = count_gpus() if device in ("auto", "cuda") and "+cpu" not in importlib.metadata.version("torch") else 0
    if gpus:
        return [Room(_HERE, gpu_memory(), "cuda", -(-workers // gpus))]
    total, limited = total_memory()
    return [Room(_HERE, total, _shared(device, sys.platform == "darwin"), workers, limited)]


def rooms_of(profile: Profile, machines: Sequence[Ready]) -> list[Room]:
    """Return the memory of machines and of their GPUs, each with the members that would share it."""
    found = []
    for link, facts in machines:
        kinds = Counter(_kind(device or profile.training.device, facts) for device in link.machine.devices or ("",))
        for kind, members in kinds.items():
            if kind.startswith("cuda"):
                found.append(Room(link.name, facts.gpu_memory, "cuda", members))
            elif link.machine.here:
                total, limited = total_memory()
                found.append(Room(link.name, total, kind, members, limited))
            else:
                found.append(Room(link.name, facts.memory, kind, members))
    return found


def _kind(device: str, facts: Facts) -> str:
    """Return what a member computes on: ``cpu``, ``mps``, or a GPU with its number."""
    if device.startswith("cuda") or (device == "auto" and facts.gpus and "+cpu" not in facts.torch):
        return device if device.startswith("cuda") else "cuda"
    return _shared(device, facts.system == "Darwin")


def _shared(device: str, mac: bool) -> str:
    return "mps" if device == "mps" or (device == "auto" and mac) else "cpu"
