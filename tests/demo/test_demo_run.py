"""A scripted run is a run like any other for whoever reads its folder."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from app.cli.main import main
from app.demo.machines import MOST, scripted_machines
from app.demo.player import play
from app.demo.run import start_demo_run, write_demo_run
from app.demo.run_plan import demo_plan
from app.demo.script import script_of
from app.run_state import reduce_events
from distributed.run.requests import leave_request
from profiles.errors import BadInput
from tests.waiting import until
from training.events import EvaluationEvent, MemberEvent, RequestEvent, RunEvent, StepEvent, SyncEvent, UnknownEvent
from training.run_folder import RunFolder, new_run_id
from training.runs import list_runs

pytestmark = pytest.mark.slow

FAST = 150.0


def folder_of(output: Path, machines: int = 3) -> RunFolder:
    return RunFolder.create(output, demo_plan(scripted_machines(machines), new_run_id())[0], ["demo"])


def test_a_finished_run_is_whole_and_alike(tmp_path: Path) -> None:
    first = write_demo_run(tmp_path / "a")
    second = write_demo_run(tmp_path / "b")
    for name in ("events.jsonl", "plan.json", "metrics.json", *(f"logs/{log.name}" for log in first.glob("logs/*"))):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    (summary,) = list_runs(tmp_path / "a")
    assert (summary.status, summary.live) == ("completed", False)
    assert (
        write_demo_run(tmp_path / "c", seed=1).joinpath("events.jsonl").read_bytes()
        != (first / "events.jsonl").read_bytes()
    )


@pytest.mark.parametrize("machines", range(1, MOST + 1))
def test_events_fit_together(tmp_path: Path, machines: int) -> None:
    run = RunFolder.open(write_demo_run(tmp_path, machines))
    events = list(run.events())
    state = reduce_events(events)
    assert state.status == "completed" and state.step == state.total_steps and not state.weights_differ
    assert not any(isinstance(event, UnknownEvent) for event in events)
    assert [event.time for event in events] == sorted(event.time for event in events)
    for rank in range(machines):
        steps = [event for event in events if isinstance(event, StepEvent) and event.member == rank]
        assert [event.step for event in steps] == sorted({event.step for event in steps})
        for before, after in itertools.pairwise(steps):
            assert after.time - before.time >= after.compute + after.wait - 1e-6
    if machines > 1:
        lost = [event for event in events if isinstance(event, MemberEvent) and event.status == "lost"]
        assert lost[0].message and state.members[lost[0].member or 0].status == "done"
        assert any(len(event.members) == machines - 1 for event in events if isinstance(event, SyncEvent))


def test_the_word_error_rate_falls(tmp_path: Path) -> None:
    events = RunFolder.open(write_demo_run(tmp_path)).events()
    rates = [e.metrics["wer"] for e in events if isinstance(e, EvaluationEvent) and e.split == "validation"]
    assert len(rates) >= 4 and rates == sorted(rates, reverse=True)


def test_too_many_machines() -> None:
    with pytest.raises(BadInput, match="1 to 8"):
        scripted_machines(9)


def test_played_run_ends_completed_at_its_pace(tmp_path: Path) -> None:
    with folder_of(tmp_path) as run:
        script = script_of(run.plan(), 0)
        began = time.monotonic()
        assert play(run, script, FAST) == "completed"
        assert time.monotonic() - began >= script.ends / FAST
    assert len(list(run.events())) == len([b for b in script.beats if not hasattr(b.what, "log")]) + 1
    assert (run.path / "completed").exists()


def test_stop_is_obeyed_with_a_snapshot(tmp_path: Path) -> None:
    with folder_of(tmp_path) as run:
        leave_request(run.path, "stop")
        assert play(run, script_of(run.plan(), 0), FAST) == "cancelled"
    assert run.metadata.status == "cancelled"
    assert [e.status for e in run.events() if isinstance(e, RunEvent)][-1] == "cancelled"


@pytest.mark.slow
def test_a_started_run_lives_by_itself_and_pauses(tmp_path: Path) -> None:
    plan, planning = demo_plan(scripted_machines(2), new_run_id())
    path = start_demo_run(tmp_path, plan, planning, ["demo"], speed=10.0)
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
