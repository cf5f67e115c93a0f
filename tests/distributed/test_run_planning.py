"""What a plan becomes on machines that are ready: the best paths, the coordinator's place, who is left out."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from planner_figures import measured_pair
from scripted_connection import undialled as link

from distributed import launcher
from distributed.launcher import addresses_of
from distributed.measuring import measure
from distributed.measuring.known_speeds import with_known_speeds
from distributed.measuring.machine_figures import SpeedFigures, placements_of
from distributed.measuring.measure import MeasureOptions
from distributed.planning.documents.cluster import ClusterMachine, Measurement, MeasurementCache
from distributed.planning.documents.document import Workload
from distributed.preparation.code_sync import collect
from distributed.preparation.members import plan_run
from profiles.files.resolve import profile_from_options
from tests.distributed.test_preflight import SOUND

PAIRS = [
    measured_pair("here", "studio", 900, interface="bridge0", interface_back="bridge0", address="169.254.7.2"),
    measured_pair("studio", "tower", 900, interface="en0", address="10.0.0.9"),
    measured_pair("here", "tower", 900, interface="en0", address="10.0.0.9"),
    measured_pair("mini", "studio", 900, interface="bridge1", interface_back="bridge0", address="169.254.8.1"),
]
OWN = {"10.0.0.7": "10.0.0.1", "169.254.7.2": "169.254.7.1", "10.0.0.9": "10.0.0.1", "127.0.0.1": "127.0.0.1"}


best_paths = functools.partial(launcher.best_paths, towards=OWN.__getitem__)


def test_the_coordinator_here_is_dialled_over_the_cable_that_was_fastest() -> None:
    assert best_paths(link("studio", "10.0.0.7"), PAIRS, None, "here") == ("bridge0", "169.254.7.1")


def test_what_ssh_uses_anyway_is_not_written_down() -> None:
    assert best_paths(link("tower", "10.0.0.9"), PAIRS, None, "here") == ("eth0", "")


def test_a_coordinator_elsewhere_is_dialled_where_it_answered() -> None:
    center = link("studio", "10.0.0.7")
    assert best_paths(link("mini", "10.0.0.8"), PAIRS, center, "here") == ("bridge1", "169.254.8.1")
    assert best_paths(link("tower", "10.0.0.9"), PAIRS, center, "here") == (
        "eth0",
        "",
    )  # it was called, it never called
    assert best_paths(center, PAIRS, center, "here")[1] == ""


def test_a_machine_behind_a_jump_host_is_given_no_address() -> None:
    assert best_paths(link("studio"), PAIRS, None, "here")[1] == ""


def test_this_machine_dials_a_coordinator_elsewhere_over_its_best_cable() -> None:
    here, center = link("here", "127.0.0.1", address="localhost"), link("studio", "10.0.0.7")
    assert best_paths(here, PAIRS[:2], center, "here") == ("bridge0", "169.254.7.2")
    assert best_paths(here, PAIRS[:2], None, "here") == ("bridge0", "")


def test_members_are_dialled_where_they_answered_the_fastest_way_first() -> None:
    slow = (("10.0.0.7", "en0", "en0", 90.0),)
    pairs = [*PAIRS[:3], measured_pair("mini", "studio", 900, address="169.254.8.1", paths=slow)]
    assert addresses_of("studio", pairs) == ("169.254.8.1", "169.254.7.2", "10.0.0.7")
    assert addresses_of("here", pairs) == ()  # it called, and nobody called it


@pytest.mark.parametrize(
    ("options", "measured", "sizes"),
    [
        ({}, 3, [14, 7, 3]),
        ({}, 2, [8, 8, 8]),
        ({"shares": "1,1,2"}, 3, [6, 6, 12]),
        ({"balance": "off"}, 3, [8, 8, 8]),
        ({"strategy": "async_diloco"}, 3, [8, 8, 8]),
    ],
)
def test_a_strategy_named_by_hand_has_shares_by_the_speeds_that_are_known(
    tmp_path: Path, options: dict[str, str], measured: int, sizes: list[int]
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.py").write_text("def build(): ...")
    job = {"task": "custom", "model_path": f"{tmp_path}/job/job.py:build", "batch_size": "8", "strategy": "diloco"}
    profile = profile_from_options("p", {**job, **options})
    machines = [(link(name), replace(SOUND, fingerprint=name)) for name in ("attic", "cellar", "garage")]
    plan, told, known = plan_run(profile, machines), list[str](), MeasureOptions(cache=MeasurementCache(tmp_path / "c"))
    for placement, speed in list(zip(placements_of(machines, plan.members), (100, 50, 25), strict=True))[:measured]:
        points = tuple(Measurement(batch=batch, seconds=batch / speed, peak=10**6) for batch in (4, 8))
        machine = ClusterMachine(name=placement.member.name, machine=placement.member.machine, measurements=points)
        workload = Workload(trainable=10, total=20, samples=300, model_path=profile.model.model_path)
        figures = SpeedFigures(machine=machine, workload=workload)
        known.cache.put(measure._placement_key(placement, collect(plan)), figures)
    shared = with_known_speeds(plan, profile, machines, replace(known, tell=told.append))
    assert [member.batch_size for member in shared.members] == sizes
    assert told == (["shares of a step by measured speed: attic 14, cellar 7, garage 3 samples"] if 14 in sizes else [])
