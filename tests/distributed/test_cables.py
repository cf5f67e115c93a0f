from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from planner_figures import LARGE, TINY, job, machine
from scripted_connection import undialled

from app.cli.main import main
from app.wizard.services.forecasting import ranked
from distributed.launcher import PlanOptions, choose
from distributed.planning import planner
from distributed.planning.cables import cable_reasons, with_cables
from distributed.planning.documents.cluster import Cluster, Link
from distributed.planning.documents.document import Figures, Reason, Workload
from distributed.planning.reasons import sentence
from profiles.files.resolve import load_profile

if TYPE_CHECKING:
    from distributed.measuring.measure import MeasurementResult


def home(wired: str, wireless: str, mbit: float = 40.0, cable: float = 600.0) -> Cluster:
    """Machines with one letter each, on a cable or on Wi-Fi."""
    names = [*wired, *wireless]
    links = [
        Link(source=a, target=b, mbit=mbit, mbit_back=mbit, rtt_ms=4, medium="wifi", air="wifi")
        if {a, b} & {*wireless}
        else Link(source=a, target=b, mbit=cable, mbit_back=cable, rtt_ms=0.4, medium="ethernet")
        for a, b in combinations(names, 2)
    ]
    return Cluster(machines=tuple(machine(name, wifi=name in wireless) for name in names), links=tuple(links))


def reasons(cluster: Cluster, parameters: int = LARGE) -> list[Reason]:
    work = job(parameters)
    return list(cable_reasons(cluster, planner.plan(cluster, work), lambda wired: planner.plan(wired, work)))


@pytest.mark.slow
def test_a_cable_is_predicted_by_the_planner_with_the_figures_of_a_measured_cable() -> None:
    cluster = home("ab", "c")
    reason = next(iter(reasons(cluster)))
    as_wired = planner.plan(home("abc", ""), job(LARGE)).best
    before = planner.plan(cluster, job(LARGE)).best
    assert as_wired is not None and before is not None
    assert (reason.code, reason.subject, reason.numbers["mbit"]) == ("cable-to", "c", 600)
    assert reason.numbers["wired"] == pytest.approx(as_wired.useful_speed_up)
    assert reason.numbers["useful"] == before.useful_speed_up
    assert sentence(reason) == (
        f"with a cable to machine c (600 Mbit/s): {as_wired.useful_speed_up:.2f} "
        f"instead of {before.useful_speed_up:.2f} times as fast"
    )


def test_two_machines_on_wifi_get_one_cable_of_gigabit() -> None:
    suggestions = reasons(home("", "ab"))
    assert [(reason.code, reason.subject, reason.other, reason.numbers["mbit"]) for reason in suggestions] == [
        ("cable-between", "a", "b", 940)
    ]


@pytest.mark.slow
def test_where_all_are_on_wifi_all_get_one() -> None:
    assert [(reason.code, reason.subject) for reason in reasons(home("", "abc"))] == [("cables-to", "a, b, c")]


@pytest.mark.parametrize(("cluster", "parameters"), [(home("ab", ""), LARGE), (home("a", "b", 300), TINY)])
def test_a_cable_that_would_change_nothing_is_not_named(cluster: Cluster, parameters: int) -> None:
    assert not reasons(cluster, parameters)


def test_a_link_whose_other_end_stays_on_wifi_keeps_its_figures() -> None:
    cluster = home("a", "bc")
    wired = with_cables(cluster, [cluster.machine("b").host], home("ab", "").links[0])
    assert [(link.source, link.target, link.mbit, link.medium) for link in wired.links] == [
        ("a", "b", 600, "ethernet"), ("a", "c", 40, "wifi"), ("b", "c", 40, "wifi")
    ]  # fmt: skip
    assert [machine.wifi for machine in wired.machines] == [False, False, True]


SMALL = Workload(trainable=600_576, total=600_576, samples=14_400)
SAID = re.compile(r"with a cable to machine c \(600 Mbit/s\): \d\.\d\d instead of \d\.\d\d times as fast")


@pytest.mark.slow
def test_plan_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Figures(cluster=home("ab", "c", 1.5), workload=SMALL).write(tmp_path / "figures.json")
    assert main(["plan", "demo-scratch", "--figures", str(tmp_path / "figures.json")]) == 0
    assert SAID.search(" ".join(capsys.readouterr().out.split()))


def test_it_is_among_the_reasons_of_a_plan_and_beside_a_ranking() -> None:
    profile = load_profile("demo-scratch").profile
    measured = SimpleNamespace(figures=Figures(cluster=home("ab", "c", 1.5), workload=SMALL), pairs=(), local_name="")
    machines = [(undialled(name, carries_coordinator=True), None) for name in "abc"]
    planning = choose(cast("MeasurementResult", measured), cast("Any", machines), profile, PlanOptions())
    assert SAID.fullmatch(sentence(planning.reasons[-1]))
    assert ranked(planning, None).cables == (sentence(planning.reasons[-1]),)
