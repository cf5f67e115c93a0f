"""Where the members of a run are: who is beside the coordinator, how it is dialled, who is missing at the start."""

from __future__ import annotations

from typing import Literal

import pytest
from scripted_connection import undialled

from distributed.machine.link import MachineLink
from distributed.run.run_machines import StartWatch, seats_of, way_to, with_places
from profiles.schema import Profile
from training.events import MemberEvent, ProgressEvent, RunEvent
from training.plan import LaunchedScript, MemberPlan, RunPlan


def links(center: str = "") -> list[MachineLink]:
    hosts = {"here": "localhost", "a": "10.0.0.1", "b": "10.0.0.2"}
    return [undialled(name, address=host, carries_coordinator=name == center) for name, host in hosts.items()]


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
    job = LaunchedScript(script="x.py", machines=(0, 1), addresses=("10.0.0.1", "10.0.0.2"))
    plan = RunPlan(run_id="r", profile=Profile(name="p"), members=members, engine="mesh", launch=job)
    direct = way_to(undialled("a", "10.0.0.1", address="10.0.0.1"), plan)
    assert direct("10.0.0.9:4000") == "10.0.0.9:4000"
    with pytest.raises(AssertionError, match="nobody is called"):  # it would be forwarded
        direct("127.0.0.1:4000")
    jumped = way_to(undialled("b"), plan)
    with pytest.raises(AssertionError, match="nobody is called"):
        jumped("10.0.0.9:4000")
    here = way_to(undialled("me", "127.0.0.1", address="localhost"), plan)
    assert here("0.0.0.0:4000") == "127.0.0.1:4000"


def test_every_missing_machine_and_its_reason() -> None:
    watch = StartWatch(["a", "b", "c", "d"])
    for rank in (0, 1, 2):
        watch(MemberEvent(member=rank, status="started"))
    watch(ProgressEvent(member=1, phase="features", done=3, total=10))
    watch(ProgressEvent(member=2, phase="features", done=10, total=10))
    watch(MemberEvent(member=0, status="joined"))
    b, c, d = watch.missing()
    assert b == "waiting for b: it is preparing (features: 3 of 10)"
    assert c.startswith("waiting for c: its worker runs and has not reached the coordinator")
    assert d == "waiting for d: its worker has not started yet"


def test_nobody_is_missing_once_the_run_has_begun() -> None:
    watch = StartWatch(["a"])
    assert not watch.begun
    watch(RunEvent(status="running"))
    assert watch.begun
