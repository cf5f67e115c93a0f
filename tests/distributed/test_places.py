"""Which members are watched by their process: those on the machine of the coordinator."""

from __future__ import annotations

from typing import Literal, NoReturn

import pytest

from distributed.hosts.schema import Machine
from distributed.machine.link import Link
from distributed.run.run_machines import seats_of, way_to, with_places
from profiles.schema import Profile
from training.plan import Launch, MemberPlan, RunPlan


def links(center: str = "") -> list[Link]:
    hosts = {"here": "localhost", "a": "10.0.0.1", "b": "10.0.0.2"}
    machines = [Machine(name=name, address=host, carries_coordinator=name == center) for name, host in hosts.items()]
    return [Link(machine, nobody) for machine in machines]


def nobody() -> NoReturn:
    raise AssertionError("nobody is called")


@pytest.mark.parametrize(
    ("engine", "coordinator", "local"),
    [("mesh", "", [True, False, False]), ("mesh", "a", [False, True, False]), ("nccl", "a", [False, True, False])],
)
def test_who_is_beside_the_coordinator(engine: Literal["mesh", "nccl"], coordinator: str, local: list[bool]) -> None:
    members = tuple(MemberPlan(rank=rank, name=name, batch_size=2) for rank, name in enumerate(("here", "a", "b")))
    plan = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine=engine)
    placed = with_places(plan, seats_of(links(coordinator), 3))
    assert [member.local for member in placed.members] == local
    assert placed.hash() == plan.hash()


def test_the_relay_of_a_launched_script_is_dialled_and_its_store_is_not() -> None:
    members = tuple(MemberPlan(rank=rank, name=name, batch_size=1) for rank, name in enumerate("ab"))
    job = Launch(script="x.py", machines=(0, 1), addresses=("10.0.0.1", "10.0.0.2"))
    plan = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine="mesh", launch=job)
    direct = way_to(Link(Machine(name="a", address="10.0.0.1"), nobody, "10.0.0.1"), plan)
    assert direct("10.0.0.9:4000") == "10.0.0.9:4000"
    with pytest.raises(AssertionError, match="nobody is called"):  # it would be forwarded
        direct("127.0.0.1:4000")
    jumped = way_to(Link(Machine(name="b"), nobody), plan)
    with pytest.raises(AssertionError, match="nobody is called"):
        jumped("10.0.0.9:4000")
    here = way_to(Link(Machine(name="me", address="localhost"), nobody, "127.0.0.1"), plan)
    assert here("0.0.0.0:4000") == "127.0.0.1:4000"
