"""Who takes part in a run: ranks, devices and batch sizes for machines that are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distributed.hosts.schema import Machine
from distributed.machine.agent_files import interface_of
from distributed.machine.link import Link, address_towards
from distributed.preparation.preflight import Facts
from profiles.schema import Profile
from training.local_plan import plan_local_run
from training.plan import MemberPlan, RunPlan


def plan_run(profile: Profile, machines: Sequence[tuple[Link, Facts]]) -> RunPlan:
    """Give ranks, devices and batch sizes to the machines, in their order.

    Raises:
        BadInput: the profile does not fit that many members.
    """
    far = [link.host for link, _ in machines if link.host and not link.machine.here]
    seats = [
        (link.machine, _as_seen(facts, link.machine, far), device)
        for link, facts in machines
        for device in link.machine.devices or ("",)
    ]
    local = plan_local_run(profile, len(seats), here=False)
    engine = "torch" if _wants_torch(profile, seats) else "hub"
    network = engine == "torch" and not _on_one_machine(seats)
    members = tuple(
        _member(rank, machine, facts, device, local.members[rank].batch_size, profile, network)
        for rank, (machine, facts, device) in enumerate(seats)
    )
    return local.model_copy(update={"members": members, "engine": engine})


def seat_names(machines: Sequence[tuple[Link, Facts]]) -> list[str]:
    """Return the names of the members that :func:`plan_run` gives these machines, in the order of their ranks."""
    return [
        _seat_name(link.machine, device) for link, _ in machines for device in link.machine.devices or ("",)
    ]  # fmt: skip


def _seat_name(machine: Machine, device: str) -> str:
    return f"{machine.name}:{device}" if len(machine.devices) > 1 else machine.name


def _as_seen(facts: Facts, machine: Machine, far: Sequence[str]) -> Facts:
    """This machine was reached over loopback; the others reach it over the interface that leads to them."""
    return replace(facts, interface=interface_of(address_towards(far[0]))) if machine.here and far else facts


def _member(
    rank: int, machine: Machine, facts: Facts, device: str, batch_size: int, profile: Profile, network: bool
) -> MemberPlan:
    kind, _, index = (device or profile.training.device).partition(":")
    return MemberPlan(
        rank=rank,
        name=_seat_name(machine, device),
        device=kind,
        device_index=int(index or 0),
        batch_size=batch_size,
        threads=profile.training.threads,
        interface=machine.interface or facts.interface if network else "",
    )


def _on_one_machine(seats: Sequence[tuple[Machine, Facts, str]]) -> bool:
    return len({machine.name for machine, *_ in seats}) < 2


def _wants_torch(profile: Profile, seats: Sequence[tuple[Machine, Facts, str]]) -> bool:
    """Whether the torch engine is asked for, or is faster and safe: on one machine that has a CUDA device for each.

    Its data plane is not encrypted, so over a network only a person chooses it.
    """
    if profile.strategy.engine != "auto":
        return profile.strategy.engine == "torch"
    if len(seats) < 2 or not _on_one_machine(seats) or profile.training.device not in ("auto", "cuda"):
        return False
    return all((facts.gpus and "+cpu" not in facts.torch and device in ("", "auto")) or device.startswith("cuda")
               for _, facts, device in seats)  # fmt: skip
