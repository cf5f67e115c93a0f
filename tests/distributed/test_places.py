"""Which members are watched by their process: those on the machine of the hub, or of the torch engine's store."""

from __future__ import annotations

from typing import Literal, NoReturn

import pytest

from distributed.hosts.schema import Machine
from distributed.machine.link import Link
from distributed.run.run_machines import seats_of, with_places
from profiles.schema import Profile
from training.plan import MemberPlan, RunPlan


def links(hub: str = "") -> list[Link]:
    hosts = {"here": "localhost", "a": "10.0.0.1", "b": "10.0.0.2"}
    machines = [Machine(name=name, address=host, carries_hub=name == hub) for name, host in hosts.items()]
    return [Link(machine, nobody) for machine in machines]


def nobody() -> NoReturn:
    raise AssertionError("nobody is called")


@pytest.mark.parametrize(
    ("engine", "hub", "local"),
    [("mesh", "", [True, False, False]), ("mesh", "a", [False, True, False]), ("nccl", "a", [True, False, False])],
)
def test_who_is_beside_the_hub(engine: Literal["mesh", "nccl"], hub: str, local: list[bool]) -> None:
    members = tuple(MemberPlan(rank=rank, name=name, batch_size=2) for rank, name in enumerate(("here", "a", "b")))
    plan = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine=engine)
    placed = with_places(plan, seats_of(links(hub), 3))
    assert [member.local for member in placed.members] == local
    assert placed.hash() == plan.hash()
