"""The grid of a start, from a run's events; and what a Plan says will change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from app.wizard.plain.plain_words import plan_lines
from app.wizard.services.launching import STEPS, Grid, refused, tail
from app.wizard.services.outside import Outside
from app.wizard.services.plan import SSH, Copying, coordinator_place, plan_of, saving
from app.wizard.state.records import ItemStatus
from app.wizard.state.state import Answers, PlanRequest, TaskKind, WizardState
from distributed.planning.documents.document import Planning, Settings
from distributed.ssh.errors import PortClosed
from profiles.schema import Profile
from profiles.split import DATA_STAY
from tests.wizard.fake_services import ANNA, HERE
from training.records.events import ErrorEvent, Event, MemberEvent, ProgressEvent, StepEvent
from training.records.plan import MemberPlan, RunPlan
from training.records.run_folder import log_stem

CONFIG = "[profile:mine]\ntask = custom\nmodel_path = ./job.py:build\ncoordinator_port = 4711\n"
NOW = 1000.0
STEP = StepEvent(step=1, epoch=0.1, loss=1, learning_rate=1, samples=1, weight=1, compute=1, wait=0, transfer=0)


def grid(*events: Event) -> Grid:
    members = tuple(MemberPlan(rank=rank, name=name, batch_size=1) for rank, name in enumerate("ab"))
    found = Grid(RunPlan(run_id="1", profile=Profile(name="x"), members=members, engine="mesh"))
    for event in events:
        found.take(event)
    return found


def test_members_go_their_way_one_by_one(tmp_path: Path) -> None:
    events: list[Event] = [
        ProgressEvent(phase="machines", done=2, total=2),
        MemberEvent(member=0, status="started"),
        MemberEvent(member=0, status="ready"),
    ]
    launch = grid(*events).launch(tmp_path, NOW)
    assert launch.steps == STEPS and launch.run == str(tmp_path) and not grid(*events).ready
    assert [sum(cell is ItemStatus.OK for cell in row.cells) for row in launch.rows] == [4, 2]
    steps = [STEP.model_copy(update={"member": rank}) for rank in (0, 1)]
    assert grid(*events, *steps).ready
    launch = grid(*events, *steps).launch(tmp_path, NOW)
    assert {cell for row in launch.rows for cell in row.cells} == {ItemStatus.OK}


def test_a_row_says_what_its_machine_prepares_and_how_far_it_is(tmp_path: Path) -> None:
    started = MemberEvent(member=0, status="started")
    features = ProgressEvent(member=0, phase="preparing the recordings (train)", done=300, total=3880)
    row, other = grid(started, features).launch(tmp_path, NOW).rows
    assert (row.phase, other.phase) == ("preparing the recordings (train) 300/3880", "")
    later = features.model_copy(update={"time": features.time + 60.0, "done": 1880})
    phase = grid(started, features, later).launch(tmp_path, NOW).rows[0].phase
    assert phase == "preparing the recordings (train) 1880/3880, 1:16 left"
    assert grid(started, features, MemberEvent(member=0, status="ready")).launch(tmp_path, NOW).rows[0].phase == ""


def test_what_goes_wrong_is_in_its_row_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "b.log").write_text("\n".join(f"line {number}" for number in range(100)))
    events = (
        MemberEvent(member=1, status="started"),
        ErrorEvent(member=1, message="no memory", hint="a smaller batch"),
    )
    row = grid(*events).launch(tmp_path, NOW).rows[1]
    assert (row.status, row.cause, row.fix) == (ItemStatus.FAILED, "no memory", "a smaller batch")
    assert row.cells[3] is ItemStatus.FAILED and row.log[-1] == "line 99"
    assert grid(*events).launch(tmp_path, NOW).rows[0].status is ItemStatus.WORKING


def test_a_member_has_its_own_log_whatever_its_name(tmp_path: Path) -> None:
    for name in ("tower:cuda:0", "tower", "tower-2"):
        (tmp_path / f"{log_stem(name)}.log").write_text(f"of {name}\n")
    assert [tail(tmp_path, name) for name in ("tower:cuda:0", "tower")] == [("of tower:cuda:0",), ("of tower",)]


def test_a_member_without_a_log_has_none(tmp_path: Path) -> None:
    assert tail(tmp_path, "x") == ()


def test_machines_that_refuse_have_a_row_each() -> None:
    launch = refused(["a", "b"], [PortClosed("b", "its port is closed", "start sshd")])
    assert [(row.status, row.cause) for row in launch.rows] == [
        (ItemStatus.OK, ""),
        (ItemStatus.FAILED, "its port is closed"),
    ]


def test_events_of_strangers_change_nothing() -> None:
    before = grid().launch(Path("x"), NOW)
    assert grid(STEP, STEP.model_copy(update={"member": 7})).launch(Path("x"), NOW) == before


def test_a_plan_says_what_changes_where(tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(CONFIG)
    plan = plan_of(PlanRequest((HERE, ANNA), Answers(profile="mine")), config, Outside())
    signs = {(row.sign, row.machine) for row in plan.changes}
    assert signs == {("+", "this computer"), ("~", "anna"), ("+", "anna")}
    assert plan.encrypted == (SSH,) and plan.network == ("SSH from this computer to each machine",)
    assert plan.command.endswith(" train mine-2-machines") and len(plan.files) == 2
    alone = plan_of(PlanRequest((HERE,), Answers(profile="mine")), config, Outside())
    assert (alone.way, alone.network, alone.encrypted, alone.copying) == ("desk alone", (), (), "")
    assert list(tmp_path.iterdir()) == [config]


def test_a_plan_says_that_data_stay_where_they_are(tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(f"{CONFIG}local_data = true\n")
    plan = plan_of(PlanRequest((HERE, ANNA), Answers(profile="mine")), config, Outside())
    lines = list(plan_lines(WizardState().putting(TaskKind.PLAN, value=plan)))
    assert f"  data: {DATA_STAY}" in lines and any(
        "on anna: copies what is missing of code and model" in line for line in lines
    )


@pytest.mark.parametrize(
    ("files_there", "changes", "summary"),
    [
        ({}, (5, 5), "up to 10 B: only what is missing"),
        ({"anna": frozenset("ab"), "bert": frozenset()}, (0, 5), "5 B that the machines lack"),
        (
            {"anna": frozenset("ab"), "bert": frozenset("abc")},
            (0, 0),
            "nothing: code, data and model are there",
        ),
    ],
)
def test_a_plan_counts_only_what_is_copied(
    files_there: dict[str, frozenset[str]], changes: tuple[int, int], summary: str
) -> None:
    copying = Copying({"a": 2, "b": 3}, files_there, data_stay=False)
    rows = [copying.change(name, name, "~/muster") for name in ("anna", "bert")]
    assert tuple(row.bytes for row in rows) == changes and copying.summary(rows) == summary
    assert all(("nothing is copied" in row.what) == (row.bytes == 0) for row in rows)


@pytest.mark.parametrize(("chosen", "place"), [("anna", "anna"), ("desk", "this computer"), ("", "this computer")])
def test_the_coordinators_port_is_opened_where_the_plan_puts_it(chosen: str, place: str, tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(CONFIG)
    request = PlanRequest((HERE, ANNA), Answers(profile="mine"))
    settings = Settings(options={}, members=(), engine="mesh", coordinator=chosen)
    planning = cast(Planning, SimpleNamespace(settings=settings))
    assert coordinator_place(replace(saving(request, config), planning=planning)) == place
