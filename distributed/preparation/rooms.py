"""The memory of the machines of a run, and the profile as it fits them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from distributed.machine.link import Link
from distributed.planning.cluster import Cluster
from distributed.planning.fitting import Fitted, Room, fitted
from distributed.planning.model_size import size_for
from distributed.preparation.preflight import Facts
from profiles.schema import Profile
from training.gpus import count_gpus, gpu_memory
from training.memory_limit import total_memory

HERE = "this computer"


def fit_here(profile: Profile, workers: int, tell: Callable[[str], None] = lambda line: None) -> Profile:
    """Return the profile as it fits this computer with so many workers; ``tell`` hears what was changed.

    Raises:
        BadInput: what was set cannot fit.
    """
    return _told(fitted(profile, size_for(profile), room_here(profile, workers)), tell)


def fit_machines(
    profile: Profile, machines: Sequence[tuple[Link, Facts]], tell: Callable[[str], None] = lambda line: None
) -> Profile:
    """Return the profile as it fits all machines; ``tell`` hears what was changed.

    Raises:
        BadInput: what was set cannot fit.
    """
    return _told(fitted(profile, size_for(profile), rooms_of(profile, machines)), tell)


def fit_cluster(profile: Profile, cluster: Cluster, tell: Callable[[str], None] = lambda line: None) -> Profile:
    """Return the profile as it fits the machines of a file of figures; ``tell`` hears what was changed.

    Raises:
        BadInput: what was set cannot fit.
    """
    machines = [machine for machine in cluster.machines if machine.trains]
    rooms = [Room(machine.name, machine.memory_total, machine.device) for machine in machines]
    return _told(fitted(profile, size_for(profile), rooms), tell)


def _told(found: Fitted, tell: Callable[[str], None]) -> Profile:
    if found.line:
        tell(found.line)
    return found.profile


def room_here(profile: Profile, workers: int) -> list[Room]:
    """Return the memory that this computer has for workers."""
    device = profile.training.device
    gpus = count_gpus() if device in ("auto", "cuda") and "+cpu" not in importlib.metadata.version("torch") else 0
    if gpus:
        return [Room(HERE, gpu_memory(), "cuda", -(-workers // gpus))]
    total, limited = total_memory()
    return [Room(HERE, total, _shared(device, sys.platform == "darwin"), workers, limited)]


def rooms_of(profile: Profile, machines: Sequence[tuple[Link, Facts]]) -> list[Room]:
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
