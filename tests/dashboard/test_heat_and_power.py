"""What is shown of heat, power and energy, and that nothing is shown where nobody knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import BEGAN, started, steps, view_of

from app.dashboard.reader import Picture
from app.dashboard.tabs.chart_values import value_text
from app.dashboard.tabs.machines import table_of
from app.demo.services import write_demo_run
from app.html_report import sections
from app.html_report.evidence import read_evidence
from app.run_view.figures import state_document
from app.run_view.headline import headline
from app.run_view.run_state import RunState, reduce_events
from app.trackers.kinds import cell, scalars_of
from profiles.quantities import energy_text
from tests.report.report_runs import write_run
from training.records.events import Event, MachineEvent, MemberEvent
from training.records.run_folder import RunFolder


def load(member: int, at: float = BEGAN + 3, **told: Any) -> MachineEvent:
    return MachineEvent(member=member, time=at, cpu_percent=50, memory_used=10**9, memory_total=10**10, **told)


HOT: list[Event] = [
    load(0),
    load(1, celsius=71.4, watts=120.0, joules=3600.0, meters=("gpu",)),
    load(1, celsius=64.0, watts=118.0, joules=7200.0, meters=("gpu",)),
    load(2, celsius=55.0),
]


def going(*more: Event) -> RunState:
    return reduce_events([*started(), *steps(1, 3), *more])


def cells(state: RunState, **picture: Any) -> dict[str, list[str]]:
    """The cells of each column of the table."""
    columns, rows = table_of(Picture(Path(), state, now=BEGAN + 4, **picture))
    return {column.key: [row.cells[place].plain for row in rows] for place, column in enumerate(columns)}


def test_columns_that_nobody_can_fill_are_not_there() -> None:
    assert not {"heat", "power"} & set(cells(going(load(0))))
    assert not {"age", "since"} & set(cells(going(), live=False))


def test_heat_and_power_stand_beside_who_does_not_know_them() -> None:
    shown = cells(going(*HOT))
    assert shown["heat"] == ["-", "64 °C", "55 °C"]
    assert shown["power"] == ["-", "118 W", "-"]


def test_who_is_gone_has_neither() -> None:
    shown = cells(going(*HOT, MemberEvent(member=1, time=BEGAN + 4, status="lost", name="air")))
    assert (shown["heat"][1], shown["power"][1]) == ("-", "-")


def test_other_programs_that_take_the_processors_are_said() -> None:
    state = going(load(0, others_percent=63.4), load(1, others_percent=63.4).model_copy(update={"cpu_percent": 99.0}))
    assert "other programs use 63 % of the processors of air" in headline(view_of(state, BEGAN + 4)).details


def test_heat_that_slows_and_a_battery_are_said() -> None:
    state = going(load(1, celsius=90.0, throttled=True, on_mains=False, battery_percent=43.0))
    assert "air is slowed down by heat" in headline(view_of(state, BEGAN + 4)).details
    _, rows = table_of(Picture(Path(), state, now=BEGAN + 4))
    assert [line.plain for line in rows[1].detail] == ["slowed down by heat", "runs on battery, 43 %"]


def test_a_battery_that_runs_out_is_said_in_the_headline() -> None:
    def details(percent: float, on_mains: bool = False) -> tuple[str, ...]:
        state = going(load(1, on_mains=on_mains, battery_percent=percent))
        return headline(view_of(state, BEGAN + 4)).details

    remark = "air runs on battery, 24 %: plug it in"
    assert remark in details(24.0)
    assert not any("battery" in detail for detail in (*details(43.0), *details(24.0, on_mains=True)))


def test_who_gives_way_to_its_owner_is_said_with_the_reason_alone() -> None:
    state = going(load(1, celsius=90.0, throttled=True, on_mains=False, gives_way="it runs on battery"))
    assert headline(view_of(state, BEGAN + 4)).details[-1] == "air gives way: it runs on battery"
    _, rows = table_of(Picture(Path(), state, now=BEGAN + 4))
    assert [line.plain for line in rows[1].detail] == ["slowed down by heat", "gives way: it runs on battery"]


def test_energy_goes_on_over_a_new_start_and_is_summed_over_machines() -> None:
    again = MemberEvent(member=1, time=BEGAN + 5, status="started", name="air")
    state = going(*HOT, load(2, joules=100.0), again)
    assert (state.members[1].joules, state.members[1].machine) == (7200.0, None)
    state = reduce_events([load(1, BEGAN + 9, joules=50.0)], state)
    assert (state.members[1].joules, state.members[1].hottest, state.joules) == (7250.0, 71.4, 7350.0)
    assert state.members[0].joules is None


def test_json_holds_it_and_null_where_it_is_unknown() -> None:
    document: dict[str, Any] = state_document(going(*HOT))
    assert document["joules"] == 7200.0
    assert [one["watts"] for one in document["members"]] == [None, 118.0, None]
    assert [one["hottest_celsius"] for one in document["members"]] == [None, 71.4, 55.0]
    assert document["series"]["power"]["newest"] == pytest.approx(119.0)
    assert state_document(going())["joules"] is None


def test_trackers_get_what_is_known() -> None:
    sent = {scalar.name: scalar.value for scalar in scalars_of(HOT[1], 3)}
    assert (sent["machine/celsius"], sent["machine/watts"], sent["machine/joules"]) == (71.4, 120.0, 3600.0)
    assert not any("watts" in scalar.name for scalar in scalars_of(HOT[0], 3))
    assert cell(("gpu", "processor")) == '["gpu", "processor"]'


def test_a_report_tells_the_energy_of_each_machine_and_of_the_run(tmp_path: Path) -> None:
    page = sections.machines(read_evidence(write_run(tmp_path, [*started(), *steps(1, 3), *HOT])))
    assert "71 °C" in page and "2 Wh" in page
    assert "Total energy: 2 Wh, as meters in the machines counted it (gpu)" in page
    assert "Machines without a meter that could be read: 2." in page


def test_a_report_of_machines_without_meters_says_nothing_of_energy(tmp_path: Path) -> None:
    page = sections.machines(read_evidence(write_run(tmp_path, [*started(), *steps(1, 3), load(0)])))
    assert "nergy" not in page and "hottest" not in page


@pytest.mark.parametrize(
    ("joules", "words"), [(None, "-"), (float("nan"), "-"), (0.0, "0 Wh"), (500.0, "0.139 Wh"), (4.4e6, "1.22 kWh")]
)
def test_energy_in_words(joules: float | None, words: str) -> None:
    assert energy_text(joules) == words


def test_degrees_and_watts_fit_the_axis_of_a_chart() -> None:
    assert [value_text(*one) for one in ((71.44, "°C"), (163.2, "W"), (2345.0, "W"))] == ["71.4 °C", "163 W", "2.35 kW"]


@pytest.mark.slow
def test_the_tours_machines_tell_no_more_than_real_ones(tmp_path: Path) -> None:
    events = RunFolder.open(write_demo_run(tmp_path, 3)).events()
    told: dict[int | None, list[MachineEvent]] = {}
    for event in events:
        if isinstance(event, MachineEvent):
            told.setdefault(event.member, []).append(event)
    names = [member.name for member in RunFolder.open(next(tmp_path.iterdir())).plan().members]
    studio, pc = told[names.index("demo-studio")], told[names.index("demo-pc")]
    assert all(event.celsius is None and event.joules is None for event in studio)
    before, after = pc[-2:]
    assert before.watts and before.joules and after.joules
    assert after.joules - before.joules == pytest.approx((after.time - before.time) * after.watts, rel=0.1)
