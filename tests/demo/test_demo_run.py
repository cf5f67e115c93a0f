"""A run of the tour is a run like any other for whoever reads its folder."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from app.cli.main import main
from app.dashboard.app import DashboardApp
from app.dashboard.reader import Picture
from app.dashboard.tabs.network import link_map
from app.demo import MOST
from app.demo.course import LOG, recorded_training
from app.demo.fixture import fixture
from app.demo.run import Player, recorded, start_demo_run
from app.demo.services import recommended, write_demo_run
from app.run_view.run_state import reduce_events
from distributed.launcher import PlannedRun
from distributed.planning.documents.document import Figures
from distributed.planning.feedback import FIGURES
from profiles.errors import BadInput
from tests.screens.pilot import run as run_app
from tests.screens.pilot import text, until_text
from tests.waiting import until
from training.records.events import (
    EvaluationEvent,
    MemberEvent,
    RequestEvent,
    RunEvent,
    StepEvent,
    SyncEvent,
    UnknownEvent,
)
from training.records.run_folder import RunFolder
from training.records.runs import list_runs
from training.run.requests.request_book import leave_request

pytestmark = pytest.mark.slow

FAST = 150.0


@pytest.fixture(scope="module")
def three() -> PlannedRun:
    return recommended(3)


def player(output: Path, planned: PlannedRun, speed: float = FAST) -> tuple[RunFolder, Player]:
    run = RunFolder.create(output, planned.plan, ["demo"])
    return run, Player(run, recorded(planned.plan), time.time(), speed)


def test_a_finished_run_is_whole_and_alike(tmp_path: Path) -> None:
    first = write_demo_run(tmp_path / "a")
    second = write_demo_run(tmp_path / "b")
    for name in ("events.jsonl", "plan.json", "metrics.json", *(f"logs/{log.name}" for log in first.glob("logs/*"))):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert {log.stem for log in first.glob("logs/*")} == {"coordinator", "demo-macbook", "demo-studio"}
    (summary,) = list_runs(tmp_path / "a")
    assert (summary.status, summary.live) == ("completed", False)
    assert (
        write_demo_run(tmp_path / "c", seed=1).joinpath("events.jsonl").read_bytes()
        != (first / "events.jsonl").read_bytes()
    )


def test_its_dashboard_draws_the_links_and_nothing_is_learnt_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.planning.feedback.remember", lambda *_: pytest.fail("of machines that are not"))
    run = RunFolder.open(write_demo_run(tmp_path))
    figures = Figures.read(run.path / FIGURES)
    picture = Picture(run.path, reduce_events(run.events()), plan=run.plan(), figures=figures)
    drawn = link_map(picture, 120, 28).plain
    assert "demo-studio" in drawn and "Wi-Fi" in drawn and "cable" in drawn


def test_its_end_says_what_was_promised_and_reached(tmp_path: Path) -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "promised; demo-pc alone 4:17)")
        assert "WER     test        85.8 % -> 0.1 %" in text(pilot.app)

    run_app(DashboardApp(write_demo_run(tmp_path)), drive)


@pytest.mark.parametrize("machines", range(1, MOST + 1))
def test_events_fit_together(tmp_path: Path, machines: int) -> None:
    run = RunFolder.open(write_demo_run(tmp_path, machines))
    plan, events = run.plan(), list(run.events())
    state = reduce_events(events)
    assert state.status == "completed" and state.step == state.total_steps and not state.weights_differ
    size = plan.world_size
    assert len(state.members) == size <= machines  # the plan leaves out who would hold the others up
    assert not any(isinstance(event, UnknownEvent) for event in events)
    assert [event.time for event in events] == sorted(event.time for event in events)
    for member in plan.members:
        steps = [event for event in events if isinstance(event, StepEvent) and event.member == member.rank]
        assert [event.step for event in steps] == sorted({event.step for event in steps})
        assert {event.samples for event in steps} == {member.batch_size}
        for before, after in itertools.pairwise(steps):
            assert after.time - before.time >= after.compute + after.wait - ROUNDED
    syncs = [event for event in events if isinstance(event, SyncEvent)]
    assert bool(syncs) == (size > 1)
    if size > 1:
        lost = [event for event in events if isinstance(event, MemberEvent) and event.status == "lost"]
        assert lost[0].message and state.members[lost[0].member or 0].status == "done"
        assert {len(event.members) for event in syncs} <= {size - 1, size}


ROUNDED = 0.001
"""Seconds: times and durations of the record have four digits."""


def test_one_machine_is_lost_and_comes_back(three: PlannedRun) -> None:
    """The root cause is in that machine's log, and it comes back at a synchronisation."""
    assert three.planning is not None and three.planning.best is not None
    events = recorded(three.plan)
    (lost,) = [e for e in events if isinstance(e, MemberEvent) and e.status == "lost"]
    lines = [e.model_extra or {} for e in events if isinstance(e, UnknownEvent) and e.kind == LOG]
    assert "link is down" in next(line["text"] for line in lines if "ERROR" in line["text"])
    back = [e.step for e in events if isinstance(e, StepEvent) and e.member == lost.member and e.time > lost.time]
    assert (back[0] - 1) % three.planning.best.choice.interval == 0


def test_the_run_is_what_the_plan_promised(tmp_path: Path, three: PlannedRun) -> None:
    """Three machines are about 1.9 times as fast as the best of them alone, and every figure of the plan is met."""
    assert three.planning is not None and three.planning.best is not None
    best = three.planning.best
    run = RunFolder.open(write_demo_run(tmp_path))
    assert best.useful_speed_up == pytest.approx(1.9, abs=0.1)
    assert run.metadata.metrics["prediction"]["ratio"] == pytest.approx(1, abs=0.02)
    events = list(run.events())
    syncs = {event.step for event in events if isinstance(event, SyncEvent)}
    assert syncs == {*range(best.choice.interval, best.steps + 1, best.choice.interval)}
    assert max(e.step for e in events if isinstance(e, StepEvent)) == best.steps


def test_the_plan_is_that_of_the_recorded_training(three: PlannedRun) -> None:
    assert three.planning is not None and three.planning.best is not None
    assert (three.planning.best.steps, three.plan.world_size) == (
        recorded_training().steps,
        len(recorded_training().losses),
    )


def test_every_way_to_train_can_be_played(three: PlannedRun) -> None:
    """A run of the exact way and of one machine alone takes as long as its own plan says."""
    alone = three.plan.model_copy(update={"members": three.plan.members[:1]})
    slower = [event.time for event in recorded(alone)][-1]
    assert slower > [event.time for event in recorded(three.plan)][-1]


def test_no_two_machines_have_the_same_pid(three: PlannedRun) -> None:
    said = [e.message for e in recorded(three.plan) if isinstance(e, MemberEvent) and e.status == "started"]
    assert len({*said}) == len(said) == 4


def test_the_word_error_rate_of_all_test_clips_falls_from_86_to_below_1_percent(tmp_path: Path) -> None:
    evaluations = [e for e in RunFolder.open(write_demo_run(tmp_path)).events() if isinstance(e, EvaluationEvent)]
    assert {e.split: e.samples for e in evaluations} == fixture().workload.evaluated == {"validation": 240, "test": 480}
    before, after = (e.metrics["wer"] for e in evaluations if e.split == "test")
    assert before == pytest.approx(0.86, abs=0.01) and after < 0.01


@pytest.mark.parametrize("number", [0, MOST + 1])
def test_too_many_machines(number: int) -> None:
    with pytest.raises(BadInput, match="1 to 8"):
        recommended(number)


def test_played_run_ends_completed_at_its_pace(tmp_path: Path, three: PlannedRun) -> None:
    begun = time.time()
    run, playing = player(tmp_path, three)
    script = recorded(three.plan)
    with run:
        assert playing.play() == "completed"
        assert time.time() >= begun + script[-1].time / FAST
    assert len(list(run.events())) == len([e for e in script if e.kind != LOG]) + 1
    assert (run.path / "completed").exists()


def test_stop_is_obeyed_with_a_snapshot(tmp_path: Path, three: PlannedRun) -> None:
    run, playing = player(tmp_path, three)
    with run:
        leave_request(run.path, "stop")
        assert playing.play() == "cancelled"
    assert run.metadata.status == "cancelled"
    assert [e.status for e in run.events() if isinstance(e, RunEvent)][-1] == "cancelled"


@pytest.mark.slow
def test_a_started_run_lives_by_itself_and_pauses(tmp_path: Path) -> None:
    path = start_demo_run(tmp_path, recommended(2), ["demo"], speed=10.0)
    reach(path, "running", "running")
    assert RunFolder.open(path).live
    leave_request(path, "pause")
    reach(path, "paused", "paused")
    leave_request(path, "drop", "demo-studio")
    leave_request(path, "add", "demo-nobody")
    leave_request(path, "resume")
    reach(path, "running", "running")
    leave_request(path, "stop")
    reach(path, "cancelled", "cancelled")
    said = [(e.action, e.outcome) for e in RunFolder.open(path).events() if isinstance(e, RequestEvent)]
    assert [pair for pair in said if pair[1] != "accepted"] == [
        ("pause", "done"), ("drop", "done"), ("add", "refused"), ("resume", "done"), ("stop", "done"),
    ]  # fmt: skip


def test_demo_run_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo-run", "--at-once", "--machines", "2", "--json", "--output", str(tmp_path)]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert RunFolder.open(Path(said["run_dir"])).metadata.status == "completed"
    assert main([*words[:3], "9", *words[4:]]) == 2


def reach(path: Path, *statuses: str) -> None:
    """Wait until the run's metadata has one of these states."""
    until(lambda: RunFolder.open(path).metadata.status in statuses)
