"""Machines that have joined are listed with the others: name, what they said, and whether they are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.discovery import known_machines
from distributed.discovery.discovery import Discovery
from distributed.discovery.known_machines import KnownKeys, Sources, candidates, look_up
from distributed.discovery.machine_identity import FoundMachine, machines
from distributed.discovery.network_interfaces import Interfaces
from distributed.discovery.sightings import Reachability, SightingOrigin, State, apply
from distributed.hosts.joined import JoinedMachine, save_joined
from tests.waiting import until

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43


@pytest.fixture(autouse=True)
def joined(joining_config: Path) -> JoinedMachine:
    machine = JoinedMachine("studio", KEY, "ada", "Apple M3", "mps, cpu 8 cores", 16 << 30)
    save_joined(machine)
    return machine


def listed(monkeypatch: pytest.MonkeyPatch, *connected: str) -> FoundMachine:
    monkeypatch.setattr(known_machines, "door_status", lambda: {name: {} for name in connected})
    sources = Sources(ssh_config=Path("none"), known_hosts=(), peers=False)
    (candidate,) = candidates(sources, KnownKeys())
    sighting = look_up(candidate, Interfaces(()))
    assert sighting is not None
    (machine,) = machines(apply(State(), sighting))
    return machine


def test_one_that_is_connected_is_online(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = listed(monkeypatch, "studio")
    assert (machine.name, machine.status) == ("studio.joined", Reachability.ONLINE)
    assert machine.found_by == (SightingOrigin.JOINED,)
    assert machine.details["devices"] == "mps, cpu 8 cores" and machine.details["memory"] == str(16 << 30)


def test_one_that_is_away_is_offline_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = listed(monkeypatch)
    assert machine.status is Reachability.OFFLINE
    assert machine.problem is not None and "muster machines join" in machine.problem.hint


def test_one_that_joins_during_a_search_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(ssh_config=Path("none"), known_hosts=(), peers=False)
    with Discovery(sources, browse=False, interfaces=lambda: Interfaces(()), retry_interval=0.05) as discovery:
        until(lambda: "studio.joined" in {machine.name for machine in machines(discovery.state)})
        save_joined(JoinedMachine("attic", f"{KEY[:-1]}B"))
        until(lambda: "attic.joined" in {machine.name for machine in machines(discovery.state)})
